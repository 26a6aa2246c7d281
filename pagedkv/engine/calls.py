"""The sequences that wait, so that no caller waits for all that another one asked for.

A Call is what was asked at a time: a batch, or a single request. Waiting sequences start in this order:

- a lower `priority` first;
- then those of a call that has nothing running, oldest call first;
- then the other calls in turn.

So a short request from one thread starts before the rest of another's batch, two batches share the engine evenly, and
single requests are served first come, first served. A batch cannot starve: when it has nothing running, it is the
oldest call that has nothing running.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .sequence import Sequence


class Call:
    """A batch of sequences of one priority, and how many of them run (hold pages) now."""

    __slots__ = ("num_running", "waiting")

    def __init__(self) -> None:
        self.num_running = 0
        self.waiting: deque[Sequence] = deque()


class WaitingQueue:
    def __init__(self) -> None:
        self._priorities: list[int] = []  # that have calls, in order
        self._calls: dict[int, OrderedDict[Call, None]] = {}  # those with sequences waiting, in turn, by priority
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for priority in self._priorities:
            for call in self._calls[priority]:
                yield from call.waiting

    def add(self, seq: Sequence) -> None:
        """Behind the others of its call."""
        self._enter(seq)
        seq.call.waiting.append(seq)

    def put_back(self, seq: Sequence) -> None:
        """Before the others of its call, which is the next whose turn it is."""
        self._enter(seq)
        seq.call.waiting.appendleft(seq)
        self._calls[seq.priority].move_to_end(seq.call, last=False)

    def _enter(self, seq: Sequence) -> None:
        self._count += 1
        if seq.priority not in self._calls:
            insort(self._priorities, seq.priority)
            self._calls[seq.priority] = OrderedDict()
        self._calls[seq.priority].setdefault(seq.call)

    def peek(self) -> Sequence:
        """The next one. There must be one."""
        return self._next_call().waiting[0]

    def pop(self) -> Sequence:
        """Takes the next one out."""
        call = self._next_call()
        seq = call.waiting.popleft()
        if call.waiting:  # its next one waits until the others have had their turn
            self._calls[seq.priority].move_to_end(call)
        self._leave(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Takes this one out. It must be there."""
        seq.call.waiting.remove(seq)
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        self._count -= 1
        if seq.call.waiting:
            return
        calls = self._calls[seq.priority]
        del calls[seq.call]
        if not calls:
            del self._calls[seq.priority]
            self._priorities.remove(seq.priority)

    def _next_call(self) -> Call:
        calls = self._calls[self._priorities[0]]
        return next((call for call in calls if not call.num_running), None) or next(iter(calls))

    def clear(self) -> None:
        for seq in list(self):
            seq.call.waiting.clear()
        self._priorities.clear()
        self._calls.clear()
        self._count = 0
