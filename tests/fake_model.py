"""A model that checks what it is given: the engine's real ModelRunner on a late device (fake_device.py).

Every slot of the KV cache holds a stamp of the token and of all tokens before it. A query checks the stamps of all keys
that it may see, when it runs. A slot that is taken and not written yet holds nobody's stamp.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from fake_device import Device, FakeEvent, FakeGraph, FakeOps, FakeStream, FakeTensor, next_token

from pagedkv import BlockManager, OutOfBlocks
from pagedkv.engine.cache import pool
from pagedkv.engine.cache.pool import KVCaches
from pagedkv.engine.runner import model_runner, plan, step_graphs, step_memory
from pagedkv.engine.runner.model_runner import ModelRunner
from pagedkv.engine.runner.plan import RunnerPlan, batch_sizes_of
from pagedkv.engine.sampling import logit_edits, sampler
from pagedkv.engine.scheduling.scheduler import Scheduler
from pagedkv.engine.scheduling.step import Step
from pagedkv.models.places import Places
from pagedkv.models.spec import Batch, KVLayer

NOBODY = -5  # the stamp of a slot that is taken and not written yet
OTHER = 0x5A5A5A  # what a value's stamp differs by from its key's


def stamp_of(before: int, token: int, position: int) -> int:
    """48 bits that stand for the KV of a token, given the stamp of the one before."""
    return hash((before, token, position)) & 0xFFFFFFFFFFFF


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

    def with_guesses(self, guesses: list[int], end: int) -> Story:
        """As far as `end`, with these as its last tokens."""
        tokens, stamps = self.tokens[: end - len(guesses)].tolist(), self.stamps[: end - len(guesses)].tolist()
        for guess in guesses:
            stamps.append(stamp_of(stamps[-1], guess, len(tokens)))
            tokens.append(guess)
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

    def allocate_logits(self, num_rows: int) -> FakeTensor:
        return FakeOps.empty((num_rows, 2), "float32", self.on)

    def allocate_buffers(self, num_tokens: int) -> Hidden:
        return Hidden(num_tokens, self.on)

    def allocate_plans(self, num_tokens: int, num_seqs: int) -> dict:
        return {}

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
        slots, lens, stamps = (
            batch.slot_mapping.array,
            batch.context_lens.array,
            np.zeros(len(batch.token_ids), np.int64),
        )
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
        spec = SimpleNamespace(vocab_size=2, kv_layers=[KVLayer(1, 1)])
        its_plan = RunnerPlan(
            folder=Path(), spec=spec, is_dummy=True, devices=(device,), dtype="int64", kv_cache_dtype="int64",
            block_size=manager.block_size, max_model_len=scheduler.max_model_len, lora=None, batch_invariant=False,
            batch_sizes=batch_sizes_of(device, scheduler.max_num_seqs, spec), **options,
        )  # fmt: skip
        super().__init__(its_plan, spec, Model(device), device, Places(device, "float32"))
        self.scheduler, self.stories = scheduler, dict[int, Story]()
        self.warm_up()
        self.allocate(manager)
        self.capture_decodes()

    def fill(self, step: Step) -> Batch:
        manager, size = self.manager, self.manager.block_size
        rows = [
            Row(id, self.stories[id], start, end)
            for id, start, end in zip(step.ids, step.starts, step.ends, strict=True)
        ]
        for i, guesses in enumerate(step.guesses):
            rows[i] = replace(rows[i], story=rows[i].story.with_guesses(guesses, rows[i].end))
        tables = {seq.id: manager.block_table(seq.id) for seq in self.scheduler.queues.running}
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

    def __init__(self, num_tokens: int, device: Device) -> None:
        self.residual = FakeOps.empty(num_tokens, "int64", device)


class LazyManager:
    """A BlockManager that frees later and in another order than it is told, but before anybody goes without a page."""

    TAKES_PAGES = ("allocate", "append_batch", "reserve_batch", "swap_in", "append")

    def __init__(self, manager: BlockManager, rng: random.Random, happened: Counter[str]) -> None:
        self.manager, self.rng, self.happened, self.late = manager, rng, happened, list[int]()

    def __getattr__(self, name: str):
        method = getattr(self.manager, name)
        return self._retried(method) if name in self.TAKES_PAGES else method

    def __setattr__(self, name: str, value: object) -> None:
        if name == "watermark_blocks":
            self.manager.watermark_blocks = value
        else:
            super().__setattr__(name, value)

    def __contains__(self, seq_id: int) -> bool:
        return seq_id in self.manager and seq_id not in self.late

    def _retried(self, method):
        def call(*args, **options):
            if method.__name__ == "allocate" and args[0] in self.late:  # it was preempted, and comes back
                self.late.remove(args[0])
                self.manager.free(args[0])
            while True:
                try:
                    return method(*args, **options)
                except OutOfBlocks:
                    if not self.late:
                        raise
                    self.free_one()

        return call

    def free_one(self) -> None:
        self.happened["late free"] += 1
        self.manager.free(self.late.pop(self.rng.randrange(len(self.late))))

    def free_batch(self, seq_ids: list[int]) -> None:
        self.late += seq_ids
        self.free_some()

    def free_some(self) -> None:
        while self.late and self.rng.random() < 0.7:
            self.free_one()

    def free_all(self) -> None:
        while self.late:
            self.free_one()


def patch_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines made from now on compute on the Device that they are given as `device`."""
    names = {
        "Stream": FakeStream,
        "Event": FakeEvent,
        "KVCaches": FakeCaches,
    }
    for name, fake in names.items():
        monkeypatch.setattr(model_runner, name, fake)
    monkeypatch.setattr(step_graphs, "Graph", FakeGraph)
    for module in (plan, model_runner, pool, sampler, logit_edits, step_memory):
        monkeypatch.setattr(module, "ops", FakeOps)
    monkeypatch.setattr(step_memory, "Tensor", FakeTensor)
