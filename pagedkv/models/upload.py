"""From the host to a device: pieces are read, converted and repacked by several threads, while a GPU copies others."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from queue import SimpleQueue

import numpy as np

from pagedkv import Event, Tensor, ops

from .weight import Part, Scales, Weight, stack_scales

PIECE_BYTES = 4 << 20
MAX_THREADS = 16
Staging = SimpleQueue[tuple[Tensor, Event]]  # pinned memory, and the event behind the last copy from it
SCALES_ALIGNMENT = 4  # columns: what a GPU's library wants of the rows of scales of 128 x 128 blocks


def _padded(scales: Scales) -> Tensor:
    """Rows of the scales of large blocks begin where SCALES_ALIGNMENT says."""
    rows, columns = scales.values.shape
    if scales.block[0] == 1:
        return scales.values
    padded = np.zeros((rows, -(-columns // SCALES_ALIGNMENT) * SCALES_ALIGNMENT), np.float32)
    padded[:, :columns] = scales.values.numpy()
    return ops.from_dlpack(padded)


class Upload:
    """Writes tensors of one device. On a GPU they are complete after ops.synchronize()."""

    def __init__(self, device: str) -> None:
        self.device = device

    def copy(self, target: Tensor, view: Tensor) -> Tensor:
        """target = view, converted. Both are contiguous and of one shape."""
        there, here = target.view(-1), view.view(-1)
        self._write(there, lambda first, last, out: out.copy_(here[first:last]), step=1)
        return target

    def place(self, parts: Sequence[Part]) -> Weight:
        """The weight of parts of one kind. What needs no work stays where it is, on the CPU."""
        first = parts[0]
        if len(parts) == 1 and first.whole is not None and self.device == "cpu":
            data = first.whole
        else:
            data = ops.empty((sum(part.num_rows for part in parts), first.row_size), first.dtype, self.device)
            start = 0
            for part in parts:
                self._write(data[start : start + part.num_rows], part.write, part.step)
                start += part.num_rows
        if first.scales is None:
            return Weight(data)
        scales = stack_scales(parts)
        zeros = None if scales.zeros is None else self.placed(ops.from_dlpack(scales.zeros))
        values = self.placed(_padded(scales))[:, : scales.values.shape[1]]
        return Weight(data, values, zeros, scales.block, scales.quantizes_x)

    def placed(self, view: Tensor) -> Tensor:
        """A copy, or on the CPU the view itself."""
        if self.device == "cpu":
            return view
        return self.copy(ops.empty(view.shape, view.dtype, self.device), view)

    def _write(self, target: Tensor, write: Callable[[int, int, Tensor], object], step: int) -> None:
        """The rows of a tensor, by pieces of about PIECE_BYTES."""
        count, staging = len(target), None if self.device == "cpu" else self._staging
        rows = max(1, PIECE_BYTES // max(1, target.nbytes // max(1, count)) // step) * step

        def write_piece(first: int) -> None:
            piece = target[first : first + rows]
            if staging is None:
                write(first, first + len(piece), piece)
            else:
                _stage(staging, piece, lambda out: write(first, first + len(piece), out))

        if count <= rows:
            write_piece(0)
        else:
            for _ in self._threads.map(write_piece, range(0, count, rows)):
                pass  # raises what a thread has raised

    @cached_property
    def _num_threads(self) -> int:
        return min(MAX_THREADS, ops.get_num_threads())

    @cached_property
    def _threads(self) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(self._num_threads, "pagedkv weights")

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
            self._threads.shutdown()
        vars(self).pop("_threads", None)
        vars(self).pop("_staging", None)


def _stage(staging: Staging, piece: Tensor, write: Callable[[Tensor], object]) -> None:
    """Writes a piece of a GPU's tensor by way of pinned memory."""
    memory, event = staging.get()
    try:
        event.synchronize()  # the copy from this memory before is done
        if memory.nbytes < piece.nbytes:
            memory = ops.empty(piece.nbytes, "uint8", pinned=True)
        staged = memory[: piece.nbytes].view(piece.shape, piece.dtype)
        write(staged)
        piece.copy_(staged)
        event.record()
    finally:
        staging.put((memory, event))
