"""How many guesses pay.

A guess is right if all before it in its sequence are, and it is, too: the j-th with the chance p**j, where p is what
was measured of the sequence. So the best guesses of a batch are those of the greatest p**j. With the n best ones a step
gives (sequences + sum of their chances) tokens, in the time that steps of so many rows have taken. The n with the most
tokens a second is taken, if that is more than without guesses.
"""

from __future__ import annotations

import math

import numpy as np

WEIGHT = 0.1  # of a new measurement
MARGIN = 1.02  # by which guesses must win
OUTLIER = 2.0  # a step counts as this many times the time before at most
FORGET_AFTER = 5000  # steps: the context has grown, or the card is warmer


class StepTimes:
    """Seconds of steps that only decode, by the number of their sequences and of their rows, in classes by the half
    octave. They are the times between the tokens of two steps, so the host's share, and the drafter's, is in them. A
    step of more rows than any that was measured counts as fast as those: it is tried."""

    def __init__(self, max_num_rows: int) -> None:
        self.max_num_rows = max_num_rows
        self._class = np.array([0] + [round(2 * math.log2(n)) for n in range(1, max_num_rows + 1)])
        self._plain: dict[int, float] = {}
        self._guessing: dict[tuple[int, int], tuple[float, int]] = {}  # seconds, and when they were measured
        self._num_steps = 0

    def add(self, num_seqs: int, num_rows: int, seconds: float) -> None:
        """A step that had guesses if it had more rows than sequences."""
        self._num_steps += 1
        of_seqs, of_rows = int(self._class[num_seqs]), int(self._class[num_rows])
        if num_rows == num_seqs:
            self._plain[of_seqs] = _blend(self._plain.get(of_seqs), seconds)
        else:
            before = self._guessing.get((of_seqs, of_rows))
            blended = _blend(None if before is None else before[0], seconds)
            self._guessing[of_seqs, of_rows] = blended, self._num_steps

    def plain(self, num_seqs: int) -> float | None:
        """None: such a step was not measured yet."""
        return self._plain.get(int(self._class[num_seqs]))

    def guessing(self, num_seqs: int) -> np.ndarray:
        """Of steps with num_seqs + 1 rows, num_seqs + 2, and so on."""
        classes = self._class[num_seqs + 1 :]
        of_seqs, seconds = int(self._class[num_seqs]), self._plain[int(self._class[num_seqs])]
        by_class = np.empty(int(self._class[-1]) + 1)
        for of_rows in range(of_seqs, len(by_class)):
            known, when = self._guessing.get((of_seqs, of_rows), (seconds, self._num_steps))
            if self._num_steps - when <= FORGET_AFTER:
                seconds = known
            by_class[of_rows] = seconds
        seconds_by_rows: np.ndarray = by_class[classes]
        return seconds_by_rows


def _blend(before: float | None, seconds: float) -> float:
    return seconds if before is None else before + WEIGHT * (min(seconds, OUTLIER * before) - before)


def lengths(chances: list[float], most: list[int], num_seqs: int, times: StepTimes) -> list[int]:
    """How many guesses each sequence of these chances is to have, most[i] at most, in a step of num_seqs sequences, of
    which these are some."""
    without, longest = times.plain(num_seqs), max(most, default=0)
    if without is None or not longest or num_seqs >= times.max_num_rows:
        return [0] * len(most)
    place = np.arange(1, longest + 1)
    gains = np.where(place <= np.array(most)[:, None], np.array(chances)[:, None] ** place, 0.0).reshape(-1)
    seconds = times.guessing(num_seqs)
    best = np.argsort(-gains, kind="stable")[: min(len(seconds), sum(most))]
    rates = (num_seqs + np.cumsum(gains[best])) / seconds[: len(best)]
    if rates.max() <= MARGIN * num_seqs / without:
        return [0] * len(most)
    taken = best[: int(rates.argmax()) + 1]
    counts: list[int] = np.bincount(taken // longest, minlength=len(most)).tolist()
    return counts
