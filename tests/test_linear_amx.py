"""The AMX kernel of linear against float64, with its tiles in plain C (amx_tiles.py), so that any x86 CPU tests it.
On a CPU with AMX test_linear.py runs the same kernel on the real tiles."""

import ctypes

import numpy as np
import oracle
import pytest
from amx_tiles import ROOT, bits_of, load

LINES, BLOCK, STEP = 16, 32, 32  # PK_AMX_LINES, PK_AMX_ROWS, PK_AMX_STEP
POISON = 0x7FC0  # a NaN


class DotArgs(ctypes.Structure):
    """pk_dot_args of csrc/cpu/linear.h"""

    _fields_ = [(name, ctypes.c_void_p) for name in ("x", "weight", "sums")]
    _fields_ += [(name, ctypes.c_int64) for name in ("num_rows", "num_outputs", "size", "x_stride", "weight_stride", "sums_stride")]
    _fields_ += [("dtype", ctypes.c_int), ("scratch", ctypes.c_void_p)]


@pytest.fixture(scope="module")
def kernel(tmp_path_factory):
    return load(tmp_path_factory.mktemp("amx"), ROOT / "csrc/cpu/linear_amx.c")


def aligned(shape, dtype, fill):
    """An array that begins at a cache line."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    buffer = np.zeros(size + 64, np.uint8)
    start = -buffer.ctypes.data % 64
    array = buffer[start : start + size].view(dtype).reshape(shape)
    array[...] = fill
    return array


def run(kernel, x, weight, gap):
    """sums, from rows with `gap` NaNs behind each."""
    (rows, size), outputs = x.shape, len(weight)
    wide_x, wide_weight = (np.full((len(a), size + gap), POISON, np.uint16) for a in (x, weight))
    wide_x[:, :size], wide_weight[:, :size] = bits_of(x), bits_of(weight)
    x_stride = -(-size // STEP) * STEP
    tiles = aligned((-(-rows // LINES) * LINES, x_stride), np.uint16, POISON)
    for first in range(0, rows, LINES):
        of = (tiles[first:].ctypes.data, wide_x[first:].ctypes.data, min(LINES, rows - first), size + gap, size)
        kernel.pk_amx_tiles_of(*map(ctypes.c_void_p, of[:2]), *map(ctypes.c_int64, of[2:]))
    padded = [-(-count // BLOCK) * BLOCK for count in (rows, outputs)]
    sums = aligned(padded, np.float32, np.nan)
    pointers = tiles.ctypes.data, wide_weight.ctypes.data, sums.ctypes.data
    kernel.pk_dot_amx(ctypes.byref(DotArgs(*pointers, rows, outputs, size, x_stride, size + gap, padded[1], 0, None)))
    return sums[:rows, :outputs].copy()


SHAPES = [(1, 0, 1), (1, 1, 1), (16, 32, 32), (17, 64, 33), (32, 31, 64), (33, 33, 31), (70, 257, 97), (3, 1024, 320)]


@pytest.mark.parametrize("shape", [*SHAPES, *["random"] * 12], ids=str)
def test_sums(kernel, rng, shape):
    rows, size, outputs = (*rng.integers(1, 80, 1), *rng.integers(0, 200, 1), *rng.integers(1, 200, 1)) if shape == "random" else shape
    x, weight = (oracle.rounded(rng.standard_normal((count, size)), "bfloat16") for count in (rows, outputs))
    gap = int(rng.integers(0, 9))
    sums = run(kernel, x, weight, gap)
    np.testing.assert_allclose(sums, x.astype(np.float64) @ weight.astype(np.float64).T, atol=1e-4, rtol=1e-5)
    row = int(rng.integers(rows))  # its sums are the same alone
    np.testing.assert_array_equal(run(kernel, x[row : row + 1], weight, gap)[0], sums[row])
