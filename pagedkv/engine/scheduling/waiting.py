"""The queue of waiting sequences. No caller waits for the whole batch of another.

A Call is what was asked for at once: a batch, or a single request. Waiting sequences start in this order:

- a lower `priority` first;
- then those of a call that has nothing running, oldest call first;
- then the sequences of the other calls, one call after the other.

So a short request from one thread starts before the rest of another's batch, two batches share the engine evenly, and
single requests are served first come, first served. A batch cannot starve: once nothing of it runs, calls that come
later start after it.
"""

from __future__ import annotations

from bisect import insort
from collections import OrderedDict
from collections.abc import Iterator

from .sequence import Call, Sequence


class WaitingQueue:
    def __init__(self) -> None:
        self._priorities: list[int] = []  # those that have calls, in order
        self._calls: dict[int, OrderedDict[Call, None]] = {}  # with waiting sequences, by priority, next one first
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        for priority in self._priorities:
            for call in self._calls[priority]:
                yield from call.waiting

    def add(self, seq: Sequence) -> None:
        """Queues it after the others of its call."""
        self._enter(seq)
        seq.call.waiting.append(seq)

    def put_back(self, seq: Sequence) -> None:
        """Queues it before the others of its call, which becomes the next in turn."""
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
        """The next sequence. The queue must not be empty."""
        return self._next_call().waiting[0]

    def pop(self) -> Sequence:
        """Removes and returns the next sequence."""
        call = self._next_call()
        seq = call.waiting.popleft()
        if call.waiting:  # the call's next sequence waits until the other calls have had their turn
            self._calls[seq.priority].move_to_end(call)
        self._leave(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Removes this sequence, which must be in the queue."""
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
        for calls in self._calls.values():  # an interrupt may have left a priority without calls
            for call in calls:
                call.waiting.clear()
        self._priorities.clear()
        self._calls.clear()
        self._count = 0
