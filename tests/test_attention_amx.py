"""The product of attention's rows by AMX against float64, with its tiles in plain C (amx_tiles.py), so that any x86 CPU
tests it. On a CPU with AMX test_attention.py runs it on the real tiles, in the whole kernel."""

import ctypes

import numpy as np
import oracle
import pytest
from amx_tiles import bits_of, load

LINES, PAIRS, COLUMNS = 16, 16, 32  # rows, pairs and columns are multiples of them
WRAPPER = """
#include "cpu/attention_tiles.h"
void product(int is_sum, const float *a, int64_t a_stride, const float *b, int64_t b_stride, float *c, int64_t c_stride,
             int64_t rows, int64_t columns, int64_t depth)
{
    multiply(is_sum, a, a_stride, b, b_stride, c, c_stride, rows, columns, depth);
}
"""


@pytest.fixture(scope="module")
def product(tmp_path_factory):
    folder = tmp_path_factory.mktemp("amx")
    (folder / "product.c").write_text(WRAPPER)
    function = load(folder, folder / "product.c").product
    function.argtypes = [ctypes.c_int, *[ctypes.c_void_p, ctypes.c_int64] * 3, *[ctypes.c_int64] * 3]
    function.restype = None
    return function


def words(numbers):
    """[rows, 2 n] as [rows, n] words, each two numbers in bfloat16."""
    return np.ascontiguousarray(bits_of(numbers)).view(np.uint32)


@pytest.mark.parametrize("is_sum", [False, True])
@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2), (3, 2, 1), (8, 4, 4), (5, 8, 3), *["random"] * 6], ids=str)
def test_product(product, rng, shape, is_sum):
    rows, columns, depth = np.multiply(rng.integers(1, 9, 3) if shape == "random" else shape, (LINES, COLUMNS, PAIRS))
    left, right = (oracle.rounded(rng.standard_normal(size), "bfloat16") for size in ((rows, 2 * depth), (columns, 2 * depth)))
    gaps = rng.integers(0, 9, 3)
    a = np.full((rows, depth + gaps[0]), 0x7FC07FC0, np.uint32)  # NaNs beside what is multiplied
    b = np.full((depth, columns + gaps[1]), 0x7FC07FC0, np.uint32)
    c = np.full((rows, columns + gaps[2]), np.nan, np.float32)
    a[:, :depth], b[:, :columns] = words(left), words(right).T
    before = rng.standard_normal((rows, columns)).astype(np.float32)
    if is_sum:
        c[:, :columns] = before
    operands = [each for m in (a, b, c) for each in (m.ctypes.data, m.shape[1])]
    product(is_sum, *operands, rows, columns, depth)
    expected = left.astype(np.float64) @ right.astype(np.float64).T + is_sum * before
    np.testing.assert_allclose(c[:, :columns], expected, atol=1e-4, rtol=1e-5)
    assert np.isnan(c[:, columns:]).all()
