"""Keeps a GPU starting kernels as fast as it can, whatever else the process does with it.

After kernels of several streams have taken turns, which PyTorch beside the engine may cause, every launch takes longer
until another context has been on the GPU: 2 % of a step of one sequence. The driver reports nothing of it. So the time
of launches is measured now and then, and another context is used where they have become slow (Stream.watch_launches).
"""

from __future__ import annotations

import time
from typing import Any

STEPS = 256  # between two looks, where steps follow each other
MOST_STEPS = 1 << 16  # the most between two looks: they become rarer while the GPU is slow again each time
PAUSE = 0.01  # seconds without such a step, in which somebody else may have used the GPU
MOST_SEQUENCES = 32  # larger steps draw so much power that the clock falls, which looks the same


class LaunchWatch:
    """Of the steps that are launched on one stream, a pagedkv.Stream."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._interval = STEPS
        self._since = 0  # steps, since the last look
        self._is_looking = False
        self._last = 0.0

    def calibrate(self) -> None:
        """Looks while all is as it should be: after reload_context, with nothing else on the GPU."""
        for _ in range(4):  # the first ones may find the clock low
            while self._stream.watch_launches() is None:
                self._stream.synchronize()

    def step(self, num_sequences: int) -> None:
        """Before the graph of a step is launched."""
        now = time.monotonic()
        has_paused, self._last = now - self._last > PAUSE, now
        self._since += 1
        is_due = self._since >= self._interval or (has_paused and self._interval == STEPS)
        if not self._is_looking and (not is_due or num_sequences > MOST_SEQUENCES):
            return
        is_slow = self._stream.watch_launches()
        self._is_looking, self._since = is_slow is None, 0
        if is_slow is not None:
            self._interval = min(2 * self._interval, MOST_STEPS) if is_slow else STEPS
