"""How one request is sampled, where it ends, and what is reported of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field, fields
from enum import Enum
from functools import wraps
from math import inf, isnan
from numbers import Real
from typing import Any, TypeVar

from pagedkv.checks import MAX_INT, check_float, check_ids, check_int, check_names, check_texts

from .structured_outputs import StructuredOutputsParams

T = TypeVar("T")

MAX_FLOAT = 3.4e38  # what float32 holds
MIN_FLOAT = 1.2e-38  # positive numbers below lose digits in float32, or become zero
MAX_LOGPROBS = 20
MAX_ANSWERS = 16_384  # of one request


@dataclass(frozen=True, eq=False)
class MaskRequest:
    """The answer for which a mask is asked. It lives as long as the answer."""

    id: str
    index: int
    prompt_token_ids: list[int]


# mask(request, tokens) says which tokens may come next: see SamplingParams.
Mask = Callable[[MaskRequest, list[int]], Any]


class RequestOutputKind(Enum):
    """What the outputs of an unfinished request hold.

    CUMULATIVE: all text and tokens so far, after every step that adds to them. DELTA: what is new since the output
    before. FINAL_ONLY: there is one output, at the end.
    """

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


def checks_names(cls: type[T]) -> type[T]:
    """For a dataclass: an option that it does not have raises with the name that may have been meant. (The class keeps
    its own signature, and can be subclassed with arguments of its own.)"""
    make, known = cls.__init__, [each.name for each in fields(cls) if each.init]  # type: ignore[arg-type]

    @wraps(make)
    def __init__(self: T, *args: Any, **options: Any) -> None:
        check_names(type(self).__name__, options, known)
        make(self, *args, **options)

    cls.__init__ = __init__  # type: ignore[assignment]
    return cls


@checks_names
@dataclass(frozen=True)
class SamplingParams:
    """Frozen; a wrong value raises at once. Names and meanings are those of vLLM and of pagedkv.ops.sample.

    An option that is None has its default, but for max_tokens: there None is as many tokens as fit.

    Args:
        n: how many answers, at most 16,384; they share the prompt's computation and its pages
        best_of: how many answers are sampled; the n with the highest cumulative log probability are returned. None: n
        temperature: 0 is greedy: the most likely token, of equals the one with the lowest id
        top_k: only the top_k most likely tokens; 0 or -1: all
        top_p: only the most likely tokens whose probabilities sum to top_p; 1: all
        min_p: only tokens at least min_p times as likely as the most likely one; 0: all
        repetition_penalty: above 1 makes tokens of the prompt and of the output less likely, below 1 more likely
        presence_penalty: is subtracted once from the logit of each token that the output has
        frequency_penalty: is subtracted as many times as the output has the token
        logit_bias: {token id: what is added to its logit}
        allowed_token_ids: only these tokens; None: all
        bad_words: texts that the answer must not contain, with or without a space before them
        mask: mask(request, tokens) -> which tokens may come next: int32 [ceil(vocab_size / 32)], where bit t % 32 of
            word t // 32 stands for token t, bool [vocab_size], or None for all. `tokens` are those sampled so far;
            `request` has id, index (which of n) and prompt_token_ids, and lives as long as the answer. It is called on
            the host while the device works
        structured_outputs: what the answer has to look like, such as StructuredOutputsParams(json=schema): the engine
            makes the mask of it
        max_tokens: the most tokens; 0 returns at once; None: as many as max_model_len and the pool leave. The answer
            ends with "length" when it has them, and also where it reaches max_model_len
        min_tokens: until the answer has this many tokens, only max_tokens ends it, or a mask that allows nothing but
            the end: a complete JSON ends below min_tokens
        stop: texts (or one) that end the answer where they appear; they are not part of its text
        include_stop_str_in_output: True: they are
        stop_token_ids: tokens that end the answer, in addition to the model's own
        ignore_eos: go on after an end-of-sequence token, until max_tokens
        seed: int64. With the same seed come the same random numbers, whatever else is in the batch and however the
            prompt is chunked, and so the same tokens, except for the rounding of the logits. Of n answers the i-th has
            the seed + i. None: the engine draws a seed for every answer
        logprobs: 0 to 20: CompletionOutput.logprobs holds each new token and this many of the most likely ones
        prompt_logprobs: 0 to 20: RequestOutput.prompt_logprobs holds the same for the prompt's tokens. max_tokens must
            be at least 1
        skip_special_tokens: leaves special tokens out of the text
        detokenize: makes text of the tokens; False: the answer has no text, and stop cannot be used
        output_kind: which outputs come before the last one, and what they hold (see RequestOutputKind)
    """

    n: int = 1
    best_of: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | None = field(default=None, hash=False)  # a dict has none
    allowed_token_ids: SequenceOf[int] | None = None
    bad_words: SequenceOf[str] = ()
    mask: Mask | None = None
    structured_outputs: StructuredOutputsParams | None = None
    max_tokens: int | None = 64
    min_tokens: int = 0
    stop: str | SequenceOf[str] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: SequenceOf[int] = ()
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    has_filters: bool = field(init=False, repr=False, compare=False)  # top_k, top_p, min_p
    has_penalties: bool = field(init=False, repr=False, compare=False)
    has_edits: bool = field(init=False, repr=False, compare=False)  # of logits, which may forbid tokens

    def __post_init__(self) -> None:
        for each in fields(SamplingParams):
            if each.init and each.name != "max_tokens" and getattr(self, each.name) is None:
                self._put(each.name, each.default)
        self._check_numbers()
        self._check_tokens()
        self._check_text()
        if not isinstance(self.output_kind, RequestOutputKind):
            raise TypeError(f"output_kind is {self.output_kind!r} but must be a RequestOutputKind")
        if self.mask is not None and not callable(self.mask):
            raise TypeError(f"mask is {self.mask!r} but must be callable, or None")
        if not isinstance(self.structured_outputs, StructuredOutputsParams | None):
            text = f"structured_outputs is {self.structured_outputs!r} but must be StructuredOutputsParams, or None"
            raise TypeError(text)
        if self.structured_outputs is not None and self.mask is not None:
            raise ValueError("structured_outputs and mask are both given, but are the same option")
        self._put("has_filters", self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        penalties = self.repetition_penalty, self.presence_penalty, self.frequency_penalty
        self._put("has_penalties", penalties != (1, 0, 0))
        edits = self.logit_bias, self.bad_words, self.min_tokens
        self._put("has_edits", any(edits) or self.mask is not None or self.allowed_token_ids is not None)

    @property
    def num_sequences(self) -> int:
        """How many answers are sampled: best_of, or n."""
        return self.n if self.best_of is None else self.best_of

    def _put(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)

    def _check_numbers(self) -> None:
        def put_float(name: str, lowest: float, highest: float, *, is_open: bool = False) -> None:
            self._put(name, check_float(name, getattr(self, name), lowest, highest, is_open=is_open))

        def put_int(name: str, lowest: int, highest: int = MAX_INT) -> None:
            self._put(name, check_int(name, getattr(self, name), lowest, highest))

        put_float("temperature", 0, MAX_FLOAT)
        put_float("top_p", 0, 1, is_open=True)
        put_float("min_p", 0, 1)
        put_float("repetition_penalty", MIN_FLOAT, MAX_FLOAT)
        put_float("presence_penalty", -MAX_FLOAT, MAX_FLOAT)
        put_float("frequency_penalty", -MAX_FLOAT, MAX_FLOAT)
        put_int("top_k", -1)
        put_int("min_tokens", 0)
        if self.max_tokens is not None:
            put_int("max_tokens", 0)
            if self.min_tokens > self.max_tokens:
                raise ValueError(f"min_tokens is {self.min_tokens} but must be at most max_tokens={self.max_tokens}")
        put_int("n", 1, MAX_ANSWERS)
        if self.best_of is not None:
            put_int("best_of", 1, MAX_ANSWERS)
            if self.best_of < self.n:
                raise ValueError(f"best_of is {self.best_of} but must be at least n={self.n}")
        if self.num_sequences > 1 and self.temperature == 0:
            raise ValueError(f"n is {self.n} (best_of {self.best_of}) but at temperature 0 all answers are the same")
        if self.seed is not None:
            put_int("seed", -(2**63), 2**63 - 1)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                put_int(name, 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None and self.max_tokens == 0:
            raise ValueError(f"prompt_logprobs is {self.prompt_logprobs} but max_tokens=0, which computes nothing")

    def _check_tokens(self) -> None:
        """Makes tuples and dicts of ints of token ids. The engine checks them against the vocabulary."""
        self._put("stop_token_ids", check_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            self._put("allowed_token_ids", check_ids("allowed_token_ids", self.allowed_token_ids))
            if not self.allowed_token_ids:
                raise ValueError("allowed_token_ids is empty: no token could be sampled")
        if self.logit_bias is not None:
            if not isinstance(self.logit_bias, Mapping):
                raise TypeError(f"logit_bias is {self.logit_bias!r} but must be a dict of token ids and numbers")
            ids = check_ids("logit_bias.keys", self.logit_bias)
            self._put(
                "logit_bias", {i: _check_bias(i, value) for i, value in zip(ids, self.logit_bias.values(), strict=True)}
            )

    def _check_text(self) -> None:
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "detokenize"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r} but must be True or False")
        self._put("stop", check_texts("stop", (self.stop,) if isinstance(self.stop, str) else self.stop))
        self._put("bad_words", check_texts("bad_words", self.bad_words))
        if self.stop and not self.detokenize:
            raise ValueError(f"stop is {list(self.stop)!r} but detokenize=False: there is no text to find it in")


def _check_bias(token_id: int, value: object) -> float:
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"logit_bias[{token_id}] is {value!r} but must be a number")
    bias = float(value)
    if isnan(bias) or bias > MAX_FLOAT:
        raise ValueError(f"logit_bias[{token_id}] is {bias} but must be a number below {MAX_FLOAT:g}, or -inf")
    return bias if bias >= -MAX_FLOAT else -inf
