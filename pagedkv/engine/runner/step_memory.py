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

from ..scheduling.step import Step, StepInputs

NO_TABLE = np.empty((0, 0), np.int32)


class StepMemory:
    """The arrays of steps up to these sizes.

    Args:
        batch_sizes: of steps that only decode, in order; a step is padded to the next one
        plans: see Model.allocate_plans
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
    ) -> None:
        self._device, self._is_gpu = device, device != "cpu"
        self._batch_sizes, self._max_num_batched_tokens, self._plans = batch_sizes, max_num_batched_tokens, plans
        max_num_seqs = batch_sizes[-1]
        num_bytes = 4 * (3 * max_num_batched_tokens + 8 * max_num_seqs) + 10 * ALIGN
        self._host = [ops.empty(num_bytes, "uint8", pinned=self._is_gpu) for _ in range(2)]
        if not self._is_gpu:
            self._host[1] = self._host[0]
        self._there = ops.empty(num_bytes, "uint8", device) if self._is_gpu else self._host[0]
        self._decodes: dict[int, tuple[list[Arrays], Arrays]] = {}  # by batch size: the host's in turn, the device's
        self._temperatures, self._seeds = np.zeros(max_num_seqs, np.float32), np.zeros(max_num_seqs, np.int64)
        if self._is_gpu:
            shape = max_num_seqs, -(-max_model_len // block_size)
            self._host_tables = [ops.empty(shape[0] * shape[1], "int32", pinned=True) for _ in range(2)]
            self._tables = ops.empty(shape, "int32", device)
            self._table_there = NO_TABLE

    def fill(self, step: Step, arrays: Any, turn: int, *, needs_logits: bool) -> StepInputs:
        """Fills the step's arrays and starts their copy. `arrays` are what BlockManager.prepare() returns for it."""
        num_seqs, num_rows = len(step.sequences), len(step.sampled)
        if step.only_decodes:
            size = self._batch_sizes[bisect_left(self._batch_sizes, num_seqs)]
            hosts, there = self._decode_arrays(size)
            host = hosts[turn]
            pad(host, num_seqs)
        else:
            size, num_tokens = num_seqs, len(arrays.positions)
            host = Arrays(self._host[turn].numpy(), num_tokens, num_seqs, num_rows)
            there = Arrays(self._there, num_tokens, num_seqs, num_rows)
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
        self._upload(host, turn)
        tables = self._upload_tables(arrays.block_tables, size)
        if not step.only_decodes:  # attention chooses its kernel by what the tables have room for
            tables = tables[:, : arrays.block_tables.shape[1]]
        return there.inputs(tables, arrays.max_seqlen_q, self._plans, needs_logits=needs_logits)

    @staticmethod
    def _write_tokens(step: Step, host: Arrays) -> None:
        end = step.num_decodes
        np.subtract(-1, step.sources, out=host.token_ids[:end])
        if step.known:
            host.token_ids[step.known] = [step.sequences[i].new_tokens[-1] for i in step.known]
        for i in range(step.num_decodes, len(step.sequences)):
            start, length = step.starts[i], step.lengths[i]
            host.token_ids[end : end + length] = step.sequences[i].tokens[start : start + length]
            end += length

    def idle_decodes(self, num_seqs: int) -> StepInputs:
        """On a GPU: a step of padding only."""
        hosts, there = self._decode_arrays(num_seqs)
        ops.synchronize(self._device)  # the host's arrays may still be read
        pad(hosts[0], 0)
        self._upload(hosts[0], 0)
        return there.inputs(self._tables[:num_seqs], 1, self._plans)

    def idle_prompt(self) -> StepInputs:
        """On a GPU: a step of one prompt with max_num_batched_tokens tokens, whose KV is not stored."""
        num_tokens = self._max_num_batched_tokens
        ops.synchronize(self._device)
        host = Arrays(self._host[0].numpy(), num_tokens, 1, 1)
        host.token_ids[:], host.positions[:], host.slot_mapping[:], host.context_lens[:] = 0, 0, -1, 0
        host.cu_seqlens_q[:], host.last_tokens[:], host.next_positions[:] = [0, num_tokens], 0, 0
        host.temperatures[:], host.seeds[:] = 0, 0
        self._upload(host, 0)
        return Arrays(self._there, num_tokens, 1, 1).inputs(self._tables[:1], num_tokens, self._plans)

    def _decode_arrays(self, size: int) -> tuple[list[Arrays], Arrays]:
        if size not in self._decodes:
            sizes = (None, size, size)
            hosts = [Arrays(memory.numpy(), *sizes) for memory in self._host]
            self._decodes[size] = hosts, Arrays(self._there, *sizes)
        return self._decodes[size]

    def _upload(self, host: Arrays, turn: int) -> None:
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


def pad(arrays: Arrays, num_seqs: int) -> None:
    """Makes the decodes from num_seqs on padding: no keys, and nothing to write."""
    for array in (arrays.token_ids, arrays.positions, arrays.context_lens, arrays.temperatures, arrays.seeds):
        array[num_seqs:] = 0
    arrays.slot_mapping[num_seqs:] = -1


ALIGN = 64  # bytes, to which each array of a step is aligned


class Arrays:
    """The arrays of a step side by side in one piece of bytes, so that one copy brings all of them to the device.

    num_tokens None: a step that only decodes, one token per sequence, which needs fewer arrays.
    """

    def __init__(self, memory: np.ndarray | Tensor, num_tokens: int | None, num_seqs: int, num_rows: int) -> None:
        self._memory, self.num_bytes = memory, 0
        is_decode = num_tokens is None
        num_tokens = num_seqs if num_tokens is None else num_tokens
        self.seeds = self._array(num_rows, "int64")
        self.temperatures = self._array(num_rows, "float32")
        self.token_ids = self._array(num_tokens, "int32")
        self.positions = self._array(num_tokens, "int32")
        self.slot_mapping = self._array(num_tokens, "int32")
        self.context_lens = self._array(num_seqs, "int32")
        self.cu_seqlens_q: Any = None if is_decode else self._array(num_seqs + 1, "int32")
        self.last_tokens: Any = None if is_decode else self._array(num_rows, "int32")
        # The position of the next token is the length of the context.
        self.next_positions = self.context_lens if is_decode else self._array(num_rows, "int32")

    def _array(self, count: int, dtype: str) -> Any:
        start = -(-self.num_bytes // ALIGN) * ALIGN
        self.num_bytes = start + count * (8 if dtype == "int64" else 4)
        part = self._memory[start : self.num_bytes]
        return part.view(-1, dtype) if isinstance(part, Tensor) else part.view(dtype)

    def inputs(
        self, block_tables: Any, max_seqlen_q: int, plans: dict[tuple[int, int], Tensor], *, needs_logits: bool = False
    ) -> StepInputs:
        batch = Batch(
            self.token_ids, self.positions, self.slot_mapping, block_tables, self.context_lens, self.cu_seqlens_q,
            max_seqlen_q, plans,
        )  # fmt: skip
        numbers = self.temperatures, self.seeds, self.next_positions
        return StepInputs(batch, self.last_tokens, *numbers, needs_logits)
