"""The order in which sequences wait."""

from __future__ import annotations

import random

import pytest

from pagedkv import BlockManager, SamplingParams
from pagedkv.engine.scheduling.queues import Queues
from pagedkv.engine.scheduling.sequence import Sequence


def make_queues() -> Queues:
    return Queues(BlockManager(1, 1), 1)


def make(number: int, call: int | None, priority: int = 0) -> Sequence:
    return Sequence(number, [1], SamplingParams(), 0, frozenset(), 0.0, call=call, priority=priority)


def test_batches_take_turns_and_single_requests_come_between():
    queues = make_queues()
    for number in range(6):
        queues.add(make(number, number // 3 * 3))
    queues.num_running.update([0, 3])
    assert [queues.pop().id for _ in range(2)] == [0, 3]
    queues.add(make(9, None))
    assert queues.peek().id == 9, "nothing of its call runs"
    assert [queues.pop().id for _ in range(5)] == [9, 1, 4, 2, 5] and not queues.num_waiting


def test_put_back_is_first_and_removal_is_anywhere():
    queues = make_queues()
    sequences = [make(number, number % 3) for number in range(9)]
    for seq in sequences:
        queues.add(seq)
    first = queues.pop()
    queues.put_back(first)
    assert queues.peek() is first
    for number in (4, 0, 8):
        queues.remove(sequences[number])
    assert queues.num_waiting == 6 and sorted(seq.id for seq in queues.waiting()) == [1, 2, 3, 5, 6, 7]
    queues.clear()
    assert not queues.num_waiting and list(queues.waiting()) == []


class Model:
    """The same order from a plain list."""

    def __init__(self, num_running) -> None:
        self.num_running = num_running
        self.calls: list[tuple[int, int, list[Sequence]]] = []  # in turn

    def sorted_calls(self):
        return sorted(self.calls, key=lambda each: (each[0], self.num_running[each[1]] > 0))

    def entry(self, seq, at):
        for each in self.calls:
            if each[0] == seq.priority and each[1] == seq.call:
                return each
        self.calls.insert(at, (seq.priority, seq.call, []))
        return self.calls[at if at >= 0 else -1]

    def add(self, seq):
        if not any(each[1] == seq.call for each in self.calls):
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
    rng, queue = random.Random(seed), make_queues()
    model, calls = Model(queue.num_running), [(call, rng.randrange(num_priorities)) for call in range(6)]
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
            queue.num_running[rng.choice(calls)[0]] = rng.choice([0, 0, 1, 5])
        assert queue.num_waiting == len(waiting)
        if waiting:
            assert queue.peek() is model.peek()
