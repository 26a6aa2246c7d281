"""The order in which sequences wait."""

from __future__ import annotations

import random

import pytest

from pagedkv import SamplingParams
from pagedkv.engine.scheduling.queues import WaitingQueue
from pagedkv.engine.scheduling.sequence import Call, Sequence


def make(number: int, call: Call, priority: int = 0) -> Sequence:
    return Sequence(number, [1], SamplingParams(), 0, frozenset(), 0.0, call=call, priority=priority)


def test_batches_take_turns_and_single_requests_come_between():
    queue, batches = WaitingQueue(), [Call(), Call()]
    for number in range(6):
        queue.add(make(number, batches[number // 3]))
    for call in batches:
        call.num_running = 1
    assert [queue.pop().id for _ in range(2)] == [0, 3]
    single = Call()
    queue.add(make(9, single))
    assert queue.peek().id == 9, "nothing of its call runs"
    assert [queue.pop().id for _ in range(5)] == [9, 1, 4, 2, 5] and not len(queue)


def test_put_back_is_first_and_removal_is_anywhere():
    queue, calls = WaitingQueue(), [Call() for _ in range(3)]
    sequences = [make(number, calls[number % 3]) for number in range(9)]
    for seq in sequences:
        queue.add(seq)
    first = queue.pop()
    queue.put_back(first)
    assert queue.peek() is first
    for number in (4, 0, 8):
        queue.remove(sequences[number])
    assert len(queue) == 6 and sorted(seq.id for seq in queue) == [1, 2, 3, 5, 6, 7]
    queue.clear()
    assert not len(queue) and list(queue) == [] and all(not call.waiting for call in calls)


class Model:
    """The same order from a plain list."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, Call, list[Sequence]]] = []  # in turn

    def sorted_calls(self):
        return sorted(self.calls, key=lambda each: (each[0], each[1].num_running > 0))

    def entry(self, seq, at):
        for each in self.calls:
            if each[0] == seq.priority and each[1] is seq.call:
                return each
        self.calls.insert(at, (seq.priority, seq.call, []))
        return self.calls[at if at >= 0 else -1]

    def add(self, seq):
        if not any(each[1] is seq.call for each in self.calls):
            self.calls.append((seq.priority, seq.call, []))
        self.entry(seq, 0)[2].append(seq)

    def put_back(self, seq):
        each = self.entry(seq, 0)
        each[2].insert(0, seq)
        self.calls.remove(each)
        self.calls.insert(0, each)

    def peek(self):
        return self.sorted_calls()[0][2][0]

    def take(self, seq, *, turns):
        each = next(each for each in self.calls if seq in each[2])
        each[2].remove(seq)
        self.calls.remove(each)
        if each[2]:
            self.calls.append(each) if turns else self.calls.insert(self.place, each)


@pytest.mark.parametrize("num_priorities", [1, 3])
def test_any_order_of_operations(seed, num_priorities):
    rng, queue, model = random.Random(seed), WaitingQueue(), Model()
    calls = [(Call(), rng.randrange(num_priorities)) for _ in range(6)]
    waiting, out = [], []
    for number in range(3000):
        what = rng.random()
        if what < 0.4:
            call, priority = rng.choice(calls)
            seq = make(number, call, priority)
            queue.add(seq)
            model.add(seq)
            waiting.append(seq)
        elif what < 0.6 and waiting:
            seq = queue.pop()
            assert seq is model.peek()
            model.take(seq, turns=True)
            waiting.remove(seq)
            out.append(seq)
        elif what < 0.7 and out:
            seq = out.pop(rng.randrange(len(out)))
            queue.put_back(seq)
            model.put_back(seq)
            waiting.append(seq)
        elif what < 0.8 and waiting:
            seq = waiting.pop(rng.randrange(len(waiting)))
            queue.remove(seq)
            model.place = next(i for i, each in enumerate(model.calls) if seq in each[2])
            model.take(seq, turns=False)
        else:
            rng.choice(calls)[0].num_running = rng.choice([0, 0, 1, 5])
        assert len(queue) == len(waiting)
        if waiting:
            assert queue.peek() is model.peek()
