"""How one request is sampled."""

from __future__ import annotations

from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any

MAX_FLOAT = 3.4e38  # of the float32 that it becomes
MAX_LOGPROBS = 20


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Frozen; a wrong value raises at once. Names, defaults and meaning are vLLM's, and pagedkv.sample's.

    temperature         0 is greedy: the most likely token, the lowest id of equals
    top_k               only the so many most likely tokens; 0 or -1: all
    top_p               only the most likely tokens that have this much of the probability together; 1: all
    min_p               only tokens at least so likely, times the most likely one; 0: all
    repetition_penalty  above 1 makes tokens of the prompt and of the output less likely, below 1 more
    presence_penalty    is taken from the logits of tokens in the output, once
    frequency_penalty   the same, once for every time that the token is there
    max_tokens          how many tokens at most; 0 returns at once
    ignore_eos          go on after an end-of-sequence token, until max_tokens
    seed                int64. Given: the same random numbers again, whatever else is in the batch and however the
                        prompt is chunked, and so the same tokens but for the rounding of the logits. None: the engine
                        draws one for every request
    logprobs            0 to 20: RequestOutput.logprobs holds each new token and the so many most likely ones
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    max_tokens: int = 64
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None
    has_filters: bool = field(init=False, repr=False, compare=False)  # top_k, top_p, min_p
    has_penalties: bool = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        def put(name: str, value: object) -> None:
            object.__setattr__(self, name, value)

        def put_float(name: str, lowest: float, highest: float, *, is_open: bool = False) -> None:
            put(name, check_float(name, getattr(self, name), lowest, highest, is_open=is_open))

        put_float("temperature", 0, MAX_FLOAT)
        put_float("top_p", 0, 1, is_open=True)
        put_float("min_p", 0, 1)
        put_float("repetition_penalty", 0, MAX_FLOAT, is_open=True)
        put_float("presence_penalty", -MAX_FLOAT, MAX_FLOAT)
        put_float("frequency_penalty", -MAX_FLOAT, MAX_FLOAT)
        put("top_k", check_int("top_k", self.top_k, -1, 2**31 - 1))
        put("max_tokens", check_int("max_tokens", self.max_tokens, 0, 2**31 - 1))
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos is {self.ignore_eos!r} but must be True or False")
        if self.seed is not None:
            put("seed", check_int("seed", self.seed, -(2**63)))
        if self.logprobs is not None:
            put("logprobs", check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS))
        put("has_filters", self.top_k > 0 or self.top_p < 1 or self.min_p > 0)
        put("has_penalties", (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0))


def check_float(name: str, value: object, lowest: float, highest: float, *, is_open: bool = False) -> float:
    """The value as a float, where it is a number within the bounds (NaN is not); is_open: and above the lowest."""
    if not isinstance(value, Real) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} but must be a number")
    number: Any = value  # an int may be too large for a float
    if not lowest <= number <= highest or (is_open and number == lowest):
        above = "above" if is_open else "at least"
        raise ValueError(f"{name} is {value} but must be {above} {lowest:g} and at most {highest:g}")
    return float(number)


def check_int(name: str, value: object, lowest: int, highest: int = 2**63 - 1) -> int:
    """The value as an int, where it is one (NumPy's too) and within the bounds."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} but must be an integer")
    number = int(value)
    if not lowest <= number <= highest:
        bounds = f"at least {lowest}" if number < lowest else f"at most {highest}"
        raise ValueError(f"{name} is {number} but must be {bounds}")
    return number
