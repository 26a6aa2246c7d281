"""Memory for the arrays of steps, and their way to the device.

With a GPU the host has two sets of arrays in pinned memory, and fills them in turn, because the GPU may still read the
last one. On the CPU there is one set, which the model reads in place.
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

import numpy as np

from pagedkv import Tensor, ops
from pagedkv.models.spec import Batch

from ..scheduling.step import Step

ALIGN = 64  # bytes, to which each array of a step is aligned
NO_TABLE = np.empty((0, 0), np.int32)


class StepMemory:
    """The arrays of steps up to these sizes.

    Args:
        batch_sizes: of steps that only decode, in order; a step is padded to the next one
        plans: see Model.allocate_plans
        has_adapters: whether there is an adapter's slot for each token
    """

    def __init__(
        self,
        device: str,
        *,
        batch_sizes: list[int],
        block_size: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        plans: dict[tuple[int, int], Tensor],
        has_adapters: bool = False,
    ) -> None:
        self._device, self._is_gpu = device, device != "cpu"
        self._has_adapters = has_adapters
        self._batch_sizes, self._max_num_batched_tokens, self._plans = batch_sizes, max_num_batched_tokens, plans
        max_num_seqs = batch_sizes[-1]
        num_bytes = 4 * (4 * max_num_batched_tokens + 9 * max_num_seqs) + 12 * ALIGN
        self._host = [ops.empty(num_bytes, "uint8", pinned=self._is_gpu) for _ in range(2)]
        if not self._is_gpu:
            self._host[1] = self._host[0]
        self._there = ops.empty(num_bytes, "uint8", device) if self._is_gpu else self._host[0]
        # By batch size: the host's arrays in turn, and the device's.
        self._decodes: dict[int, tuple[list[Batch], Batch]] = {}
        self._temperatures, self._seeds = np.zeros(max_num_seqs, np.float32), np.zeros(max_num_seqs, np.int64)
        if self._is_gpu:
            shape = max_num_seqs, -(-max_model_len // block_size)
            self._host_tables = [ops.empty(shape[0] * shape[1], "int32", pinned=True) for _ in range(2)]
            self._tables = ops.empty(shape, "int32", device)
            self._table_there = NO_TABLE

    def fill(self, step: Step, arrays: Any, turn: int, *, needs_logits: bool) -> Batch:
        """Fills the step's arrays and starts their copy. `arrays` are what BlockManager.prepare() returns for it."""
        num_seqs, num_rows = len(step.sequences), len(step.sampled)
        if step.only_decodes:
            size = self._batch_sizes[bisect_left(self._batch_sizes, num_seqs)]
            hosts, there = self._decode_arrays(size)
            host = hosts[turn]
            pad(host, num_seqs)
        else:
            size, num_tokens = num_seqs, len(arrays.positions)
            host = self._arrays(self._host[turn].numpy(), num_tokens, num_seqs, num_rows)
            there = self._arrays(self._there, num_tokens, num_seqs, num_rows)
            host.cu_seqlens_q[:] = arrays.cu_seqlens_q
            host.last_tokens[:] = arrays.cu_seqlens_q[1:][step.sampled] - 1
            host.next_positions[:] = arrays.context_lens[step.sampled]
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
        self._upload(host, turn)
        tables = self._upload_tables(arrays.block_tables, size)
        if not step.only_decodes:  # attention chooses its kernel by what the tables have room for
            tables = tables[:, : arrays.block_tables.shape[1]]
        there.block_tables, there.max_seqlen_q, there.needs_logits = tables, arrays.max_seqlen_q, needs_logits
        there.has_adapters = step.adapter_slots is not None
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
        end = step.num_decodes
        np.subtract(-1, step.sources, out=host.token_ids[:end])
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
        pad(hosts[0], 0)
        self._upload(hosts[0], 0)
        there.block_tables = self._tables[:num_seqs]
        return there

    def idle_prompt(self) -> Batch:
        """On a GPU: a step of one prompt with max_num_batched_tokens tokens, whose KV is not stored."""
        num_tokens = self._max_num_batched_tokens
        ops.synchronize(self._device)
        host, there = (self._arrays(memory, num_tokens, 1, 1) for memory in (self._host[0].numpy(), self._there))
        host.token_ids[:], host.positions[:], host.slot_mapping[:], host.context_lens[:] = 0, 0, -1, 0
        host.cu_seqlens_q[:], host.last_tokens[:], host.next_positions[:] = [0, num_tokens], 0, 0
        host.temperatures[:], host.seeds[:] = 0, 0
        if self._has_adapters:
            host.adapter_slots[:], host.row_adapter_slots[:] = -1, -1
        self._upload(host, 0)
        there.block_tables, there.max_seqlen_q = self._tables[:1], num_tokens
        return there

    def _decode_arrays(self, size: int) -> tuple[list[Batch], Batch]:
        if size not in self._decodes:
            hosts = [self._arrays(memory.numpy(), None, size, size) for memory in self._host]
            self._decodes[size] = hosts, self._arrays(self._there, None, size, size)
        return self._decodes[size]

    def _arrays(
        self, memory: np.ndarray | Tensor, num_tokens: int | None, num_seqs: int, num_rows: int
    ) -> Batch:
        """Parts of the memory, which begins with them: one copy of it brings all to the device. num_tokens None: a step
        that only decodes, one token per sequence, needs fewer arrays."""
        end, is_decode = 0, num_tokens is None
        num_tokens = num_seqs if num_tokens is None else num_tokens

        def array(count: int, dtype: str = "int32") -> Any:
            nonlocal end
            start = -(-end // ALIGN) * ALIGN
            end = start + count * (8 if dtype == "int64" else 4)
            part = memory[start:end]
            return part.view(-1, dtype) if isinstance(part, Tensor) else part.view(dtype)

        seeds, temperatures = array(num_rows, "int64"), array(num_rows, "float32")
        token_ids, positions, slot_mapping = (array(num_tokens) for _ in range(3))
        context_lens = array(num_seqs)
        slots = array(num_tokens) if self._has_adapters else None
        # Of a decode the position of the next token is the length of the context.
        cu_seqlens_q, last_tokens, next_positions = (
            (None, None, context_lens) if is_decode else (array(num_seqs + 1), array(num_rows), array(num_rows))
        )
        row_slots = slots if is_decode or slots is None else array(num_rows)
        return Batch(
            token_ids, positions, slot_mapping, NO_TABLE, context_lens, cu_seqlens_q, 1, self._plans, last_tokens,
            temperatures, seeds, next_positions, end, adapter_slots=slots, row_adapter_slots=row_slots,
        )  # fmt: skip

    def _upload(self, host: Batch, turn: int) -> None:
        if self._is_gpu:
            self._there[: host.num_bytes].copy_(self._host[turn][: host.num_bytes])

    def _upload_tables(self, tables: np.ndarray, num_rows: int) -> Any:
        """The block tables on the device. Their rows are as long as max_model_len needs, so that graphs of decodes
        need not change. Only what is in use is copied, and nothing if the tables have not changed."""
        if not self._is_gpu:
            return tables
        if not np.array_equal(tables, self._table_there):
            self._host_tables.reverse()  # the one not uploaded last
            num_seqs, num_blocks = tables.shape
            staged = self._host_tables[0][: tables.size].view(tables.shape)
            staged.numpy()[:] = tables
            self._table_there = NO_TABLE  # until the copy has started: after an error in between nothing is known
            self._tables[:num_seqs, :num_blocks].copy_(staged)
            self._table_there = staged.numpy()
        return self._tables[:num_rows]


def pad(arrays: Batch, num_seqs: int) -> None:
    """Makes the decodes from num_seqs on padding: no keys, and nothing to write."""
    for array in (arrays.token_ids, arrays.positions, arrays.context_lens, arrays.temperatures, arrays.seeds):
        array[num_seqs:] = 0
    arrays.slot_mapping[num_seqs:] = -1
    if arrays.adapter_slots is not None:
        arrays.adapter_slots[num_seqs:] = -1
