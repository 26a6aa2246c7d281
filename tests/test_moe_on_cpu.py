"""A layer of experts on a Hopper GPU by its kernels' own code without one: few tokens in one kernel, and the products of many.
What is asynchronous is late (emulated_sm90.h)."""

import math
from pathlib import Path

import numpy as np
import oracle
import pytest
from emulated import load, patched, struct_of
from fuzz_calls_memory import decode, encode
from test_dequantize_on_cpu import DTYPES

Layer = struct_of("num_tokens", "num_experts", "num_chosen", "width", "normalizes", "adds_to_out", "dtype", "bad_token", "tag")
Many = struct_of("num_pairs", "num_experts", "num_chosen", "in_features", "out_features", "is_gated", "order", "num_groups", "dtype",
                 "x_stride", "x_pair_stride", "out_stride", "out_pair_stride")  # fmt: skip
AS_PAIRS, TO_ORDER, FROM_ORDER = range(3)
HIDDEN = 2048  # which the kernel is made for
DYNAMIC = ("extern __shared__ char dynamic_smem[];", "char *const dynamic_smem = emulated_dynamic();")


@pytest.fixture(scope="module")
def few(tmp_path_factory):
    folder, path = tmp_path_factory.mktemp("moe"), Path("cuda/experts/few_layer.cu")
    patched(folder, path, DYNAMIC, ("__shared__ layer_shared shared;", "auto &shared = emulated_static<layer_shared>();"))
    return load(folder, "moe_few_on_cpu.cpp", "moe_few_on_cpu", "-iquote", folder, "-O2")


@pytest.mark.parametrize(
    "tokens, num_experts, chosen, dtype, normalizes", [(1, 20, 8, "bfloat16", 1), (3, 16, 5, "float16", 0)], ids=str
)
def test_few_tokens_in_one_kernel(few, rng, tokens, num_experts, chosen, dtype, normalizes):
    width = 256
    x = rng.integers(-1, 2, (tokens, HIDDEN)).astype(np.float32)
    router = rng.integers(-1, 2, (num_experts, HIDDEN)) / 16.0
    gate_up = oracle.rounded(rng.standard_normal((num_experts, 2 * width, HIDDEN), np.float32) / HIDDEN**0.5, dtype)
    down = oracle.rounded(rng.standard_normal((num_experts, HIDDEN, width), np.float32) / width**0.5, dtype)
    before = oracle.rounded(rng.standard_normal((tokens, HIDDEN)), dtype)
    expected, ids, of_ids = oracle.moe_mlp(x, router, gate_up, down, chosen, dtype, normalizes)
    others = np.setdiff1d(np.arange(num_experts), ids[0])  # the first token's numbers have nothing to do with them
    gate_up[others[::2]] = down[others[1::2]] = np.nan
    right = ~np.isin(ids, others).any(1)
    given = [encode(each, dtype) for each in (x, router, gate_up, down)]
    for launch in range(2 if tokens == 1 else 1):  # the second one finds what the first has left
        its = Layer(tokens, num_experts, chosen, width, normalizes, launch, DTYPES[dtype])
        experts, weights, out = np.full((tokens, chosen), -9, np.int32), np.zeros((tokens, chosen), np.float32), encode(before, dtype)
        few(its, *given, experts, weights, out)
        assert its.bad_token == -1
        np.testing.assert_array_equal(experts, ids)
        np.testing.assert_allclose(weights, of_ids, rtol=1e-5)
        tolerance = 8 * oracle.tolerance(dtype)
        got, added = decode(out, dtype), before if launch else 0
        np.testing.assert_allclose(got[right], (expected + added)[right], atol=tolerance, rtol=tolerance)
        assert right[0] and np.isnan(got[~right]).all()


def test_logits_without_a_softmax(few, rng):
    x, router = np.zeros((2, HIDDEN)), np.zeros((16, HIDDEN))
    x[1, 7] = np.nan
    weights, experts = np.zeros((2, 8), np.float32), np.zeros((2, 8), np.int32)
    its, out = Layer(2, 16, 8, 256, 1, 0, DTYPES["bfloat16"]), encode(np.zeros((2, HIDDEN)), "bfloat16")
    given = [encode(each, "bfloat16") for each in (x, router, np.zeros((16, 512, HIDDEN)), np.zeros((16, HIDDEN, 256)))]
    few(its, *given, experts, weights, out)
    assert its.bad_token == 1
    np.testing.assert_array_equal(experts, np.tile(np.arange(8), (2, 1)))
    np.testing.assert_array_equal(weights[0], 1 / 8)
    assert np.isnan(weights[1]).all() and np.isnan(decode(out, "bfloat16")[1]).all()
    assert (decode(out, "bfloat16")[0] == 0).all()


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    folder, path = tmp_path_factory.mktemp("many"), Path("cuda/experts/many.cu")
    shared = "many_shared<many_shape<GATHERS>>"
    patched(folder, path, DYNAMIC, (f"__shared__ {shared} shared;", f"auto &shared = emulated_static<{shared}>();"))
    return load(folder, "experts_many_on_cpu.cpp", "experts_many_on_cpu", "-iquote", folder, "-O2")


def listed(ids, num_experts):
    """Groups of up to 192 pairs, and the pairs in their order."""
    known, groups, first = np.where((ids < 0) | (ids >= num_experts), num_experts, ids), [], 0
    for expert, count in enumerate(np.bincount(known, minlength=num_experts + 1)):
        rows = max(16, math.ceil(count / max(1, math.ceil(count / 192)) / 16) * 16)
        groups += [[expert, first + at, min(rows, count - at)] for at in range(0, count, rows)]
        first += count
    return np.array(groups, np.int32), np.argsort(known, kind="stable").astype(np.int32)


@pytest.mark.parametrize("counts, hidden", [((1, 0, 17, 129, 300), 208), ((195, 3, 64, 0, 20), 592)], ids=str)
def test_the_products_of_many_pairs(many, rng, counts, hidden):
    """Nothing divides evenly: fewer steps than stages, and more; rows that no expert has; out with and without aligned rows."""
    num_experts, chosen, size, dtype = len(counts), 3, 40, "bfloat16"
    ids = np.repeat(np.arange(num_experts), counts)
    rng.shuffle(ids)
    ids = ids[: len(ids) // chosen * chosen].astype(np.int64)
    ids[[5, 6, 70]] = -1, num_experts, 2**31 - 1
    groups, order = listed(ids, num_experts)
    pairs, is_known = len(ids), (ids >= 0) & (ids < num_experts)
    x = oracle.rounded(rng.standard_normal((pairs // chosen, hidden)), dtype)
    gate_up = oracle.rounded(rng.standard_normal((num_experts, 2 * size, hidden)) / hidden**0.5, dtype)
    down = oracle.rounded(rng.standard_normal((num_experts, hidden, size)) / size**0.5, dtype)
    some = np.where(is_known, ids, 0)
    products = np.where(is_known[:, None], oracle.expert_linear(np.repeat(x, chosen, 0), gate_up, some[:, None])[:, 0], 0)
    act = oracle.silu_and_mul(oracle.rounded(products, dtype), dtype)
    outs = np.where(is_known[:, None], oracle.expert_linear(act, down, some[:, None])[:, 0], 0)

    def multiply(x, weight, how, rows, columns, x_strides, out_pair_stride):
        out = np.full((rows, columns), np.nan)
        there = encode(out, dtype)
        its = Many(pairs, num_experts, chosen, weight.shape[2], weight.shape[1], weight is gate_up, how, len(groups), DTYPES[dtype],
                   *x_strides, chosen * out_pair_stride, out_pair_stride)  # fmt: skip
        many(its, encode(x, dtype), encode(weight, dtype), groups, order, there)
        return decode(there, dtype)

    by_pairs = multiply(x, gate_up, AS_PAIRS, pairs, size + 1, (hidden, 0), size + 1)
    np.testing.assert_allclose(by_pairs[:, :size], act, atol=0.03, rtol=0.02)
    assert np.isnan(by_pairs[:, size]).all()
    ordered = multiply(x, gate_up, TO_ORDER, pairs, size, (hidden, 0), size)
    np.testing.assert_array_equal(ordered, by_pairs[order, :size])
    expected = {"atol": 0.05, "rtol": 0.03}
    np.testing.assert_allclose(multiply(act[order], down, FROM_ORDER, pairs, hidden, (chosen * size, size), hidden), outs, **expected)
    np.testing.assert_allclose(multiply(act, down, AS_PAIRS, pairs, hidden, (chosen * size, size), hidden), outs, **expected)
