"""From the host to a device: pieces are read, converted and repacked by several threads, while a GPU copies others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property, partial
from itertools import accumulate, chain
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np

from pagedkv import Event, Tensor, ops
from pagedkv.threads import Threads

from .weight import Part, Scales, Weight, stack_scales
from .weight_memory import WeightMemory

PIECE_BYTES = 4 << 20
MAX_THREADS = 16
Staging = SimpleQueue[tuple[Tensor, Event]]  # pinned memory, and the event behind the last copy from it
SCALES_ALIGNMENT = 4  # columns: what a GPU's library wants of the rows of scales of 128 x 128 blocks


class Piece(NamedTuple):
    """Rows that a thread writes."""

    target: Tensor
    write: Callable[[Tensor], object]  # into memory of the host


def _padded(scales: Scales) -> Tensor:
    """Rows of the scales of large blocks begin where SCALES_ALIGNMENT says."""
    rows, columns = scales.values.shape
    if scales.block[0] == 1:
        return scales.values
    padded = np.zeros((rows, -(-columns // SCALES_ALIGNMENT) * SCALES_ALIGNMENT), np.float32)
    padded[:, :columns] = scales.values.numpy()
    return ops.from_dlpack(padded)


class Upload:
    """Writes tensors of one device. On a GPU they are complete after ops.synchronize(). memory: of what it makes; None:
    each tensor has its own."""

    def __init__(self, device: str, memory: WeightMemory | None = None) -> None:
        self.device, self._memory = device, memory

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        return ops.empty(shape, dtype, self.device) if self._memory is None else self._memory.empty(shape, dtype)

    def copy(self, target: Tensor, view: Tensor) -> Tensor:
        """target = view, converted. Both are contiguous and of one shape."""
        there, here = target.view(-1), view.view(-1)
        self._run(_pieces(there, lambda first, last, out: out.copy_(here[first:last]), step=1))
        return target

    def place(self, parts: Sequence[Part], num_experts: int | None = None) -> Weight:
        """The weight of parts of one kind. What needs no work stays where it is, on the CPU. num_experts: one after the
        other has as many parts, and the weight is that of experts."""
        first = parts[0]
        if len(parts) == 1 and first.whole is not None and self.device == "cpu":
            data = first.whole
        else:
            data = self.empty((sum(part.num_rows for part in parts), first.row_size), first.dtype)
            ends = list(accumulate(part.num_rows for part in parts))
            rows = (data[end - part.num_rows : end] for end, part in zip(ends, parts, strict=True))
            self._run(chain(*(_pieces(its, part.write, part.step) for its, part in zip(rows, parts, strict=True))))
        if first.scales is None:
            return Weight(_of_experts(data, num_experts))
        scales = stack_scales(parts, num_experts or 1)
        zeros = None if scales.zeros is None else self.placed(ops.from_dlpack(scales.zeros))
        values = _of_experts(self.placed(_padded(scales)), num_experts)
        columns = slice(scales.values.shape[1])
        values = values[:, columns] if num_experts is None else values[:, :, columns]
        zeros = zeros if zeros is None else _of_experts(zeros, num_experts)
        return Weight(_of_experts(data, num_experts), values, zeros, scales.block, scales.quantizes_x)

    def placed(self, view: Tensor) -> Tensor:
        """A copy, or on the CPU the view itself."""
        if self.device == "cpu":
            return view
        return self.copy(self.empty(view.shape, view.dtype), view)

    def fetch(self, target: Tensor, source: Tensor) -> None:
        """target = source, bytes of a GPU's into memory of the host; waits for them."""
        staging = self._staging
        starts = range(0, source.nbytes, PIECE_BYTES)
        self._each(lambda at: _fetch(staging, target[at : at + PIECE_BYTES], source[at : at + PIECE_BYTES]), starts)

    def _run(self, pieces: Iterable[Piece]) -> None:
        if self.device == "cpu":
            self._each(lambda piece: piece.write(piece.target), list(pieces))
        else:
            self._each(partial(_stage, self._staging), list(pieces))

    def _each(self, action: Callable[[Any], object], items: Sequence[Any]) -> None:
        if len(items) == 1:
            action(items[0])
        else:
            self._threads.map(action, items)

    @cached_property
    def _num_threads(self) -> int:
        return min(MAX_THREADS, ops.get_num_threads())

    @cached_property
    def _threads(self) -> Threads:
        return Threads(self._num_threads, "pagedkv weights")

    @cached_property
    def _staging(self) -> Staging:
        """Two for each thread."""
        queue: Staging = SimpleQueue()
        for _ in range(2 * self._num_threads):
            queue.put((ops.empty(PIECE_BYTES, "uint8", pinned=True), Event(device=self.device)))
        return queue

    def close(self) -> None:
        """Waits for the device, and lets go of threads and staging memory."""
        ops.synchronize(self.device)
        if "_threads" in vars(self):
            self._threads.close()
        vars(self).pop("_threads", None)
        vars(self).pop("_staging", None)


def _of_experts(rows: Tensor, num_experts: int | None) -> Tensor:
    """[rows, columns], or [num_experts, rows, columns]."""
    if num_experts is None:
        return rows
    return rows.view((num_experts, len(rows) // num_experts, rows.shape[1]))


def _pieces(target: Tensor, write: Callable[[int, int, Tensor], object], step: int) -> Iterator[Piece]:
    """The rows of a tensor, by pieces of about PIECE_BYTES."""
    count = len(target)
    rows = max(1, PIECE_BYTES // max(1, target.nbytes // max(1, count)) // step) * step
    for first in range(0, count, rows):
        last = min(first + rows, count)
        yield Piece(target[first:last], partial(write, first, last))


def _stage(staging: Staging, piece: Piece) -> None:
    """Writes a piece of a GPU's tensor by way of pinned memory."""
    target = piece.target
    memory, event = staging.get()
    try:
        event.synchronize()  # the copy from this memory before is done
        if memory.nbytes < target.nbytes:
            memory = ops.empty(target.nbytes, "uint8", pinned=True)
        staged = memory[: target.nbytes].view(target.shape, target.dtype)
        piece.write(staged)
        target.copy_(staged)
        event.record()
    finally:
        staging.put((memory, event))


def _fetch(staging: Staging, target: Tensor, source: Tensor) -> None:
    """Reads a piece of a GPU's memory by way of pinned memory."""
    memory, event = staging.get()
    try:
        event.synchronize()
        staged = memory[: source.nbytes].copy_(source)
        event.record()
        event.synchronize()
        target.copy_(staged)
    finally:
        staging.put((memory, event))
