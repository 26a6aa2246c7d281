"""The order in which sequences wait, and whose turn it is to step the engine."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

import pytest

from pagedkv import SamplingParams
from pagedkv.engine.calls import Call, WaitingQueue
from pagedkv.engine.sequence import Sequence
from pagedkv.engine.turns import Turns


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


# --- turns


class Counter:
    """An engine whose steps put one item into the mailbox that is served next."""

    def __init__(self) -> None:
        self.served: list[SimpleQueue] = []
        self.inside, self.num_steps, self.unsettled = 0, 0, 0
        self.turns = Turns(self.step, self.settle, lambda: self.unsettled > 0)

    def step(self, meanwhile: Callable[[], None]) -> None:
        self.inside += 1
        assert self.inside == 1, "two steps at a time"
        self.settle_now()
        meanwhile()
        time.sleep(0.0002)
        self.num_steps += 1
        if self.served:
            box = self.served.pop(0)
            box.put("item")
        self.inside -= 1

    def settle(self) -> None:
        self.inside += 1
        assert self.inside == 1, "settled within a step"
        self.settle_now()
        self.inside -= 1

    def settle_now(self) -> None:
        self.unsettled = 0


def test_one_steps_for_all():
    """Many threads; each gets its items, and nobody waits once its item is there."""
    engine, problems, num_items = Counter(), [], 20

    def wait_for(box: SimpleQueue) -> None:
        try:
            assert [engine.turns.receive(box) for _ in range(num_items)] == ["item"] * num_items
        except BaseException as error:
            problems.append(error)

    boxes = [SimpleQueue() for _ in range(12)]
    engine.served = boxes * num_items
    threads = [threading.Thread(target=wait_for, args=(box,)) for box in boxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert not problems and not any(thread.is_alive() for thread in threads)
    assert engine.num_steps == num_items * len(boxes), "somebody stepped for nothing"
    assert engine.turns._owner is None and not engine.turns._waiting


def test_whoever_waits_has_time_for_something_else():
    """The one that steps: in each step, while a device computes. The others: once, before they wait."""
    engine, calls = Counter(), []
    boxes = [SimpleQueue() for _ in range(3)]
    engine.served = [SimpleQueue(), SimpleQueue(), *boxes]
    threads = [
        threading.Thread(target=engine.turns.receive, args=(box, lambda number=number: calls.append(number)))
        for number, box in enumerate(boxes)
    ]
    engine.turns._owner = stranger = SimpleQueue()  # so that all three wait, in this order
    for number, thread in enumerate(threads):
        thread.start()
        while len(engine.turns._waiting) <= number or len(calls) <= number:
            time.sleep(0.001)
    assert calls == [0, 1, 2]
    engine.turns._leave(stranger)
    for thread in threads:
        thread.join(20)
    assert not any(thread.is_alive() for thread in threads)
    assert engine.num_steps == 5 and engine.turns._owner is None
    assert calls[3:] == [0] * 3 + [1, 2], "each step is made by whoever has waited longest"


def test_an_error_leaves_the_turn_to_the_next():
    engine, results = Counter(), []
    step, fails = engine.step, threading.Event()

    def failing(meanwhile: Callable[[], None]) -> None:
        if fails.is_set():
            fails.clear()
            time.sleep(0.01)  # the others wait by then
            raise RuntimeError("broken")
        step(meanwhile)

    engine.turns._step = failing
    fails.set()

    def wait_for(box: SimpleQueue) -> None:
        try:
            results.append(engine.turns.receive(box))
        except RuntimeError as error:
            results.append(str(error))

    boxes = [SimpleQueue() for _ in range(4)]
    engine.served = list(boxes)
    threads = [threading.Thread(target=wait_for, args=(box,)) for box in boxes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(results) == ["broken", "item", "item", "item"] and engine.turns._owner is None


def test_what_comes_late_in_a_step_is_settled_after_it():
    engine = Counter()
    box: SimpleQueue = SimpleQueue()
    engine.served = [box]
    step = engine.step

    def step_and_more(meanwhile: Callable[[], None]) -> None:
        step(meanwhile)
        engine.unsettled = 1
        engine.turns.settle()  # somebody else's call, which finds the turn taken
        assert engine.unsettled == 1

    engine.turns._step = step_and_more
    assert engine.turns.receive(box) == "item" and engine.unsettled == 0
    engine.unsettled = 1
    engine.turns.settle()
    assert engine.unsettled == 0
    engine.turns.try_step()
    assert engine.num_steps == 2 and engine.unsettled == 0
