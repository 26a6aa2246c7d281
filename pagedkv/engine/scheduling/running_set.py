"""The running sequences, which hold pages, and how they lose them."""

from __future__ import annotations

import time

import numpy as np

from pagedkv import BlockManager, OutOfBlocks

from .sequence import Sequence
from .waiting import WaitingQueue


class RunningSet:
    """The running sequences in the order of admission. A preempted one goes back to `waiting`."""

    def __init__(self, manager: BlockManager, waiting: WaitingQueue) -> None:
        self.manager = manager
        self._waiting = waiting
        self.sequences: list[Sequence] = []
        self.num_preemptions = 0
        self.num_swaps = 0  # preemptions that kept the KV in host pages

    def add(self, seq: Sequence) -> None:
        """Adds a sequence that has its pages."""
        self.sequences.append(seq)
        seq.call.num_running += 1
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = time.perf_counter()

    def retire(self) -> None:
        """Releases sequences whose last token is being sampled: they need no page any more."""
        ended = [seq for seq in self.sequences if seq.num_tokens == seq.max_num_tokens]
        if ended:
            self.release(ended)

    def release(self, sequences: list[Sequence]) -> None:
        """Removes these sequences and frees their pages."""
        self.manager.free_batch([seq.id for seq in sequences])
        for seq in sequences:
            seq.num_in_pages = 0
            seq.call.num_running -= 1
        self.sequences = [seq for seq in self.sequences if seq.num_in_pages]

    def preempt(self, seq: Sequence, reason: str) -> np.ndarray | None:
        """Takes its pages away; returns which of them are to be copied to host pages, if any."""
        self.sequences.remove(seq)
        seq.preempted_for, pairs = reason, None
        try:
            pairs = self.manager.swap_out(seq.id)
            seq.is_swapped = True
            self.num_swaps += 1
        except OutOfBlocks:  # of host pages
            self.manager.free(seq.id)
            seq.num_computed = 0
        seq.num_in_pages = 0
        seq.num_preemptions += 1
        seq.call.num_running -= 1
        self.num_preemptions += 1
        self._waiting.put_back(seq)
        return pairs

    def first_to_lose(self) -> Sequence:
        """The sequence to preempt when there is no page: of the largest priority value, the one admitted last."""
        return max(reversed(self.sequences), key=lambda seq: seq.priority)

    def who_yields_to(self, head: Sequence) -> Sequence | None:
        """The sequence whose place the next waiting one (`head`) is to have: one that head's priority precedes, or,
        where nothing of head's call runs, one of a call that has several. Of equals the one admitted last."""

        def claim(seq: Sequence) -> tuple[int, int]:
            """How much rather than others this sequence must yield; (0, 0): not at all."""
            is_shared = seq.priority == head.priority and not head.call.num_running and seq.call.num_running > 1
            return max(seq.priority - head.priority, 0), seq.call.num_running if is_shared else 0

        last = max(reversed(self.sequences), key=claim, default=None)
        return None if last is None or claim(last) == (0, 0) else last

    def clear(self) -> None:
        """Forgets all running sequences; their pages are freed elsewhere."""
        for seq in self.sequences:
            seq.call.num_running = 0
        self.sequences = []
