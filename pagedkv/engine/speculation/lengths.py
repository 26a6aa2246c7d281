"""How many guesses pay.

A guess is right if all before it in its sequence are, and it is, too: the j-th with the chance p**j, where p is what
was measured of the sequence. So the best guesses of a batch are those of the greatest p**j. With the n best ones a step
gives (sequences + sum of their chances) tokens, in the time that steps of so many rows have taken. The n with the most
tokens a second is taken, if that is MARGIN times as many as without guesses.
"""

from __future__ import annotations

import math

import numpy as np

WEIGHT = 0.1  # of a new measurement
# By which guesses must win: what was measured may be a little old; and answers that began together end at different
# steps, the last of which have few sequences.
MARGIN = 1.1
OUTLIER = 2.0  # a step counts as this many times the time before at most
FORGET_AFTER = 4_000  # steps: the context has grown, or the card was busy then
# What as many rows more as there are sequences cost, as a share of a step without guesses, until that is measured. So a
# few guesses are tried before many.
EXPECTED = 0.1
PLAIN, DRAFT = -1, -2  # in place of a class of rows: a step without guesses; a draft model's guess for each sequence


class StepTimes:
    """Seconds of steps that only decode, by the number of their sequences and of their rows, in classes by the half
    octave. They are the times between the tokens of two steps, so the host's share is in them. A draft model's seconds
    are kept, too."""

    def __init__(self, max_num_rows: int) -> None:
        self.max_num_rows = max_num_rows
        self._class = np.array([0] + [round(2 * math.log2(n)) for n in range(1, max_num_rows + 1)])
        # By class, and one more: its first number of rows.
        self._firsts = np.searchsorted(self._class, np.arange(self._class[-1] + 2)).tolist()
        self._times: dict[tuple[int, int], tuple[float, int]] = {}  # by classes: seconds, and when they were measured
        self._num_steps = 0

    def add(self, num_seqs: int, num_rows: int, seconds: float) -> None:
        """A step that had guesses if it had more rows than sequences."""
        self._num_steps += 1
        of_seqs = int(self._class[num_seqs])
        seconds = self._add(of_seqs, int(self._class[num_rows]) if num_rows > num_seqs else PLAIN, seconds)
        if (self._known(of_seqs, PLAIN) or 0.0) > MARGIN * seconds:
            # A step with more rows takes no less time, so what was measured without guesses was an accident.
            del self._times[of_seqs, PLAIN]

    def add_draft(self, num_seqs: int, seconds: float) -> None:
        """A draft model has taken so long for one guess of each sequence, at most num_seqs."""
        self._add(int(self._class[num_seqs]), DRAFT, seconds)

    def _add(self, of_seqs: int, of_rows: int, seconds: float) -> float:
        blended = blend(self._known(of_seqs, of_rows), seconds)
        self._times[of_seqs, of_rows] = blended, self._num_steps
        return blended

    def _known(self, of_seqs: int, of_rows: int) -> float | None:
        seconds, when = self._times.get((of_seqs, of_rows), (0.0, -FORGET_AFTER))
        return seconds if self._num_steps - when < FORGET_AFTER else None

    def plain(self, num_seqs: int) -> float | None:
        """None: such a step is to be measured."""
        return self._known(int(self._class[num_seqs]), PLAIN)

    def draft(self, num_seqs: int) -> float:
        """Seconds of one guess for each of so many sequences. Until that is measured: for fewer; 0.0: nothing is."""
        known = (self._known(of_seqs, DRAFT) for of_seqs in range(int(self._class[num_seqs]), -1, -1))
        return next((seconds for seconds in known if seconds is not None), 0.0)

    def guessing(self, num_seqs: int, count: int) -> np.ndarray:
        """Of steps with num_seqs + 1 rows, num_seqs + 2, and so on: `count`, or as many as there may be."""
        of_seqs = int(self._class[num_seqs])
        plain = self._times[of_seqs, PLAIN][0]
        last, num_rows, slope = plain, num_seqs, EXPECTED * plain / num_seqs  # the last that is known
        most = min(num_seqs + count, self.max_num_rows)
        seconds = np.empty(self.max_num_rows + 1)
        for of_rows in range(of_seqs, int(self._class[most]) + 1):
            start, end = max(self._firsts[of_rows], num_seqs + 1), self._firsts[of_rows + 1]
            known = self._known(of_seqs, of_rows)
            if start < end and known is not None:
                seconds[start:end] = last = known
                num_rows = end - 1
            else:
                seconds[start:end] = last + slope * (np.arange(start, end) - num_rows)
        return seconds[num_seqs + 1 : most + 1]


def blend(before: float | None, seconds: float) -> float:
    """The mean of the last ones, after another."""
    return seconds if before is None else before + WEIGHT * (min(seconds, OUTLIER * before) - before)


def lengths(
    chances: list[float], most: list[int], num_seqs: int, times: StepTimes, draft_seconds: float = 0.0
) -> list[int]:
    """How many guesses each sequence of these chances is to have, most[i] at most, in a step of num_seqs sequences, of
    which these are some. draft_seconds: what one guess more for all of them takes before the step."""
    without, longest = times.plain(num_seqs), max(most, default=0)
    best = [0] * len(most)
    if without is None or not longest or num_seqs >= times.max_num_rows:
        return best
    place = np.arange(1, longest + 1)
    gains = np.where(place <= np.array(most)[:, None], np.array(chances)[:, None] ** place, 0.0)
    seconds, best_rate = times.guessing(num_seqs, sum(most)), MARGIN * num_seqs / without
    for depth in range(1, longest + 1) if draft_seconds else [longest]:
        of_depth = gains[:, :depth].reshape(-1)
        order = np.argsort(-of_depth, kind="stable")[: min(len(seconds), int(np.count_nonzero(of_depth)))]
        rates = (num_seqs + np.cumsum(of_depth[order])) / (seconds[: len(order)] + depth * draft_seconds)
        if len(rates) and rates.max() > best_rate:
            best_rate = rates.max()
            taken = order[: int(rates.argmax()) + 1] // depth
            best = np.bincount(taken, minlength=len(most)).tolist()
    return best
