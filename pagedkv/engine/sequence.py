"""A request on its way through the engine."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

from .sampling_params import SamplingParams


class Sequence:
    """Token ids, and the counts that the scheduler works on. It knows no pages: BlockManager does, by `id`.

    The counts run ahead of new_tokens: a step that is planned counts as computed, and the token that it samples as one
    of num_tokens, while its value may arrive a step later. num_computed < num_tokens.
    """

    __slots__ = (
        "id", "params", "seed", "eos_token_ids", "prompt", "new_tokens", "num_prompt_tokens", "max_num_tokens",
        "num_tokens", "num_computed", "num_in_pages", "is_swapped", "source", "num_cached", "num_preemptions",
        "retry_step", "finish_reason", "error", "logprobs", "start_time", "first_token_time", "finish_time",
    )  # fmt: skip

    def __init__(
        self, id: int, prompt: Iterable[int], params: SamplingParams, seed: int, eos: frozenset[int], start_time: float
    ) -> None:
        self.id, self.params, self.seed = id, params, seed
        self.eos_token_ids = frozenset() if params.ignore_eos else eos
        self.prompt = array("i", prompt)
        self.new_tokens: list[int] = []  # what was sampled, as far as the host knows
        self.num_prompt_tokens = self.num_tokens = len(self.prompt)
        self.max_num_tokens = self.num_prompt_tokens + params.max_tokens
        self.num_computed = 0  # tokens whose KV is computed by the steps planned so far
        self.num_in_pages = 0  # tokens that the block manager has room for; 0: it holds no page
        self.is_swapped = False  # its KV is in host pages
        self.source = 0  # in which row of the last step its newest token was sampled
        self.num_cached = -1  # prefix hits at the first admission; -1: not admitted yet
        self.num_preemptions = 0
        self.retry_step = 0  # not worth an attempt to admit before this step
        self.finish_reason: str | None = None
        self.error: Exception | None = None
        self.logprobs: list[dict[int, float]] | None = None if params.logprobs is None else []
        self.start_time = start_time
        self.first_token_time: float | None = None
        self.finish_time: float | None = None

    @property
    def num_known(self) -> int:
        """Of all num_tokens, those that the host knows."""
        return self.num_prompt_tokens + len(self.new_tokens)

    @property
    def tokens(self) -> array[int]:
        """Those, in an array of their own."""
        return self.prompt + array("i", self.new_tokens)

    def append(self, token: int, now: float) -> None:
        """Takes the sampled token and decides whether it was the last; a negative one stands for none."""
        if token < 0:
            self.finish("error", now, ArithmeticError("the logits hold NaN or no finite number: no token to sample"))
            return
        if self.first_token_time is None:
            self.first_token_time = now
        self.new_tokens.append(token)
        if token in self.eos_token_ids:
            self.finish("stop", now)
        elif len(self.new_tokens) == self.params.max_tokens:
            self.finish("length", now)

    def finish(self, reason: str, now: float, error: Exception | None = None) -> None:
        self.finish_reason, self.error, self.finish_time = reason, error, now
