"""A device that runs late: the engine's real ModelRunner, Pipeline and Scheduler on operations that only take notes.

An operation called on the host is queued, and reads and writes its memory when a fuzzer lets the queue go on, in the
order of the calls: at the latest when the host waits for an event behind it. So everything shows that a GPU would see
and that a host which is never more than a moment ahead hides:

- an upload from pinned memory reads it late, and fails where it is not what it was at the call;
- a download's target is garbage until it has run;
- every slot of the KV cache holds a stamp of the token and of all tokens before it. A query checks the stamps of all
  keys that it may see, when it runs. A slot that is taken and not written yet holds nobody's stamp.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from pagedkv import BlockManager
from pagedkv.engine import decode_graphs, kv_caches, model_runner, sampler, sampling_options, step_arrays, step_memory
from pagedkv.engine.kv_caches import KVCaches
from pagedkv.engine.model_runner import ModelRunner
from pagedkv.engine.scheduler import Scheduler
from pagedkv.engine.step import Step
from pagedkv.engine.step_arrays import StepInputs

GARBAGE = -0x11111112  # of int32; every byte is 0xEE
NOBODY = -5  # the stamp of a slot that is taken and not written yet
OTHER = 0x5A5A5A  # what a value's stamp differs by from its key's


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

    def watch_launches(self) -> bool | None:
        """Begins a look, or says that launches are fast."""
        self.on.happened["look"] += 1
        return None if self.on.happened["look"] % 2 else False


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


# --- the model


def stamp_of(before: int, token: int, position: int) -> int:
    """48 bits that stand for the KV of a token, given the stamp of the one before."""
    return hash((before, token, position)) & 0xFFFFFFFFFFFF


def next_token(stamp: int, seed: int, position: int, top_k: int) -> int:
    """-1, no token, in one case of a hundred."""
    token = hash((stamp, seed, position, top_k)) % 1010
    return token if token < 1000 else -1


@dataclass(frozen=True, slots=True)
class Story:
    """All tokens that a sequence would have if nothing stopped it, and their stamps."""

    tokens: np.ndarray
    stamps: np.ndarray

    @staticmethod
    def of(seq) -> Story:
        tokens, stamps, params = list[int](), list[int](), seq.params
        for position in range(seq.max_num_tokens):
            known = position < seq.num_prompt_tokens
            tokens.append(seq.prompt[position] if known else next_token(stamps[-1], seq.seed, position, params.top_k))
            stamps.append(stamp_of(stamps[-1] if stamps else 0, tokens[-1], position))
        return Story(np.array(tokens, np.int64), np.array(stamps, np.int64))


@dataclass(frozen=True, slots=True)
class Row:
    """What a sequence computes in a step: its tokens [start, end)."""

    seq_id: int
    story: Story
    start: int
    end: int


class Model:
    """Checks a step's arrays and all keys that its queries see against the rows that the host planned."""

    def __init__(self, device: Device) -> None:
        self.on, self.rows = device, list[Row]()

    def tune(self, *args: object) -> None: ...

    def expect(self, rows: list[Row], caches: list[tuple[FakeTensor, FakeTensor]], taken: np.ndarray) -> None:
        """Of the next step that runs, and the slots that are its sequences' but not computed yet."""
        self.rows = rows
        for cache in caches[0]:
            cache.array.reshape(-1)[taken] = NOBODY

    def forward(self, batch, caches, buffers: Hidden, last_tokens: FakeTensor | None = None) -> FakeTensor:
        hidden = buffers.residual
        self.on.call(lambda: self._forward(batch, *caches[0], hidden, last_tokens))
        return hidden[: len(batch.token_ids if last_tokens is None else last_tokens)]

    def _forward(self, batch, k_cache: FakeTensor, v_cache: FakeTensor, hidden, last_tokens) -> None:
        num_seqs, rows = len(batch.context_lens), self.rows
        self.rows = []
        starts = np.arange(num_seqs + 1) if batch.cu_seqlens_q is None else batch.cu_seqlens_q.array
        slots, lens, stamps = batch.slot_mapping.array, batch.context_lens.array, np.zeros(len(batch.token_ids), np.int64)
        keys, values = k_cache.array.reshape(-1), v_cache.array.reshape(-1)
        used = starts[len(rows)]
        assert (slots[used:] == -1).all() and (lens[len(rows) :] == 0).all(), "padding that is none"
        block_size = k_cache.shape[1]
        where = []
        for s, row in enumerate(rows):
            assert lens[s] == row.end and starts[s + 1] - starts[s] == row.end - row.start, row.seq_id
            j = np.arange(row.end)
            slots_of_keys = batch.block_tables.array[s][j // block_size] * block_size + j % block_size
            where.append(slots_of_keys)
            # A kernel may read the past before it stores what is new.
            self.check(row, slots_of_keys[: row.start], keys, values)
        for s, row in enumerate(rows):
            of_row = slice(starts[s], starts[s + 1])
            assert (batch.positions.array[of_row] == np.arange(row.start, row.end)).all(), row.seq_id
            assert (batch.token_ids.array[of_row] == row.story.tokens[row.start : row.end]).all(), row.seq_id
            is_new = slots[of_row] >= 0
            assert (slots[of_row][is_new] == where[s][row.start :][is_new]).all(), row.seq_id
            keys[slots[of_row][is_new]] = row.story.stamps[row.start : row.end][is_new]
            values[slots[of_row][is_new]] = row.story.stamps[row.start : row.end][is_new] ^ OTHER
        for s, row in enumerate(rows):
            self.check(row, where[s], keys, values)
            stamps[starts[s] : starts[s + 1]] = keys[where[s][row.start :]]
        out = stamps if last_tokens is None else stamps[last_tokens.array]
        hidden.array[: len(out)] = out

    @staticmethod
    def check(row: Row, slots: np.ndarray, keys: np.ndarray, values: np.ndarray) -> None:
        expected = row.story.stamps[: len(slots)]
        wrong = np.flatnonzero((keys[slots] != expected) | (values[slots] != expected ^ OTHER))
        assert not wrong.size, f"sequence {row.seq_id}, tokens {row.start} to {row.end}: key {wrong[0]} is another's"

    def logits(self, hidden: FakeTensor, out: FakeTensor) -> None:
        def product() -> None:
            out.array[:, 0], out.array[:, 1] = hidden.array >> 24, hidden.array & 0xFFFFFF

        self.on.call(product)

    def sample(self, hidden: FakeTensor, *numbers: FakeTensor, logits: FakeTensor, out: FakeTensor) -> None:
        """Leaves anything in the logits."""
        self.logits(hidden, logits)
        FakeOps.sample(logits, *numbers, out=out)


class FakeCaches(KVCaches):
    """Of one layer, in plain memory."""

    def __init__(self, config: object, dtype: str, block_size: int, device: Device) -> None:
        self.device, self.block_size = device, block_size

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        shape = self.block_size, 1, 1
        self.layers = [tuple(FakeOps.empty((num_blocks, *shape), "int64", self.device) for _ in range(2))]
        self.host_layers = [tuple(FakeOps.empty((num_host_blocks, *shape), "int64", pinned=True) for _ in range(2))]

    def allocate_one(self) -> None:
        self.allocate(1, 0)


class LateRunner(ModelRunner):
    """The engine's own on a Device, made ready as LLM does. Every sequence must have its story."""

    def __init__(self, device: Device, scheduler: Scheduler, manager: BlockManager, **options: object) -> None:
        config = SimpleNamespace(vocab_size=2, num_kv_heads=1, head_dim=1, num_layers=1)
        super().__init__(
            config, Model(device), dtype="float32", kv_cache_dtype="int64", device=device,
            block_size=manager.block_size, max_model_len=scheduler.max_model_len, **options,
        )  # fmt: skip
        self.scheduler, self.stories = scheduler, dict[int, Story]()
        self.caches.move = self.move_pages
        self.warm_up()
        self.allocate(manager)
        self.capture_decodes()

    def move_pages(self, step: Step) -> None:
        KVCaches.move(self.caches, step)

    def fill(self, step: Step) -> StepInputs:
        manager, size = self.manager, self.manager.block_size
        rows = [
            Row(id, self.stories[id], start, end)
            for id, start, end in zip(step.ids, step.starts, step.ends, strict=True)
        ]
        tables = {seq.id: manager.block_table(seq.id) for seq in self.scheduler.running}
        pages, counts = np.unique(np.concatenate(list(tables.values())), return_counts=True)
        shared, taken = pages[counts > 1], [np.empty(0, np.int64)]
        for row in rows:
            table = tables[row.seq_id]
            first = max(row.start, manager.num_computed(row.seq_id))
            slots = (table[:, None] * np.int64(size) + np.arange(size)).reshape(-1)[first:]
            taken.append(slots[~np.isin(slots // size, shared)])
        caches, slots = self.caches.layers, np.concatenate(taken)
        self.model.on.call(lambda: self.model.expect(rows, caches, slots))
        return super().fill(step)


class Hidden:
    """In place of the model's buffers: a stamp for each token."""

    @staticmethod
    def allocate(config: object, num_tokens: int, dtype: str, device: Device) -> Hidden:
        buffers = Hidden()
        buffers.residual = FakeOps.empty(num_tokens, "int64", device)
        return buffers



def patch_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines made from now on compute on the Device that they are given as `device`."""
    names = {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "Buffers": Hidden,
        "KVCaches": FakeCaches,
        "allocate_plans": lambda *args: {},
    }
    for name, fake in names.items():
        monkeypatch.setattr(model_runner, name, fake)
    for module in (model_runner, kv_caches, sampler, sampling_options, step_memory):
        monkeypatch.setattr(module, "ops", FakeOps)
    monkeypatch.setattr(decode_graphs, "Graph", FakeGraph)
    monkeypatch.setattr(step_arrays, "Tensor", FakeTensor)
