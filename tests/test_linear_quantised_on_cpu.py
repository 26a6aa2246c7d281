"""The kernel of linear for few rows and a quantised weight, by its own code without a GPU: poison around all that is read."""

from pathlib import Path

import numpy as np
import oracle
import pytest
from cards import CARDS
from emulated import ROOT, load, struct_of
from fuzz_calls_memory import decode
from test_dequantize_on_cpu import DTYPES
from test_expert_linear_on_cpu import aligned, wide
from test_weight import Weight, make_x

Called = struct_of("num_rows", "in_features", "out_features", "is_gated", "adds_to_out", "is_batch_invariant", "is_constant", "x_stride",
                   "out_stride", "stride", "block_rows", "block_columns", "scales_stride", "zeros_stride", "dtype", "out_dtype",
                   "weight_dtype", "scales_dtype", "num_sms", "compute_capability", "num_ctas", "smem_bytes")  # fmt: skip
KINDS = ["float8 blocks", "float8 channels", "float8 tensor", "int4 128", "int4 128 zeros", "int4 64", "int4 32"]
# rows, inputs, outputs, SMs: warps without inputs, and with two lines of which one ends early; a block that ends early, one
# CTA with several rounds of them
SHAPES = [
    (1, 128, 8, 3), (2, 4224, 26, 3), (1, 2176, 420, 1), (3, 1152, 40, 3), (8, 384, 230, 1), (13, 640, 130, 1),
    (30, 288, 90, 1), (49, 1280, 20, 1),
]


def limit(kind: str, dtype: str) -> float:
    """Of an error, of |x| |weight|. int4 is 128 + n in bfloat16, and sums lose places below that."""
    return 1e-5 if kind.startswith("int4") and dtype == "bfloat16" else 3e-6


@pytest.fixture(scope="module")
def multiply(tmp_path_factory):
    folder, header = tmp_path_factory.mktemp("quantised"), Path("cuda/linear/few_quantised_kernel.h")
    if (ROOT / "csrc").exists():  # dynamic shared memory is an array without a size, which C++ has not
        before, after = "extern __shared__ uint4 smem[];", "uint4 *const smem = smem_of_cta;"
        text = (ROOT / "csrc" / header).read_text()
        assert before in text
        (folder / header.parent).mkdir(parents=True)
        (folder / header).write_text(text.replace(before, after))
    return load(folder, "linear_quantised_on_cpu.cpp", "linear_quantised_on_cpu", "-iquote", folder)


class Call:
    """A weight of random numbers within wider rows of poison, and calls with it."""

    def __init__(self, rng, multiply, kind: str, size: int, outputs: int) -> None:
        self.multiply, self.weight, self.outputs = multiply, Weight(rng, kind, outputs, size), outputs
        its = self.weight
        self.data_dtype = "uint8" if its.is_int4 else "float8_e4m3fn"
        data = oracle.packed_int4(its.numbers) if its.is_int4 else its.numbers
        data, (stride,) = wide(data, self.data_dtype, 255 if its.is_int4 else np.nan, 16)
        scales, (scales_stride,) = wide(its.scales, its.scales_dtype, np.nan, 1)
        zeros, (zeros_stride,) = (0, [0]) if its.zeros is None else wide(its.zeros, "uint8", 255, 2)
        self.parts, self.strides = (aligned(data), scales, zeros), (stride, scales_stride, zeros_stride)

    def __call__(self, x, dtype, *, before=None, bias=None, gated=False, out_dtype="", sms=3, card=90, invariant=False):
        its, out_dtype, width = self.weight, out_dtype or dtype, self.outputs // (1 + gated)
        x_there, (x_stride,) = wide(x, dtype, np.nan, 8)
        out, (out_stride,) = wide(np.zeros((len(x), width)) if before is None else before, out_dtype, -5, 4)
        stride, scales_stride, zeros_stride = self.strides
        called = Called(len(x), its.size, self.outputs, gated, before is not None, invariant, 1, x_stride, out_stride, stride, *its.block,
                        scales_stride, zeros_stride, DTYPES[dtype], DTYPES[out_dtype], DTYPES[self.data_dtype], DTYPES[its.scales_dtype],
                        sms, card)  # fmt: skip
        bias = 0 if bias is None else wide(bias[None], dtype, np.nan, 0)[0]
        self.multiply(called, aligned(x_there), *self.parts, bias, out)
        got = decode(out.base, out_dtype)
        assert (got[-1] == -5).all() and (got[:, :4] == -5).all() and (got[:, 4 + width :] == -5).all()
        return got[:-1, 4 : 4 + width], called


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products(multiply, rng, shape, kind, dtype):
    rows, size, outputs, sms = shape
    call = Call(rng, multiply, kind, size, outputs)
    x = make_x(rng, rows, call.weight.size, dtype)
    bias, before = oracle.rounded(rng.standard_normal(outputs), dtype), rng.standard_normal((rows, outputs)).astype(np.float32)
    x[:, :: int(rng.integers(2, 99))] *= 64
    got, called = call(x, dtype, before=before, bias=bias, out_dtype="float32", sms=sms)
    assert called.num_ctas <= 2 * sms
    size_of = oracle.linear(np.abs(x), np.abs(call.weight.values())).max()
    np.testing.assert_allclose(got, before + oracle.linear(x, call.weight.values(), bias), atol=limit(kind, dtype) * size_of, rtol=1e-6)


@pytest.mark.parametrize("kind", ["float8 blocks", "float8 channels", "int4 128 zeros", "int4 64"])
@pytest.mark.parametrize("rows, size, outputs", [(1, 2304, 52), (7, 512, 300), (16, 256, 36)])
def test_gated(multiply, rng, rows, size, outputs, kind):
    call = Call(rng, multiply, kind, size, outputs)
    x = make_x(rng, rows, call.weight.size, "bfloat16")
    product = oracle.rounded(oracle.linear(x, call.weight.values()), "bfloat16")
    tolerance = 2 * oracle.tolerance("bfloat16")
    got = call(x, "bfloat16", gated=True)[0]
    np.testing.assert_allclose(got, oracle.silu_and_mul(product, "bfloat16"), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("kind", ["float8 blocks", "int4 128", "int4 32"])
def test_a_rows_bits_do_not_depend_on_the_others(multiply, rng, kind):
    call = Call(rng, multiply, kind, 2304, 40)
    x = make_x(rng, 8, call.weight.size, "bfloat16")
    together = call(x, "bfloat16", out_dtype="float32", invariant=True)[0]
    for rows in ([0], [7, 2], [5, 1, 6]):
        alone = call(x[rows], "bfloat16", out_dtype="float32", invariant=True)[0]
        np.testing.assert_array_equal(alone, together[rows], err_msg=str(rows))


@pytest.mark.parametrize("card", CARDS, ids=str)
@pytest.mark.parametrize("rows", [2, 8, 16, 32])
def test_every_card_has_room(multiply, rng, rows, card):
    call = Call(rng, multiply, "float8 channels", 2176, 200)
    x = make_x(rng, rows, 2176, "bfloat16")
    got, called = call(x, "bfloat16", sms=1, card=card.compute_capability)
    assert called.smem_bytes <= card.smem_per_cta and called.num_ctas == (2 if card.smem_per_cta > 200_000 and rows < 32 else 1)
    tolerance = oracle.tolerance("bfloat16")
    np.testing.assert_allclose(got, oracle.linear(x, call.weight.values()), atol=tolerance, rtol=tolerance)
