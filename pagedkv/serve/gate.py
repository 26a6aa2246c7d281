"""How many answers are given or wait at a time, in all front ends of a server."""

from __future__ import annotations

import mmap
import os
from typing import IO

from .errors import ApiError

ITEM = 8  # bytes of a count


def shared_counts(num_front_ends: int) -> IO[bytes]:
    """A file in memory, which each front end maps: a count for each."""
    file = os.fdopen(os.memfd_create("pagedkv answers"), "r+b")
    file.truncate(num_front_ends * ITEM)
    return file


class Gate:
    """Bounds how many answers are given or wait at a time.

    counts: descriptor of what shared_counts() made, in which this front end has `place`; None: there is no other
    """

    def __init__(self, size: int, counts: int | None = None, place: int = 0) -> None:
        self.size, self._place = size, place
        self._counts = memoryview(bytearray(ITEM) if counts is None else mmap.mmap(counts, 0)).cast("q")
        self._counts[place] = 0  # one that was killed may have been here

    @property
    def num_inside(self) -> int:
        return sum(self._counts)

    def check(self, count: int) -> None:
        """Raises ApiError where so many may not enter now."""
        if count > self.size:
            raise ApiError(400, f"the request asks for {count} answers, and the server takes {self.size} at a time")
        if self.num_inside + count > self.size:
            raise ApiError(429, f"the server has {self.num_inside} answers to give; it takes {self.size} at a time")

    def enter(self, count: int) -> None:
        self.check(count)
        self._counts[self._place] += count

    def leave(self, count: int) -> None:
        self._counts[self._place] -= count
