"""Int4 in the layouts of files, and in that of ops.linear.

Files have words of 32 bits with eight values. Words along the inputs (compressed-tensors, and GPTQ transposed) need
their own values reordered, words along the outputs (AWQ) an 8 x 8 transposition. Both are a few operations of NumPy on
tiles that a core's L2 holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from pagedkv import Tensor, ops

from .. import ITEM_BYTES
from ..weight import INT4_ZERO, Part, Scales

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the value at each place of a word of ops.linear, and of AWQ
TILE = 128  # words
PER_WORD = 8

Words = np.ndarray  # uint32


def int4_unit(group_size: int) -> tuple[int, int]:
    """Rows and columns of a weight that a rank's share has whole. group_size -1: one group, which is everybody's."""
    return PER_WORD, math.lcm(PER_WORD, max(group_size, 1))


def words(tensor: Tensor) -> Words:
    return tensor.numpy().view(np.uint32)


def unpacked(packed: Words, order: tuple[int, ...] = tuple(range(PER_WORD))) -> np.ndarray:
    """uint8 [rows, 8 * columns] of words [rows, columns], whose places hold the values in this order."""
    values = np.empty((*packed.shape, PER_WORD), np.uint8)
    for place, which in enumerate(order):
        values[..., which] = (packed >> np.uint32(4 * place)) & np.uint32(15)
    return values.reshape(len(packed), -1)


def int4_part(
    shape: tuple[int, int],
    write: Callable[[int, int, Words], None],
    scales: Tensor,
    zeros: np.ndarray | None,
    *,
    step: int = 1,
) -> Part:
    """write: rows first..last into words [last - first, in_features / 8]; scales, zeros: [out_features, groups]."""
    num_rows, in_features = shape

    def write_bytes(first: int, last: int, out: Tensor) -> None:
        write(first, last, out.numpy().view(np.uint32))

    if zeros is not None and (zeros == INT4_ZERO).all():
        zeros = None
    block = 1, in_features // scales.shape[1]
    return Part(num_rows, in_features // 2, "uint8", write_bytes, step, Scales(scales, block, zeros))


def transposed(tensor: Tensor) -> Tensor:
    """A copy, [columns, rows]."""
    rows, columns = tensor.shape
    item = ITEM_BYTES[tensor.dtype]
    bits = tensor.view((rows, columns * item), "uint8").numpy().view(f"u{item}")
    return ops.from_dlpack(np.ascontiguousarray(bits.T).view(np.uint8)).view((columns, rows), tensor.dtype)


def write_along_inputs(packed: Words) -> Callable[[int, int, Words], None]:
    """packed: [out_features, in_features / 8], of any strides."""

    def write(first: int, last: int, out: Words) -> None:
        memory = np.empty((2, TILE, TILE), np.uint32)
        for row in range(first, last, TILE):
            for column in range(0, packed.shape[1], TILE):
                tile = packed[row : min(row + TILE, last), column : column + TILE]
                values, scratch = memory[:, : tile.shape[0], : tile.shape[1]]
                values[...] = tile
                for distance, mask in ((4, 0x00F000F0), (8, 0x0000FF00)):  # swaps pairs of places
                    np.right_shift(values, distance, out=scratch)
                    scratch ^= values
                    scratch &= np.uint32(mask)
                    values ^= scratch
                    scratch <<= np.uint32(distance)
                    values ^= scratch
                out[row - first : row - first + len(tile), column : column + TILE] = values

    return write


def write_along_outputs(packed: Words) -> Callable[[int, int, Words], None]:
    """packed: [in_features, out_features / 8], with outputs at the places of ORDER. Rows in multiples of 8."""
    by_eight = packed.reshape(len(packed) // PER_WORD, PER_WORD, -1)

    def write(first: int, last: int, out: Words) -> None:
        rows = out.reshape(-1, PER_WORD, out.shape[1])
        memory = np.empty(2 * PER_WORD * TILE * TILE, np.uint32)
        for start in range(first // PER_WORD, last // PER_WORD, TILE):
            for column in range(0, len(by_eight), TILE):
                tile = by_eight[column : column + TILE, :, start : min(start + TILE, last // PER_WORD)]
                size = tile.size
                values = memory[:size].reshape(PER_WORD, tile.shape[0], tile.shape[2])
                for place, which in enumerate(ORDER):
                    values[place] = tile[:, which]
                _transpose_places(values, memory[PER_WORD * TILE * TILE :])
                at = start - first // PER_WORD
                for place, which in enumerate(ORDER):
                    rows[at : at + tile.shape[2], which, column : column + TILE] = values[place].T

    return write


def _transpose_places(values: Words, memory: Words) -> None:
    """The place i of word j becomes place j of word i, of eight words each, which lie along the first dimension."""
    for distance, mask in ((4, 0x0000FFFF), (2, 0x00FF00FF), (1, 0x0F0F0F0F)):  # swaps quarters, as in a matrix
        pairs = values.reshape(PER_WORD // (2 * distance), 2, distance, *values.shape[1:])
        low, high = pairs[:, 0], pairs[:, 1]
        scratch = memory[: low.size].reshape(low.shape)
        np.right_shift(low, 4 * distance, out=scratch)
        scratch ^= high
        scratch &= np.uint32(mask)
        high ^= scratch
        scratch <<= np.uint32(4 * distance)
        low ^= scratch


def dense_part(packed: Words, scales: Tensor, zeros: np.ndarray | None, groups: np.ndarray, dtype: str) -> Part:
    """Of inputs whose groups are no neighbours (`groups`, one of each input): the values themselves, since no product
    takes its inputs in another order. packed: [out_features, in_features / 8]."""
    factors = ops.asarray(scales, "float32").numpy()
    shape = packed.shape[0], packed.shape[1] * PER_WORD

    def write(first: int, last: int, out: Tensor) -> None:
        step = max(1, (1 << 18) // max(1, shape[1]))
        for row in range(first, last, step):
            end = min(row + step, last)
            values = unpacked(packed[row:end]).astype(np.float32)
            values -= INT4_ZERO if zeros is None else zeros[row:end][:, groups]
            values *= factors[row:end][:, groups]
            out[row - first : end - first].view(-1).copy_(ops.from_dlpack(values).view(-1))

    return Part(*shape, dtype, write)
