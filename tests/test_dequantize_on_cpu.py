"""How a GPU dequantises a weight, by its own code without a GPU: every bit, and nothing beside the rows that are asked for."""

import numpy as np
import oracle
import pytest
from emulated import load, struct_of
from fuzz_calls_memory import encode

Quantised = struct_of("out_features", "in_features", "stride", "scales_stride", "zeros_stride", "block_rows", "block_columns", "dtype",
                      "scales_dtype", "x_dtype", "first", "count", "at_once")  # fmt: skip
DTYPES = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "uint8": 4}  # pk_dtype
CODES = {"float32": np.uint32, "float16": np.uint16, "bfloat16": np.uint16}
NOTHING = np.zeros(1, np.uint8)


@pytest.fixture(scope="module")
def dequantize(tmp_path_factory):
    return load(tmp_path_factory.mktemp("dequantize"), "dequantize_on_cpu.cpp", "dequantize_on_cpu")


def wide(rng, x, dtype: str, offset: int):
    """The codes of x within longer rows of random bytes, from `offset` on: where they begin, and the stride."""
    codes = x if dtype == "uint8" else encode(x, dtype)
    memory = rng.integers(0, 256, (len(x), (x.shape[1] + 16) * codes.itemsize), np.uint8).view(codes.dtype)
    memory[:, offset : offset + x.shape[1]] = codes
    return memory[:, offset:], memory.shape[1]


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("rows, size, block", [
    (1, 8, (1, 8)), (37, 520, (1, 520)), (130, 256, (128, 128)), (70, 300, (128, 128)), (9, 37, (2, 3)), (6, 1100, (6, 1100)), (5, 64, (4, 24))
], ids=str)  # fmt: skip
@pytest.mark.parametrize("offset", [0, 3, 4, 8])
def test_float8(dequantize, rng, offset, rows, size, block, dtype):
    numbers = oracle.rounded(rng.standard_normal((rows, size)) * 10 ** rng.uniform(-4, 2, (rows, size)), "float8_e4m3fn")
    numbers[rng.random((rows, size)) < 0.01] = np.nan
    scales = rng.uniform(1e-3, 1, (-(-rows // block[0]), -(-size // block[1]))).astype(np.float32)
    check(dequantize, rng, numbers, "float8_e4m3fn", scales, "float32", None, block, offset, dtype)


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("rows, size, group", [(1, 8, 8), (37, 512, 32), (66, 1152, 128), (9, 72, 24), (5, 1024, 1024)], ids=str)
@pytest.mark.parametrize("scales_dtype", CODES)
@pytest.mark.parametrize("offset", [0, 1, 4])
def test_int4(dequantize, rng, offset, scales_dtype, rows, size, group, dtype):
    numbers, shape = rng.integers(0, 16, (rows, size)), (rows, size // group)
    scales = oracle.rounded(rng.uniform(1e-3, 1, shape), scales_dtype)
    zeros = rng.integers(0, 17, shape).astype(np.uint8) if rng.integers(2) else None
    check(dequantize, rng, numbers, "uint8", scales, scales_dtype, zeros, (1, group), offset, dtype)


def check(dequantize, rng, numbers, format, scales, scales_dtype, zeros, block, offset, dtype):
    rows, size = numbers.shape
    expected = oracle.dequantized(numbers, scales, block, 0 if format != "uint8" else 8 if zeros is None else zeros)
    expected = oracle.rounded(expected.astype(np.float32), dtype)  # of a product in float32
    data, stride = wide(rng, oracle.packed_int4(numbers) if format == "uint8" else numbers, format, offset)
    of_blocks, scales_stride = wide(rng, scales, scales_dtype, 1)
    of_zeros, zeros_stride = (None, 0) if zeros is None else wide(rng, zeros, "uint8", 2)
    first = int(rng.integers(0, rows))
    count = int(rng.integers(1, rows - first + 1))
    out = np.full(count * size + 16, 0x5A5A, CODES[dtype])
    start = -out.ctypes.data % 16 // out.itemsize  # as scratch memory is
    weight = Quantised(
        rows, size, stride, scales_stride, zeros_stride, *block, DTYPES[format], DTYPES[scales_dtype], DTYPES[dtype],
        first, count,
    )
    dequantize(weight, data, of_blocks, 0 if of_zeros is None else of_zeros, out[start:])
    got, there = out[start : start + count * size].reshape(count, size), encode(expected[first : first + count], dtype).view(CODES[dtype])
    is_nan = np.isnan(expected[first : first + count])
    np.testing.assert_array_equal(got[~is_nan], there[~is_nan])
    exponent = {"float32": 0x7F800000, "float16": 0x7C00, "bfloat16": 0x7F80}[dtype]
    assert ((got[is_nan] & exponent == exponent) & (got[is_nan] & ~np.array(exponent, got.dtype) << 1 != 0)).all()
    assert (np.append(out[:start], out[start + count * size :]) == 0x5A5A).all()


@pytest.mark.parametrize("dtype, element", [("float32", 4), ("bfloat16", 2)])
@pytest.mark.parametrize(
    "rows, size",
    [
        (1, 1), (7, 4096), (4096, 4096), (6144, 4096), (24576, 4096), (151936, 1024), (5000, 33), (2**20, 8),
        (300, 2**24),
    ],
)
def test_ranges(dequantize, rows, size, dtype, element):
    """As many rows as 32 MB hold, or a few; all ranges but the last alike."""
    weight = Quantised(rows, size, size, 1, 0, rows, size, DTYPES["float8_e4m3fn"], 0, DTYPES[dtype], 0, 0)
    dequantize(weight, NOTHING, NOTHING, 0, NOTHING)
    assert weight.at_once == rows or weight.at_once % 128 == 0
    assert 0 < weight.at_once <= max((32 << 20) // (size * element), 128)
    assert weight.at_once <= 1 << 17
    assert -(-rows // weight.at_once) <= -(-rows * size * element // (30 << 20)) or weight.at_once in (128, 1 << 17)
