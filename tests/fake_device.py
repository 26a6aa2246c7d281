"""A device that runs late: its operations, tensors, events, streams and graphs, in place of pagedkv's.

An operation called on the host is queued, and reads and writes its memory when a fuzzer lets the queue go on, in the
order of the calls: at the latest when the host waits for an event behind it. So everything shows that a GPU would see
and that a host which is never more than a moment ahead hides:

- an upload from pinned memory reads it late, and fails where it is not what it was at the call;
- a download's target is garbage until it has run;
- what fake_model.py keeps in the KV cache is checked when a step runs.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np

GARBAGE = -0x11111112  # of int32; every byte is 0xEE


class Device:
    """One stream. `eagerness` is the probability that a call lets it go on, by a random number of operations."""

    def __init__(self, rng: random.Random, eagerness: float, happened: Counter[str]) -> None:
        self.rng, self.eagerness, self.happened = rng, eagerness, happened
        self.queue: deque[Callable[[], None]] = deque()
        self.num_calls = self.num_done = 0
        self.capturing: list[Callable[[], None]] | None = None
        self.interrupt_in = -1  # calls until one raises KeyboardInterrupt; negative: none does

    def call(self, operation: Callable[[], None]) -> None:
        if self.capturing is not None:
            self.capturing.append(operation)
            return
        self.interrupt_in -= 1
        if self.interrupt_in == 0:
            raise KeyboardInterrupt
        self.queue.append(operation)
        self.num_calls += 1
        if self.rng.random() < self.eagerness:
            self.run_until(self.num_done + self.rng.randint(0, len(self.queue)))

    def run_until(self, count: int) -> None:
        """So many operations since the start."""
        while self.num_done < count:
            self.happened["late operation"] += len(self.queue) > 1
            self.num_done += 1
            self.queue.popleft()()

    def synchronize(self) -> None:
        self.run_until(self.num_calls)


def next_token(stamp: int, seed: int, position: int, top_k: int) -> int:
    """-1, no token, in one case of a hundred."""
    token = hash((stamp, seed, position, top_k)) % 1010
    return token if token < 1000 else -1


class FakeOps:
    """In place of the module pagedkv.ops."""

    @staticmethod
    def empty(shape, dtype: str = "float32", device: Device | str = "cpu", *, pinned: bool = False) -> FakeTensor:
        array = np.empty(shape, dtype)
        array.view(np.uint8).fill(0xEE)
        return FakeTensor(array, None if device == "cpu" else device, pinned)

    @staticmethod
    def synchronize(device: Device) -> None:
        device.synchronize()

    @staticmethod
    def num_multiprocessors(device: Device) -> int:
        return 6

    @staticmethod
    def reload_context(device: Device) -> None:
        device.synchronize()

    @staticmethod
    def swap_blocks(sources: list[FakeTensor], targets: list[FakeTensor], pairs: np.ndarray) -> None:
        given = pairs.copy()

        def move() -> None:
            for source, target in zip(sources, targets, strict=True):
                target.array[given[:, 1]] = source.array[given[:, 0]]

        device_of(sources[0], targets[0]).call(move)

    @staticmethod
    def copy_blocks(caches: list[FakeTensor], pairs: np.ndarray) -> None:
        device_of(caches[0]).happened["copy on write"] += len(pairs)
        FakeOps.swap_blocks(caches, caches, pairs)

    @staticmethod
    def take_sampled(token_ids: FakeTensor, sampled: FakeTensor) -> None:
        def take() -> None:
            ids = token_ids.array
            ids[:] = np.where(ids < 0, sampled.array[np.where(ids < 0, -1 - ids, 0)], ids)

        device_of(sampled).call(take)

    @staticmethod
    def sample(logits, temperatures, seeds, positions, *, out, top_k=None, **others) -> None:
        def sample() -> None:
            high, low = logits.array.astype(np.int64).T
            rows = zip((high << 24) + low, seeds.array, positions.array, strict=True)
            assert not temperatures.array.any()
            for i, (stamp, seed, position) in enumerate(rows):
                k = 0 if top_k is None else int(top_k.array[i])
                out.array[i] = next_token(int(stamp), int(seed), int(position), k)

        device_of(out).call(sample)

    @staticmethod
    def token_logprobs(logits: FakeTensor, sampled: FakeTensor, num_best: int, *, out_ids, out) -> None:
        def report() -> None:
            out_ids.array[:] = sampled.array[:, None] + np.arange(1 + num_best)
            out.array[:] = 0

        device_of(out).call(report)


class FakeTensor:
    """What the engine uses of pagedkv.Tensor. `on` is None for memory of the host, who may look at its own only."""

    def __init__(self, array: np.ndarray, on: Device | None, is_pinned: bool) -> None:
        self.array, self.on, self.is_pinned, self.shape = array, on, is_pinned, array.shape

    def __len__(self) -> int:
        return len(self.array)

    def __getitem__(self, key: object) -> FakeTensor:
        return FakeTensor(self.array[key], self.on, self.is_pinned)

    def view(self, shape, dtype: str | None = None) -> FakeTensor:
        array = self.array if dtype is None else self.array.view(dtype)
        return FakeTensor(array.reshape(shape), self.on, self.is_pinned)

    def numpy(self) -> np.ndarray:
        assert self.on is None, "the host looks at a device's memory"
        return self.array

    def copy_(self, source: FakeTensor | np.ndarray) -> FakeTensor:
        """From pinned memory it is read late. Other memory of the host is, too, but the call waits for that."""
        there, is_on_host = (source.array, source.on is None) if isinstance(source, FakeTensor) else (source, True)
        at_call = there.copy()
        is_pinned = isinstance(source, FakeTensor) and source.is_pinned

        def copy() -> None:
            assert not is_pinned or np.array_equal(there, at_call), "pinned memory changed before its upload had run"
            self.array[...] = at_call if is_on_host else there

        if self.on is None:
            self.array.fill(GARBAGE)
        device_of(self, source).call(copy)
        return self


def device_of(*tensors: FakeTensor | np.ndarray) -> Device:
    return next(tensor.on for tensor in tensors if isinstance(tensor, FakeTensor) and tensor.on is not None)


class FakeEvent:
    def __init__(self, device: Device) -> None:
        self.on, self.count = device, 0

    def record(self) -> None:
        self.count = self.on.num_calls

    def synchronize(self) -> None:
        self.on.run_until(self.count)


class FakeStream:
    def __init__(self, device: Device) -> None:
        self.on = device

    def __enter__(self) -> None: ...

    def __exit__(self, *exc: object) -> None: ...

    def synchronize(self) -> None:
        self.on.synchronize()


class FakeGraph:
    @contextmanager
    def capture(self, stream: FakeStream) -> Iterator[None]:
        self.on, self.operations = stream.on, list[Callable[[], None]]()
        self.on.capturing = self.operations
        try:
            yield
        finally:
            self.on.capturing = None

    def replay(self) -> None:
        self.on.happened["graph"] += 1
        self.on.call(lambda: [operation() for operation in self.operations])
