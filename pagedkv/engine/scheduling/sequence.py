"""One answer on its way through the engine."""

from __future__ import annotations

import os
import time
from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from ..outputs import without_frames
from ..sampling_params import MaskRequest, SamplingParams

if TYPE_CHECKING:
    import numpy as np

    from pagedkv.models.adapter import Adapter

    from ..text.detokenizer import Detokenizer


def private_salt(salt: bytes) -> bytes:
    """A salt that no other sequence has: nothing is found in the prefix cache, so the whole prompt is computed."""
    return salt + os.urandom(16)


class Sequence:
    """Token ids, and the counts that the scheduler works on. It knows no pages: BlockManager does, by `id`.

    The counts run ahead of new_tokens: a planned step counts as computed, and num_tokens includes the token that it
    samples, whose value may arrive a step later. num_computed < num_tokens.
    """

    __slots__ = (
        "__weakref__", "adapter", "bad_words", "call", "cumulative_logprob", "detokenizer", "draft", "embedding",
        "end_ids", "error", "finish_reason", "finish_time", "first_scheduled_time", "first_token_time", "id", "index",
        "is_end_sent", "is_swapped", "logprobs", "mask_request", "max_num_tokens", "max_tokens", "min_tokens",
        "new_tokens", "num_cached", "num_computed", "num_in_pages", "num_logprobs", "num_preemptions",
        "num_prompt_tokens", "num_sent", "num_tokens", "params", "preempted_for", "priority", "prompt",
        "prompt_logprobs", "request", "retry_step", "salt", "seed", "siblings", "source", "start_time", "stop_reason",
        "wants_embedding",
    )  # fmt: skip

    def __init__(
        self,
        id: int,
        prompt: Iterable[int],
        params: SamplingParams,
        seed: int,
        eos: frozenset[int],
        start_time: float,
        *,
        max_tokens: int | None = None,
        call: int | None = None,
        priority: int = 0,
        salt: bytes = b"",
        adapter: Adapter | None = None,
    ) -> None:
        """max_tokens: as in params, but as far as it fits (Scheduler.max_tokens)
        call: the id of the first sequence that was asked for together with this one; None: this is the first
        """
        max_tokens = params.max_tokens if max_tokens is None else max_tokens
        assert max_tokens is not None, "only the scheduler knows what fits"
        self.id, self.params, self.seed = id, params, seed
        self.call, self.priority, self.adapter = id if call is None else call, priority, adapter
        # With another adapter the same tokens have other keys and values. Its content counts, not its name.
        self.salt = salt if adapter is None else b"adapter" + adapter.digest + salt
        # Tokens that end it, once there are min_tokens of them.
        self.end_ids = (frozenset() if params.ignore_eos else eos) | frozenset(params.stop_token_ids)
        self.prompt = array("i", prompt)
        self.new_tokens: list[int] = []  # what was sampled, as far as the host knows
        self.num_prompt_tokens = len(self.prompt)
        self.max_tokens, self.min_tokens = max_tokens, params.min_tokens
        self.max_num_tokens = self.num_prompt_tokens + max_tokens
        self._forget_pages()
        self.source = 0  # the row of the last step in which its newest token was sampled
        self.draft: Any = None  # what is kept of it to guess its next tokens
        self.num_cached = -1  # prefix hits at the first admission; -1: not admitted yet
        self.num_preemptions = 0
        self.preempted_for = ""  # the reason of the last preemption
        self.siblings: list[Sequence] = []  # other answers to the prompt, which are to be forked from it
        self.detokenizer: Detokenizer | None = None  # where its text is needed while it grows
        self.bad_words: list[list[int]] = []  # texts that it must not contain, as token ids
        self.mask_request: MaskRequest | None = None  # what its mask is called with
        self.request: Any = None  # the request that it belongs to, and ...
        self.index = 0  # ... which of its answers this is
        self.finish_reason: str | None = None
        self.is_end_sent = False  # the caller has an Update of it
        self.stop_reason: int | str | None = None  # the token of stop_token_ids or the stop string that ended it
        self.error: Exception | None = None
        # Best tokens to report besides each new one; None: nothing. The best answers are chosen by log probability.
        self.num_logprobs = 0 if params.logprobs is None and params.num_sequences > params.n else params.logprobs
        self.logprobs: list[dict[int, float]] = []
        self.cumulative_logprob = 0.0
        self.prompt_logprobs: list[dict[int, float] | None] | None = None if params.prompt_logprobs is None else [None]
        self.wants_embedding = False  # its prompt's last hidden state, not tokens
        self.embedding: np.ndarray | None = None
        self.num_sent = 0  # how many of new_tokens the caller has
        self.start_time = start_time
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None
        self.finish_time: float | None = None

    @property
    def num_known(self) -> int:
        """How many of num_tokens the host knows."""
        return self.num_prompt_tokens + len(self.new_tokens)

    def most_pages(self, block_size: int) -> int:
        """That it will hold. The last token's KV is never computed."""
        return -(-(self.max_num_tokens - 1) // block_size)

    @property
    def wanted(self) -> str:
        """What was asked for, for messages."""
        new = " and a new one" if self.max_tokens == 1 else f" and {self.max_tokens} new ones"
        has_new = self.max_tokens > 0 and not self.wants_embedding
        return f"{self.num_prompt_tokens} prompt tokens" + new * has_new

    @property
    def tokens(self) -> array[int]:
        """The tokens that the host knows, in a new array."""
        return self.prompt + array("i", self.new_tokens)

    def append(self, token: int, now: float) -> None:
        """Takes the sampled token and decides whether it was the last. A negative token: none could be sampled."""
        if token < 0 or self.error is not None:
            no_token = ArithmeticError("the logits hold NaN or no finite number: no token to sample")
            self.finish("error", now, self.error or no_token)
            return
        if self.first_token_time is None:
            self.first_token_time = now
        self.new_tokens.append(token)
        self._take_last(now)

    def _take_last(self, now: float) -> None:
        """Adds the last token to the text, and ends the sequence where the token means so. A second call for the same
        token, after an error in the first one, adds nothing twice."""
        token, count, detokenizer = self.new_tokens[-1], len(self.new_tokens), self.detokenizer
        may_stop = count >= self.min_tokens
        is_end = may_stop and token in self.end_ids
        if detokenizer is not None and detokenizer.num_tokens < count:
            if not is_end:
                self.stop_reason = detokenizer.push(token, check_stop=may_stop)
            elif self.params.include_stop_str_in_output:
                detokenizer.push(token, check_stop=False)
        if is_end:
            self.finish("stop", now)
            self.stop_reason = token if token in self.params.stop_token_ids else None
        elif self.stop_reason is not None:
            self.finish("stop", now)
        elif count >= self.max_tokens:
            self.finish("length", now)

    def finish(self, reason: str, now: float, error: Exception | None = None) -> None:
        self.finish_reason, self.finish_time = reason, now
        self.error = None if error is None else without_frames(error)
        self.mask_request = None  # what its mask keeps for it can be freed
        self._drop_logprobs()

    def restart(self) -> None:
        """Starts again from the tokens that the host knows, after an error has lost the steps on their way. The error
        may have come after a last token and before its text, or the end that it means."""
        if self.new_tokens and self.finish_reason is None:
            self._take_last(time.perf_counter())
        if self.prompt_logprobs is not None and len(self.prompt_logprobs) < self.num_prompt_tokens:
            # Steps that were lost may have computed some of the prompt: it must be computed once more.
            self.prompt_logprobs, self.salt = [None], private_salt(self.salt)
        self._forget_pages()
        self._drop_logprobs()

    def _forget_pages(self) -> None:
        """All that the host knows is to be computed."""
        self.num_tokens = self.num_known
        self.num_computed = 0  # tokens whose KV is computed by the steps planned so far
        self.num_in_pages = 0  # tokens that the block manager has room for; 0: it holds no page
        self.is_swapped = False  # its KV is in host pages
        self.retry_step = 0  # not worth an attempt to admit before this step

    def _drop_logprobs(self) -> None:
        """Drops what was reported of a token that was not taken then."""
        if len(self.logprobs) > len(self.new_tokens):
            del self.logprobs[len(self.new_tokens) :]
            pairs = zip(self.logprobs, self.new_tokens, strict=True)
            self.cumulative_logprob = float(sum(logprobs[token] for logprobs, token in pairs))
