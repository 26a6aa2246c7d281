"""How one request is sampled."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Integral, Real

MAX_TEMPERATURE = 3.4e38  # it becomes a float32


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Frozen; a wrong value raises at once.

    temperature  0 is greedy: the most likely token, the lowest id of equals
    max_tokens   how many tokens at most; 0 returns at once
    ignore_eos   go on after an end-of-sequence token, until max_tokens
    seed         int64. Given: the same random numbers again, whatever else is in the batch and however the prompt is
                 chunked, and so the same tokens but for the rounding of the logits. None: the engine draws one for
                 every request
    """

    temperature: float = 1.0
    max_tokens: int = 64
    ignore_eos: bool = False
    seed: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.temperature, bool) or not isinstance(self.temperature, Real):
            raise TypeError(f"temperature is {self.temperature!r} but must be a number")
        if not 0 <= self.temperature <= MAX_TEMPERATURE:  # nor NaN
            raise ValueError(f"temperature is {self.temperature} but must be at least 0 and finite as a float32")
        object.__setattr__(self, "temperature", float(self.temperature))
        object.__setattr__(self, "max_tokens", check_int("max_tokens", self.max_tokens, 0, 2**31 - 1))
        if not isinstance(self.ignore_eos, bool):
            raise TypeError(f"ignore_eos is {self.ignore_eos!r} but must be True or False")
        if self.seed is not None:
            object.__setattr__(self, "seed", check_int("seed", self.seed, -(2**63)))


def check_int(name: str, value: object, lowest: int, highest: int = 2**63 - 1) -> int:
    """The value as an int, where it is one (NumPy's too) and within the bounds."""
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise TypeError(f"{name} is {value!r} but must be an integer")
    number = int(value)
    if not lowest <= number <= highest:
        bounds = f"at least {lowest}" if number < lowest else f"at most {highest}"
        raise ValueError(f"{name} is {number} but must be {bounds}")
    return number
