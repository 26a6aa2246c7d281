"""Sums of an engine's traffic that only grow, as monitoring wants them: counts, and histograms of times and sizes."""

from __future__ import annotations

import copy
from bisect import bisect_left
from dataclasses import dataclass, field

SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
LONG = (0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0)
TOKENS = tuple(float(2**i) for i in range(15))


@dataclass(slots=True)
class Histogram:
    """counts[i]: of values above bounds[i - 1], and of those up to bounds[i]; the last: above all."""

    bounds: tuple[float, ...]
    counts: list[int] = field(init=False)
    total: float = 0.0  # the sum of all values

    def __post_init__(self) -> None:
        self.counts = [0] * (len(self.bounds) + 1)

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@dataclass(slots=True)
class Traffic:
    """Seconds are since the call that made a request. What ends with an error or is aborted counts in `ended` alone."""

    prompt_tokens: int = 0  # of requests that have their first token
    new_tokens: int = 0
    ended: dict[str, int] = field(default_factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})  # answers
    first_token: Histogram = field(default_factory=lambda: Histogram(LONG))  # of each request
    queue: Histogram = field(default_factory=lambda: Histogram(LONG))  # until the first step that computes tokens of it
    whole: Histogram = field(default_factory=lambda: Histogram(LONG))  # until the last token
    between_tokens: Histogram = field(default_factory=lambda: Histogram(SHORT))  # of an answer
    step_tokens: Histogram = field(default_factory=lambda: Histogram(TOKENS))  # computed in a step

    def copy(self) -> Traffic:
        return copy.deepcopy(self)
