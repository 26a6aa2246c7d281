"""Memory for the arrays of steps, and their way to the device.

With a GPU the host has two sets of arrays in pinned memory, and fills them in turn, because the GPU may still read the
last one. On the CPU there is one set, which the model reads in place.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as SequenceOf
from typing import Any, NamedTuple

import numpy as np

from pagedkv import Tensor, ops
from pagedkv.models.spec import Batch

from ..scheduling.step import Step
from .plan import RunnerPlan

ALIGN = 64  # bytes, to which each array of a step is aligned
NO_TABLE = np.empty((0, 0), np.int32)


class StepHeader(NamedTuple):
    """What is to be known of a step besides its arrays, in integers."""

    num_tokens: int  # where the step only decodes: with padding
    num_seqs: int  # the same
    num_rows: int  # that are sampled, without padding
    max_seqlen_q: int
    only_decodes: bool
    has_guesses: bool
    needs_logits: bool
    has_adapters: bool
    keeps_hidden: bool  # whether all its hidden states are computed, for the prompts' own tokens
    table_rows: int  # of the block tables; 0: they are those of the step before
    table_columns: int
    num_bytes: int  # of the arrays

    @classmethod
    def of(cls, fields: SequenceOf[int]) -> StepHeader:
        """Of the integers of one, and what follows them."""
        header = cls._make(fields[: len(cls._fields)])
        names = "only_decodes", "has_guesses", "needs_logits", "has_adapters", "keeps_hidden"
        return header._replace(**{name: bool(getattr(header, name)) for name in names})


class StepMemory:
    """The arrays of steps up to the plan's sizes. plans: see Model.allocate_plans."""

    def __init__(self, plan: RunnerPlan, device: str, plans: dict[tuple[int, int], Tensor]) -> None:
        self._plan, self._device, self._is_gpu, self._plans = plan, device, device != "cpu", plans
        self._row_sizes, self.max_keys = plan.row_sizes(device), plan.max_model_len
        num_bytes = self._array_bytes(plan)
        self._host = [ops.empty(num_bytes, "uint8", pinned=self._is_gpu) for _ in range(2)]
        if not self._is_gpu:
            self._host[1] = self._host[0]
        self._there = ops.empty(num_bytes, "uint8", device) if self._is_gpu else self._host[0]
        # By batch size, and tokens where some are guesses: the host's arrays in turn, and the device's.
        self._decodes: dict[tuple[int, int | None], tuple[list[Batch], Batch]] = {}
        self._temperatures, self._seeds = (np.zeros(plan.max_num_rows, each) for each in (np.float32, np.int64))
        if self._is_gpu:
            shape = plan.max_num_seqs, -(-plan.max_model_len // plan.block_size)
            self._host_tables = [ops.empty(shape[0] * shape[1], "int32", pinned=True) for _ in range(2)]
            self._tables = ops.empty(shape, "int32", device)
            self._table_there = NO_TABLE
        self._new_table = NO_TABLE  # of the step that was filled last

    @staticmethod
    def _array_bytes(plan: RunnerPlan) -> int:
        return 4 * (4 * plan.max_num_batched_tokens + 9 * plan.max_num_rows) + 12 * ALIGN

    @staticmethod
    def most_bytes(plan: RunnerPlan) -> int:
        """Of a step's arrays and block tables."""
        return StepMemory._array_bytes(plan) + 4 * plan.max_num_seqs * -(-plan.max_model_len // plan.block_size)

    def fill(
        self, step: Step, arrays: Any, turn: int, *, needs_logits: bool, keeps_hidden: bool = False
    ) -> StepHeader:
        """Fills the step's arrays, which upload() brings to the device. `arrays` are what BlockManager.prepare()
        returns for it."""
        num_seqs, num_rows = len(step.sequences), len(step.sampled)
        has_guesses, max_seqlen_q = bool(step.guesses), arrays.max_seqlen_q
        if step.only_decodes:
            num_tokens = size = _next(self._plan.batch_sizes, num_seqs)
            if has_guesses:
                num_tokens, max_seqlen_q = _next(self._row_sizes, num_rows), 1 + self._plan.max_guesses
            host = self._decode_arrays(size, num_tokens if has_guesses else None)[0][turn]
            if num_seqs < size or num_rows < num_tokens:
                pad(host, num_seqs, num_rows)
        else:
            size, num_tokens = num_seqs, len(arrays.positions)
            host = self._arrays(self._host[turn].numpy(), num_tokens, num_seqs, num_rows)
            ends, end = step.sampled[step.num_decode_tokens :], step.num_decode_tokens
            host.last_tokens[:end] = np.arange(end)
            host.last_tokens[end:] = arrays.cu_seqlens_q[1:][ends] - 1
            host.next_positions[end:] = arrays.context_lens[ends]
        if host.cu_seqlens_q is not None:
            host.cu_seqlens_q[: num_seqs + 1] = arrays.cu_seqlens_q
            end = step.num_decode_tokens
            host.next_positions[:end] = arrays.positions[:end] + 1
        self._write_tokens(step, host)
        host.positions[: len(arrays.positions)] = arrays.positions
        host.slot_mapping[: len(arrays.slot_mapping)] = arrays.slot_mapping
        host.context_lens[:num_seqs] = arrays.context_lens
        if not step.is_same_batch:
            self._temperatures[:num_rows] = [seq.params.temperature for seq in step.receivers]
            self._seeds[:num_rows] = [seq.seed for seq in step.receivers]
        host.temperatures[:num_rows] = self._temperatures[:num_rows]
        host.seeds[:num_rows] = self._seeds[:num_rows]
        self._write_adapters(step, host)
        tables = arrays.block_tables
        table_rows = len(tables) if self._stage_tables(tables) else 0
        return StepHeader(
            num_tokens, size, num_rows, max_seqlen_q, step.only_decodes, has_guesses, needs_logits,
            step.adapter_slots is not None, keeps_hidden, table_rows, tables.shape[1], host.num_bytes,
        )  # fmt: skip

    def content(self, header: StepHeader, turn: int) -> tuple[np.ndarray, np.ndarray]:
        """The arrays of the step that was filled, and its block tables if they are new: for take() of another rank."""
        return self._host[turn].numpy()[: header.num_bytes], self._new_table

    def take(self, header: StepHeader, turn: int, arrays: np.ndarray, tables: np.ndarray) -> None:
        """In place of fill(): what another rank's content() has given. On the CPU the tables stay where they are."""
        self._host[turn].numpy()[: len(arrays)] = arrays
        if header.table_rows:
            self._stage_tables(tables.view(np.int32).reshape(header.table_rows, header.table_columns))

    def upload(self, header: StepHeader, turn: int) -> Batch:
        """Starts the copy of the arrays of the step that was filled, or taken, and returns those of the device."""
        if header.only_decodes:
            there = self._decode_arrays(header.num_seqs, header.num_tokens if header.has_guesses else None)[1]
        else:
            there = self._arrays(self._there, header.num_tokens, header.num_seqs, header.num_rows)
        self._upload(there, turn)
        there.block_tables = self._upload_tables(header)
        there.max_seqlen_q, there.needs_logits = header.max_seqlen_q, header.needs_logits
        there.keeps_hidden, there.has_adapters = header.keeps_hidden, header.has_adapters
        return there

    def _write_adapters(self, step: Step, host: Batch) -> None:
        if step.adapter_slots is None:
            return
        slots = np.array(step.adapter_slots, np.int32)
        host.adapter_slots[: step.num_tokens] = np.repeat(slots, step.lengths)
        if not step.only_decodes:  # in which a row is a token
            host.row_adapter_slots[:] = slots[step.sampled]

    @staticmethod
    def _write_tokens(step: Step, host: Batch) -> None:
        end = step.num_decode_tokens
        if step.guesses:
            pairs = zip(step.sequences, step.guesses, strict=False)
            host.token_ids[:end] = [token for seq, guesses in pairs for token in (seq.new_tokens[-1], *guesses)]
        else:
            np.invert(step.sources, out=host.token_ids[:end])  # -1 - row: see take_sampled
            if step.known:
                host.token_ids[step.known] = [step.sequences[i].new_tokens[-1] for i in step.known]
        for i in range(step.num_decodes, len(step.sequences)):
            start, length = step.starts[i], step.lengths[i]
            host.token_ids[end : end + length] = step.sequences[i].tokens[start : start + length]
            end += length

    def idle_decodes(self, num_seqs: int) -> Batch:
        """On a GPU: a step of padding only."""
        hosts, there = self._decode_arrays(num_seqs)
        ops.synchronize(self._device)  # the host's arrays may still be read
        pad(hosts[0], 0, 0)
        self._upload(hosts[0], 0)
        there.block_tables = self._tables[:num_seqs]
        return there

    def long_decodes(self, num_seqs: int, num_keys: int, num_blocks: int) -> Batch:
        """The same with so many keys each, in pages of their own where there are so many. Before the first step."""
        there, num_columns = self.idle_decodes(num_seqs), -(-num_keys // self._plan.block_size)
        pages = np.arange(num_seqs * num_columns, dtype=np.int32) % num_blocks
        self._tables[:num_seqs, :num_columns].copy_(pages.reshape(num_seqs, num_columns))
        there.context_lens.copy_(np.full(num_seqs, num_keys, np.int32))
        there.positions.copy_(np.full(num_seqs, num_keys - 1, np.int32))
        return there

    def idle_prompt(self) -> Batch:
        """On a GPU: a step of one prompt with max_num_batched_tokens tokens, whose KV is not stored."""
        num_tokens = self._plan.max_num_batched_tokens
        ops.synchronize(self._device)
        host, there = (self._arrays(memory, num_tokens, 1, 1) for memory in (self._host[0].numpy(), self._there))
        host.token_ids[:], host.positions[:], host.slot_mapping[:], host.context_lens[:] = 0, 0, -1, 0
        host.cu_seqlens_q[:], host.last_tokens[:], host.next_positions[:] = [0, num_tokens], 0, 0
        host.temperatures[:], host.seeds[:] = 0, 0
        if self._plan.lora is not None:
            host.adapter_slots[:], host.row_adapter_slots[:] = -1, -1
        self._upload(host, 0)
        there.block_tables, there.max_seqlen_q = self._tables[:1], num_tokens
        return there

    def _decode_arrays(self, size: int, num_tokens: int | None = None) -> tuple[list[Batch], Batch]:
        """num_tokens: with guesses; None: there are none."""
        key = size, num_tokens
        if key not in self._decodes:
            hosts = [self._arrays(memory.numpy(), num_tokens, size, None) for memory in self._host]
            self._decodes[key] = hosts, self._arrays(self._there, num_tokens, size, None)
        return self._decodes[key]

    def _arrays(
        self, memory: np.ndarray | Tensor, num_tokens: int | None, num_seqs: int, num_rows: int | None
    ) -> Batch:
        """Parts of the memory, which begins with them: one copy of it brings all to the device. A step that only
        decodes needs fewer arrays: num_rows None: a token is sampled after each; num_tokens None: one per sequence."""
        end, is_decode, are_all_sampled = 0, num_tokens is None, num_rows is None
        num_tokens = num_seqs if num_tokens is None else num_tokens
        num_rows = num_tokens if num_rows is None else num_rows

        def array(count: int, dtype: str = "int32") -> Any:
            nonlocal end
            start = -(-end // ALIGN) * ALIGN
            end = start + count * (8 if dtype == "int64" else 4)
            part = memory[start:end]
            return part.view(-1, dtype) if isinstance(part, Tensor) else part.view(dtype)

        seeds, temperatures = array(num_rows, "int64"), array(num_rows, "float32")
        token_ids, positions, slot_mapping = (array(num_tokens) for _ in range(3))
        context_lens = array(num_seqs)
        slots = None if self._plan.lora is None else array(num_tokens)
        # Of a decode the position of the next token is the length of the context.
        cu_seqlens_q, next_positions = (
            (None, context_lens) if is_decode else (array(num_seqs + 1), array(num_rows))
        )
        last_tokens = None if are_all_sampled else array(num_rows)
        row_slots = slots if are_all_sampled or slots is None else array(num_rows)
        return Batch(
            token_ids, positions, slot_mapping, NO_TABLE, context_lens, cu_seqlens_q, 1, self._plans, last_tokens,
            temperatures, seeds, next_positions, end, adapter_slots=slots, row_adapter_slots=row_slots,
        )  # fmt: skip

    def _upload(self, arrays: Batch, turn: int) -> None:
        if self._is_gpu:
            self._there[: arrays.num_bytes].copy_(self._host[turn][: arrays.num_bytes])

    def _stage_tables(self, tables: np.ndarray) -> bool:
        """Notes the block tables of the next upload. False, and there is none, if a GPU has the same already."""
        self._new_table = tables
        if not self._is_gpu:
            return True
        if np.array_equal(tables, self._table_there):
            self._new_table = NO_TABLE
            return False
        self._table_there = NO_TABLE  # until the copy has started: after an error in between nothing is known
        self._host_tables.reverse()  # the one not uploaded last
        self._new_table = self._host_tables[0][: tables.size].view(tables.shape).numpy()
        self._new_table[:] = tables
        return True

    def _upload_tables(self, header: StepHeader) -> Any:
        """The block tables on the device. Their rows are as long as max_model_len needs, so that graphs of decodes
        need not change. Only what is in use is copied, and nothing if the tables have not changed."""
        if not self._is_gpu:
            return self._new_table
        if header.table_rows:
            num_rows, num_columns = self._new_table.shape
            staged = self._host_tables[0][: self._new_table.size].view(self._new_table.shape)
            self._tables[:num_rows, :num_columns].copy_(staged)
            self._table_there = self._new_table
        tables = self._tables[: header.num_seqs]
        if header.only_decodes:
            return tables
        return tables[:, : header.table_columns]  # attention chooses its kernel by what the tables have room for


def _next(sizes: list[int], count: int) -> int:
    """The size that so many are padded to."""
    return sizes[bisect_left(sizes, count)]


def pad(arrays: Batch, num_seqs: int, num_tokens: int) -> None:
    """Makes decodes padding from num_seqs on, with tokens from num_tokens on: no keys, and nothing to write."""
    arrays.context_lens[num_seqs:] = 0
    for array in (arrays.token_ids, arrays.positions, arrays.temperatures, arrays.seeds):
        array[num_tokens:] = 0
    if arrays.cu_seqlens_q is not None:
        arrays.cu_seqlens_q[num_seqs + 1 :] = num_tokens
        arrays.next_positions[num_tokens:] = 0
    arrays.slot_mapping[num_tokens:] = -1
    if arrays.adapter_slots is not None:
        arrays.adapter_slots[num_tokens:] = -1
