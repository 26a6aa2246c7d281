"""linear for many rows with batch_invariant on a Hopper GPU by its kernel's own code without one: its bits are those of the chains
that the weight says, whatever the rows. What is asynchronous is late (emulated_sm90.h)."""

from pathlib import Path

import numpy as np
import oracle
import pytest
from emulated import load, patched, struct_of
from fuzz_calls_memory import decode, encode
from test_dequantize_on_cpu import DTYPES

Wide = struct_of("num_rows", "in_features", "out_features", "rows", "num_splits", "dtype", "out_dtype", "out_stride", "num_squares",
                 "is_gated", "adds_to_out", "divides_by_rms", "is_constant", "num_ctas")  # fmt: skip
UNIT, INSTRUCTION, TILE = 128, 16, 64  # inputs of a unit of a part, and of an instruction; outputs


@pytest.fixture(scope="module")
def multiply(tmp_path_factory):
    folder, path = tmp_path_factory.mktemp("wide"), Path("cuda/linear/wide.cu")
    barriers, scales = "[wide_stages<N>], empty[wide_stages<N>];", "[N];"
    patched(folder, path, ("extern __shared__ char dynamic_smem[];", "char *const dynamic_smem = emulated_dynamic();"),
            (f"__shared__ uint64_t full{barriers}\n    __shared__ float scales{scales}",
             f"struct declared {{ uint64_t full{barriers} float scales{scales} }};\n"
             "auto &full = emulated_static<declared>().full, &empty = emulated_static<declared>().empty;\n"
             "auto &scales = emulated_static<declared>().scales;"))  # fmt: skip
    return load(folder, "linear_wide_on_cpu.cpp", "linear_wide_on_cpu", "-iquote", folder, "-O2")


def chains(x, weight, splits: int) -> np.ndarray:
    """Sums in float32 as the emulator forms them: 16 inputs, then these into their chain; chains of parts, which are added in order."""
    units, total = -(-x.shape[1] // UNIT), np.float32(0)
    for split in range(splits):
        part = slice(units * split // splits * UNIT, units * (split + 1) // splits * UNIT)
        of_x, of_weight = (np.pad(each[:, part], ((0, 0), (0, -each[:, part].shape[1] % INSTRUCTION))) for each in (x, weight))
        chain = np.zeros((len(x), len(weight)), np.float32)
        for first in range(0, of_x.shape[1], INSTRUCTION):
            some = np.zeros_like(chain)
            for k in range(first, first + INSTRUCTION):
                some += of_x[:, k, None] * of_weight[None, :, k]
            chain += some
        total = total + chain
    return total


def squares_of(out) -> np.ndarray:
    """Of each tile: 4 outputs in a chain, then in pairs."""
    fours = out.reshape(len(out), -1, 16, 4)
    sums = np.zeros(fours.shape[:3], np.float32)
    for i in range(4):
        exact = fours[..., i].astype(np.float64) ** 2 + sums
        sums = exact.astype(np.float32)
    for _ in range(4):
        sums = sums[..., ::2] + sums[..., 1::2]
    return sums[..., 0]


CASES = {
    "plain": {},
    "bias, added": {"has_bias": 1, "adds_to_out": 1, "num_splits": 3},
    "float32, added": {"out_dtype": "float32", "adds_to_out": 1, "num_splits": 2},
    "squares, added": {"adds_to_out": 1, "num_splits": 4, "leaves_squares": 1, "out_features": 320, "in_features": 1032},
    "gated": {"is_gated": 1, "num_splits": 2, "out_features": 328},
    "gated, divided, bias": {"is_gated": 1, "divides_by_rms": 1, "has_bias": 1, "out_features": 264, "in_features": 136},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype, rows, num_rows", [("bfloat16", 64, 139), ("float16", 128, 300), ("bfloat16", 128, 450), ("bfloat16", 0, 3)], ids=str)
def test_bits(multiply, rng, dtype, rows, num_rows, name):
    """`rows`: of an instance, or the one that is chosen."""
    case = {"out_features": 300, "in_features": 520, "num_splits": 1, "out_dtype": dtype} | CASES[name]
    size, outputs, is_gated = case["in_features"], case["out_features"], case.get("is_gated", 0)
    width = outputs // (1 + is_gated)
    x, weight = (oracle.rounded(rng.standard_normal((n, size)), dtype).astype(np.float32) for n in (num_rows, outputs))
    weight = oracle.rounded(weight / size**0.5, dtype).astype(np.float32)
    bias = oracle.rounded(rng.standard_normal(outputs), dtype).astype(np.float32) if case.get("has_bias") else None
    before = oracle.rounded(rng.standard_normal((num_rows, width)), case["out_dtype"]).astype(np.float32)
    x_squares = rng.uniform(0, 2, (num_rows, 8)).astype(np.float32)
    out = np.full((num_rows + 1, width + 4), 7.0)
    out[:-1, :width] = before
    there, squares = encode(oracle.rounded(out, case["out_dtype"]), case["out_dtype"]), np.full((num_rows + 1, outputs // TILE), np.nan, np.float32)
    its = Wide(num_rows, size, outputs, rows, case["num_splits"], DTYPES[dtype], DTYPES[case["out_dtype"]], width + 4, 8, is_gated,
               case.get("adds_to_out", 0), case.get("divides_by_rms", 0), num_rows % 2)  # fmt: skip
    multiply(its, encode(x, dtype), encode(weight, dtype), x_squares, encode(bias, dtype) if bias is not None else 0, there,
             squares if case.get("leaves_squares") else 0)  # fmt: skip
    sums = chains(x, weight, case["num_splits"])
    if case.get("divides_by_rms"):
        four = x_squares.reshape(num_rows, 2, 2, 2).sum(3, dtype=np.float32).sum(2, dtype=np.float32)  # of a thread
        sums *= (1 / np.sqrt((four[:, 0] + four[:, 1]) / np.float32(size) + np.float32(1e-6)))[:, None]
    sums += 0 if bias is None else bias
    if not is_gated:
        expected = sums + (before if case.get("adds_to_out") else 0)
        expected = oracle.rounded(expected, case["out_dtype"]).astype(np.float32)
    got = decode(there, case["out_dtype"])
    if is_gated:  # its exponential is not rounded as NumPy's
        expected = oracle.silu_and_mul(oracle.rounded(sums, dtype), dtype)
        np.testing.assert_allclose(got[:-1, :width], expected, atol=0.01, rtol=2 * oracle.tolerance(dtype))
    else:
        np.testing.assert_array_equal(got[:-1, :width], expected)
    assert (got[-1] == 7).all() and (got[:, width:] == 7).all()
    if case.get("leaves_squares"):
        np.testing.assert_array_equal(squares[:-1], squares_of(expected))
        assert np.isnan(squares[-1]).all()
    assert its.num_ctas > 1 or num_rows == 3
