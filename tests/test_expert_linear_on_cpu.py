"""Kernels of expert_linear on a GPU, the plain one and that for few tokens, by their own code without one: quantised weights,
poison around all that is read."""

from pathlib import Path

import numpy as np
import oracle
import pytest
from emulated import load, patched, struct_of
from fuzz_calls_memory import decode, encode
from test_dequantize_on_cpu import CODES, DTYPES
from test_experts import draw_experts
from test_weight import Weight

Called = struct_of("num_tokens", "num_experts", "num_chosen", "in_features", "out_features", "is_gated", "adds_to_out", "x_stride",
                   "x_pair_stride", "out_stride", "out_pair_stride", "stride", "expert_stride", "block_rows", "block_columns",
                   "scales_stride", "scales_expert_stride", "zeros_stride", "zeros_expert_stride", "dtype", "weight_dtype",
                   "scales_dtype", "is_few", "num_sms", "num_ctas", "is_aligned", "bad_token", "bad_expert")  # fmt: skip
KINDS = [
    "as x", "float8 blocks", "float8 channels", "float8 tensor", "float8 odd blocks", "int4 128", "int4 24",
    "int4 64", "int4 row",
]
FEW_KINDS = [
    "as x", "float8 blocks", "float8 channels", "float8 tensor", "int4 128", "int4 128 zeros", "int4 32", "int4 64",
]


@pytest.fixture(scope="module")
def multiply(tmp_path_factory):
    folder, header = tmp_path_factory.mktemp("experts"), Path("cuda/experts/few_kernel.h")
    patched(folder, header, ("extern __shared__ uint4 smem[];", "uint4 *const smem = smem_of_cta;"))
    return load(folder, "expert_linear_on_cpu.cpp", "expert_linear_on_cpu", "-iquote", folder)


def wide(x, dtype: str, poison, offset: int):
    """The codes of x [.., rows, columns] in larger memory of poison: where they begin, and the strides."""
    codes = x if dtype == "uint8" else encode(x, dtype)
    outer = np.full(x.shape[:-2] + (x.shape[-2] + 1, x.shape[-1] + 16), poison)
    memory = outer.astype(np.uint8) if dtype == "uint8" else encode(oracle.rounded(outer, dtype), dtype)
    memory[..., :-1, offset : offset + x.shape[-1]] = codes.reshape(x.shape)
    begin = memory.reshape(-1, memory.shape[-1])[:, offset:] if memory.size else memory
    return begin, [stride // memory.itemsize for stride in memory.strides[:-1]]


def aligned(array):
    """A copy whose first element lies at a multiple of 16 bytes, with all that is behind it."""
    base = array if array.base is None else array.base
    memory = np.empty(base.nbytes + 32, np.uint8)
    start = -memory.ctypes.data % 16
    copy = memory[start : start + base.nbytes].view(base.dtype).reshape(base.shape)
    copy[...] = base
    offset = (array.ctypes.data - base.ctypes.data) // array.itemsize
    return copy.reshape(-1)[offset:]


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 3, 2, 40, 6), (3, 5, 3, 77, 10), (2, 4, 2, 520, 16)], ids=str)
@pytest.mark.parametrize("form", ["products", "gated", "sums", "added sums"])
@pytest.mark.parametrize("offset", [0, 3])
def test_the_plain_kernel(multiply, rng, offset, form, shape, kind, dtype):
    its = check(multiply, rng, form, shape, kind, dtype, (offset, offset))
    is_even = kind != "as x" and "odd" not in kind and shape[3] % 8 == 0 and offset == 0
    assert not is_even or its.is_aligned or kind in ("int4 24", "int4 row") or dtype == "float32"


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", FEW_KINDS)
@pytest.mark.parametrize("shape", [(1, 3, 2, 1024, 40), (3, 5, 3, 992, 26), (8, 6, 2, 1024, 16)], ids=str)
@pytest.mark.parametrize("form", ["products", "gated", "added sums"])
def test_the_kernel_for_few_tokens(multiply, rng, form, shape, kind, dtype):
    """Eight warps, of which the last has half of a line of 992 inputs; some CTAs have several tiles."""
    if "128" in kind and shape[3] % 128:
        shape = (*shape[:3], 1024, shape[4])
    its = check(multiply, rng, form, shape, kind, dtype, (8, 8 if kind == "as x" else 16), is_few=1)
    assert its.num_ctas <= its.num_sms


def check(multiply, rng, form, shape, kind, dtype, offsets, is_few=0):
    """A call of random numbers; offsets: of x and of the weight, in wider rows."""
    tokens, num_experts, chosen, size, outputs = shape
    ids, is_summed = draw_experts(rng, tokens, num_experts, chosen), "sums" in form
    unused = np.setdiff1d(np.arange(num_experts), ids)
    if kind == "as x":
        values = oracle.rounded(rng.standard_normal((num_experts, outputs, size)) / size**0.5, dtype)
        data, form_of, scales, zeros, block, scales_dtype = values.copy(), dtype, None, None, (1, 1), "float32"
    else:
        each = [Weight(rng, kind, outputs, size) for _ in range(num_experts)]
        size, block, scales_dtype = each[0].size, each[0].block, each[0].scales_dtype
        form_of = "uint8" if each[0].is_int4 else "float8_e4m3fn"
        data = np.stack([oracle.packed_int4(one.numbers) if each[0].is_int4 else one.numbers for one in each])
        scales, values = np.stack([one.scales for one in each]), np.stack([one.values() for one in each])
        zeros = None if each[0].zeros is None else np.stack([one.zeros for one in each])
        scales[unused] = np.nan
    data[unused] = 255 if form_of == "uint8" else np.nan
    x = oracle.rounded(rng.standard_normal((tokens, chosen, size)), dtype)
    if not is_summed:
        x = x[:, :1]
    of_pairs = rng.random((tokens, chosen)).astype(np.float32)
    x_there, (x_stride, x_pair_stride) = wide(x, dtype, np.nan, offsets[0])
    data_there, strides = wide(data, form_of, 255 if form_of == "uint8" else np.nan, offsets[1])
    scales_there, scales_strides = (0, [0, 0]) if scales is None else wide(scales, scales_dtype, np.nan, 1)
    zeros_there, zeros_strides = (0, [0, 0]) if zeros is None else wide(zeros, "uint8", 255, 2)
    before = oracle.rounded(rng.standard_normal((tokens, 1 if is_summed else chosen, outputs // (1 + (form == "gated")))), dtype)
    out, (out_stride, out_pair_stride) = wide(before, dtype, -5, 4)
    its = Called(tokens, num_experts, chosen, size, outputs, form == "gated", form == "added sums", x_stride,
                 x_pair_stride if is_summed else 0, out_stride, 0 if is_summed else out_pair_stride, strides[1], strides[0], *block,
                 scales_strides[1], scales_strides[0], zeros_strides[1], zeros_strides[0], DTYPES[dtype], DTYPES[form_of], DTYPES[scales_dtype],
                 is_few, 3 if is_few else 132)  # fmt: skip
    weights = of_pairs if is_summed else 0
    multiply(its, aligned(x_there), aligned(data_there), scales_there, zeros_there, np.ascontiguousarray(ids), weights, out)
    assert its.bad_token == -1
    expected = oracle.expert_linear(x if is_summed else x[:, 0], values, ids, of_pairs if is_summed else None)
    tolerance = 2 * oracle.tolerance(dtype)
    if form == "gated":
        expected = oracle.silu_and_mul(oracle.rounded(expected, dtype).reshape(ids.size, outputs), dtype).reshape(before.shape)
    expected = expected.reshape(before.shape) + (before if form == "added sums" else 0)
    memory = out.base.reshape(-1, out.base.shape[-1]) if out.base is not None else out
    got = decode(memory.reshape(*before.shape[:-2], before.shape[-2] + 1, -1), dtype)
    np.testing.assert_allclose(got[:, :-1, 4 : 4 + before.shape[-1]], expected, atol=2 * tolerance, rtol=2 * tolerance)
    assert (got[:, -1] == -5).all() and (got[..., :4] == -5).all() and (got[..., 4 + before.shape[-1] :] == -5).all()
    return its


@pytest.mark.parametrize("is_few", [0, 1])
@pytest.mark.parametrize("kind", ["float8 blocks", "int4 128"])
def test_an_expert_out_of_range(multiply, rng, kind, is_few):
    weight = [Weight(rng, kind, 8, 1024) for _ in range(2)]
    form_of = "uint8" if weight[0].is_int4 else "float8_e4m3fn"
    data = encode(np.stack([one.numbers for one in weight]), form_of) if form_of != "uint8" else np.stack([oracle.packed_int4(one.numbers) for one in weight])
    scales = encode(np.stack([one.scales for one in weight]), weight[0].scales_dtype)
    blocks, size = scales.shape[2], data.shape[2]
    x, out, ids = np.ones((3, 1024), np.float16), np.full((3, 1, 8), np.nan, np.float16), np.array([[0], [2], [1]], np.int32)
    its = Called(3, 2, 1, 1024, 8, 0, 0, 1024, 0, 8, 8, size, 8 * size, *weight[0].block, blocks, scales[0].size, 0, 0, DTYPES["float16"],
                 DTYPES[form_of], DTYPES[weight[0].scales_dtype], is_few, 132)  # fmt: skip
    multiply(its, aligned(x), aligned(data), scales, 0, ids, 0, out)
    assert (its.bad_token, its.bad_expert) == (1, 2) and (out[1] == 0).all()
    expected = np.stack([one.values().sum(1) for one in weight])
    np.testing.assert_allclose(out[[0, 2], 0].astype(float), expected, rtol=2e-3, atol=2e-3)
