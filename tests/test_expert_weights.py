"""expert_linear with quantised weights, against dequantised ones in float64: any shape, experts of nobody, uneven routing."""


import numpy as np
import oracle
import pytest
from again import run_again
from pools import get, put
from test_experts import DTYPES, IDS, draw_experts, floats
from test_weight import F8, KINDS, bytes_of, float8
from test_weight import Weight as OneWeight

from pagedkv import Graph, Stream, ops

# tokens, experts, chosen, inputs, outputs: none, one, odd, few and many rows of an expert beside each other
SHAPES = [(0, 4, 2, 64, 6), (1, 3, 2, 7, 5), (3, 4, 2, 0, 6), (3, 4, 2, 8, 0), (2, 5, 5, 40, 34), (1, 16, 8, 264, 66), (8, 9, 4, 130, 130),
          (9, 16, 4, 513, 66), (70, 6, 2, 77, 64), (300, 5, 2, 136, 70)]  # fmt: skip
SOME = ["float8 blocks", "float8 channels", "float8 odd blocks", "int4 128", "int4 24", "int4 64"]


class Weights:
    """Random ones of a kind, one for each expert. Those that no pair has are NaN, with their scales."""

    def __init__(self, rng, kind: str, outputs: int, size: int, num_experts: int, ids, *, is_whole: bool = False) -> None:
        self.each = [OneWeight(rng, kind, outputs, size, is_whole=is_whole) for _ in range(num_experts)]
        first = self.each[0]
        self.is_int4, self.block, self.size, self.scales_dtype = first.is_int4, first.block, first.size, first.scales_dtype
        self.unused = np.setdiff1d(np.arange(num_experts), ids)

    def arrays(self) -> dict:
        """As they are stored, but for float8 and scales, which are numbers."""
        data = [oracle.packed_int4(each.numbers) if self.is_int4 else each.numbers for each in self.each]
        scales, zeros = [each.scales for each in self.each], [each.zeros for each in self.each]
        arrays = {"weight": np.stack(data), "weight_scales": np.stack(scales)}
        arrays["weight_zeros"] = None if zeros[0] is None else np.stack(zeros)
        for name, value in {"weight": 255 if self.is_int4 else np.nan, "weight_scales": np.nan, "weight_zeros": 255}.items():
            if arrays[name] is not None:
                arrays[name][self.unused] = value
        return arrays

    def given(self, device: str, put_array=put) -> dict:
        dtypes = {"weight": None if self.is_int4 else F8, "weight_scales": self.scales_dtype, "weight_zeros": None}
        there = {name: array if array is None else put_array(array, device, dtypes[name]) for name, array in self.arrays().items()}
        return there | {"weight_block": self.block}

    def values(self) -> np.ndarray:
        return np.stack([each.values() for each in self.each])


def make_case(rng, shape, kind, dtype, *, ids=None, is_whole=False):
    """Weights, x for sums over experts, ids, and weights of the sums."""
    tokens, experts, chosen, size, outputs = shape
    ids = draw_experts(rng, tokens, experts, chosen) if ids is None else ids
    weights = Weights(rng, kind, outputs, size, experts, ids, is_whole=is_whole)
    drawn = rng.integers(-2, 3, (tokens, chosen, weights.size)) if is_whole else rng.standard_normal((tokens, chosen, weights.size))
    return weights, oracle.rounded(drawn, dtype), ids, rng.random((tokens, chosen)).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_and_sums(rng, device, shape, kind, dtype):
    weights, x, ids, of_pairs = make_case(rng, shape, kind, dtype)
    given, there, values, tolerance = weights.given(device), put(ids, device), weights.values(), 2 * oracle.tolerance(dtype)
    product = oracle.expert_linear(x[:, 0], values, ids)
    out = ops.expert_linear(put(x[:, 0], device, dtype), experts=there, **given)
    np.testing.assert_allclose(get(out), product, atol=tolerance, rtol=tolerance)
    before = oracle.rounded(rng.standard_normal((shape[0], shape[4])), dtype)
    out = put(before, device, dtype)
    ops.expert_linear(put(x, device, dtype), experts=there, weights=put(of_pairs, device), add_to_out=True, out=out, **given)
    np.testing.assert_allclose(get(out), before + oracle.expert_linear(x, values, ids, of_pairs), atol=tolerance, rtol=tolerance)
    if shape[4] % 2 == 0:
        gated = oracle.silu_and_mul(oracle.rounded(product, dtype).reshape(ids.size, shape[4]), dtype)
        out = ops.expert_linear(put(x[:, 0], device, dtype), experts=there, gated=True, weight_is_constant=True, **given)
        np.testing.assert_allclose(get(out), gated.reshape(*ids.shape, shape[4] // 2), atol=2 * tolerance, rtol=2 * tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 3, 8, 9, 40, 130])
def test_whole_numbers_are_exact(rng, device, tokens, kind, dtype):
    """Experts of one row beside one that all tokens have: each by another kernel of the CPU."""
    ids = np.stack([np.full(tokens, 4), np.arange(tokens) % 3], 1).astype(np.int32)
    weights, x, _, _ = make_case(rng, (tokens, 6, 2, 200, 72), kind, dtype, ids=ids, is_whole=True)
    before, of_pairs = rng.integers(-9, 10, (tokens, 72)) / 8, rng.integers(1, 4, (tokens, 2)).astype(np.float32)
    out, given = put(before, device, dtype), weights.given(device)
    arguments = put(ids, device), put(of_pairs, device)
    ops.expert_linear(put(x, device, dtype), experts=arguments[0], weights=arguments[1], add_to_out=True, out=out, **given)
    expected = before + oracle.expert_linear(x, weights.values(), ids, of_pairs)
    np.testing.assert_array_equal(get(out), oracle.rounded(expected, dtype))
    out = ops.expert_linear(put(x[:, 0], device, dtype), experts=arguments[0], **given)
    np.testing.assert_array_equal(get(out), oracle.rounded(oracle.expert_linear(x[:, 0], weights.values(), ids), dtype))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("tokens", [1, 8, 9, 70])
@pytest.mark.parametrize("routing", ["one for all", "twice the same"])
def test_uneven_experts(rng, device, routing, tokens, kind, dtype):
    ids = np.full((tokens, 2), 5, np.int32)
    if routing == "one for all":
        ids[:, 1] = rng.integers(0, 4, tokens)
    weights, x, _, of_pairs = make_case(rng, (tokens, 6, 2, 256, 66), kind, dtype, ids=ids)
    given, tolerance = weights.given(device), 2 * oracle.tolerance(dtype)
    out = ops.expert_linear(put(x, device, dtype), experts=put(ids, device), weights=put(of_pairs, device), **given)
    np.testing.assert_allclose(get(out), oracle.expert_linear(x, weights.values(), ids, of_pairs), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", SOME)
@pytest.mark.parametrize("tokens", [1, 6, 40])
def test_poison_around_rows(rng, device, tokens, kind, dtype):
    """Experts, rows and columns apart from each other, of the weight, its scales and zeros, of x and of out."""
    weights, x, ids, of_pairs = make_case(rng, (tokens, 5, 3, 256, 70), kind, dtype)

    def wide(array, device, dtype):
        poison = 255 if array.dtype == np.uint8 else np.nan
        outer = np.full(np.array(array.shape) + (1, 2, 7), poison, array.dtype)
        outer[1:, 1:-1, 3:-4] = array
        return put(outer, device, dtype)[1:, 1:-1, 3:-4]

    given, tolerance = weights.given(device, wide), 2 * oracle.tolerance(dtype)
    out = put(np.full((tokens, 75), -5.0), device, dtype)
    ops.expert_linear(wide(x, device, dtype), experts=put(ids, device), weights=put(of_pairs, device), out=out[:, 1:71], **given)
    np.testing.assert_allclose(get(out)[:, 1:71], oracle.expert_linear(x, weights.values(), ids, of_pairs), atol=tolerance, rtol=tolerance)
    assert (get(out)[:, [0, *range(71, 75)]] == -5).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [4, 60])
def test_nan_and_infinity_stay_where_they_are(rng, device, tokens, dtype):
    """An expert's, in its pairs and outputs."""
    numbers, scales = oracle.rounded(rng.standard_normal((3, 40, 300)), F8), np.ones((3, 40, 1), np.float32)
    numbers[1, 7, 137], scales[1, 20] = np.nan, np.inf
    ids = np.stack([np.arange(tokens) % 2, np.full(tokens, 2)], 1).astype(np.int32)
    x = put(rng.standard_normal((tokens, 300)), device, dtype)
    got = get(ops.expert_linear(x, put(numbers, device, F8), put(ids, device), weight_scales=put(scales, device)))
    assert np.isnan(got[1::2, 0, 7]).all() and not np.isfinite(got[1::2, 0, 20]).any()
    assert np.isfinite(got[::2]).all() and np.isfinite(got[:, 1]).all()
    assert np.isfinite(np.delete(got[:, 0], [7, 20], 1)).all()


@pytest.mark.parametrize("kind", ["float8 blocks", "int4 64"])
@pytest.mark.parametrize("tokens", [2, 12])
def test_experts_out_of_range(rng, device, tokens, kind):
    weights, x, ids, of_pairs = make_case(rng, (tokens, 6, 3, 128, 32), kind, "bfloat16")
    ids[1, 1] = 6
    out = put(np.full((tokens, 32), -5.0), device, "bfloat16")
    arguments = dict(experts=put(ids, device), weights=put(of_pairs, device), out=out, **weights.given(device))
    if device == "cpu":
        with pytest.raises(ValueError, match=r"experts\[4\] is 6 but must be 0 to 5"):
            ops.expert_linear(put(x, device, "bfloat16"), **arguments)
        assert (get(out) == -5).all()
        return
    ops.expert_linear(put(x, device, "bfloat16"), **arguments)
    with pytest.raises(ValueError, match="experts: token 1 has expert 6 but it must be at least 0 and below 6"):
        ops.check_errors()
    ids[1, 1], of_pairs[1, 1], tolerance = ids[1, 0], 0, 2 * oracle.tolerance("bfloat16")
    expected = oracle.expert_linear(x, weights.values(), ids, of_pairs)
    np.testing.assert_allclose(get(out), expected, atol=tolerance, rtol=tolerance)


def of(weight, scales, zeros=None, block=None, **options):
    return dict(weight=weight, weight_scales=scales, weight_zeros=zeros, weight_block=block, **options)


@pytest.mark.parametrize(("given", "error", "message"), [
    (dict(weight=float8(5, 4, 8)), TypeError, "weight: dtype is float8_e4m3fn, which needs weight_scales"),
    (dict(weight=floats(5, 4, 8), weight_zeros=bytes_of(5, 4, 1)), ValueError, "weight_zeros: needs weight_scales"),
    (of(floats(5, 4, 8), floats(5, 4, 1)), TypeError, "weight: dtype is float32 but must be one of float8_e4m3fn, uint8"),
    (of(float8(5, 4, 9), floats(5, 4, 1)), ValueError, "weight: dim 2 is 9 but x has K=8"),
    (of(float8(4, 8), floats(4, 1)), ValueError, "weight: has 2 dimensions but must have 3"),
    (of(bytes_of(5, 4, 5), floats(5, 4, 1)), ValueError, "weight: dim 2 is 5 but half of x has H=4"),
    (of(float8(5, 4, 8), floats(4, 1)), ValueError, "weight_scales: has 2 dimensions but must have 3"),
    (of(float8(5, 4, 8), floats(6, 4, 1)), ValueError, "weight_scales: dim 0 is 6 but weight has E=5"),
    (of(float8(5, 4, 8), floats(5, 3, 1)), ValueError, "weight_scales: dim 1 is 3 but must divide out_features, 4"),
    (of(float8(5, 4, 8), floats(5, 4, 1), block=(1, 4)), ValueError, "weight_scales: dim 2 is 1 but in_features, 8, has 2 blocks of 4"),
    (of(float8(5, 4, 8), floats(5, 4, 1), block=(3, 8)), ValueError, "weight_scales: dim 1 is 4 but out_features, 4, has 2 blocks of 3"),
    (of(float8(5, 4, 8), floats(5, 4, 1), bytes_of(5, 4, 1)), ValueError, "weight_zeros: only with a weight of int4"),
    (of(bytes_of(5, 4, 4), floats(5, 2, 1)), ValueError, "weight_scales: blocks are 2 x 8 but must be 1 x a multiple of 8 that divides 8"),
    (of(bytes_of(5, 4, 4), floats(5, 4, 1), bytes_of(4, 4, 1)), ValueError, "weight_zeros: dim 0 is 4 but weight has E=5"),
    (of(bytes_of(5, 3, 4), floats(5, 3, 1), gated=True), ValueError, "weight: dim 1 is 3 but must be even"),
])  # fmt: skip
def test_refusals(given, error, message):
    with pytest.raises(error, match=message):
        ops.expert_linear(floats(2, 8), experts=IDS, **given)


def test_every_instruction_set(lesser_isa):
    run_again(__file__, "cpu and (exact or products)", PAGEDKV_CPU_ISA=lesser_isa)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("kind", ["float8 blocks", "float8 channels", "int4 128", "int4 32"])
@pytest.mark.parametrize("tokens", [1, 5, 8, 40, 300])
def test_graphs_replay_any_routing(rng, cuda, tokens, kind, dtype):
    """Ids change between replays; the bits are those of a call by itself."""
    ids = [draw_experts(rng, tokens, 33, 8) for _ in range(4)]
    weights, x, _, of_pairs = make_case(rng, (tokens, 33, 8, 768, 256), kind, dtype, ids=np.concatenate(ids))
    given, there, stream, graph = weights.given(cuda), put(ids[0], cuda), Stream(cuda), Graph()
    x_there, pairs_there, out = put(x, cuda, dtype), put(of_pairs, cuda), put(np.zeros((tokens, 256)), cuda, dtype)
    arguments = dict(experts=there, weights=pairs_there, weight_is_constant=True, out=out, stream=stream, **given)
    ops.expert_linear(x_there, **arguments)
    ops.synchronize(cuda)
    with graph.capture(stream):
        ops.expert_linear(x_there, **arguments)
    for each in ids:
        there.copy_(put(each, cuda), stream=stream)
        graph.replay()
        stream.synchronize()
        replayed, tolerance = get(out), 2 * oracle.tolerance(dtype)
        expected = oracle.expert_linear(x, weights.values(), each, of_pairs)
        np.testing.assert_allclose(replayed, expected, atol=tolerance, rtol=tolerance)
        ops.expert_linear(x_there, **arguments)
        stream.synchronize()
        np.testing.assert_array_equal(get(out), replayed)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["float8 blocks", "float8 odd blocks", "int4 128", "int4 32"])
@pytest.mark.parametrize("most, fewer", [(8, (1, 3)), (40, (9, 17))])
def test_bits_of_a_token_do_not_depend_on_the_others(rng, cuda, most, fewer, kind):
    """Up to 8 tokens on a GPU, and beyond. (A CPU multiplies few rows of an expert otherwise than many.)"""
    weights, x, ids, of_pairs = make_case(rng, (most, 32, 4, 512, 64), kind, "bfloat16")
    given = weights.given(cuda)

    def bits(first):
        there = put(ids[first:], cuda)
        rows = put(x[first:], cuda, "bfloat16"), put(x[first:, 0], cuda, "bfloat16")
        summed = ops.expert_linear(rows[0], experts=there, weights=put(of_pairs[first:], cuda), **given)
        return get(summed), get(ops.expert_linear(rows[1], experts=there, gated=True, **given))

    together = bits(0)
    for count in fewer:
        for got, expected in zip(bits(most - count), together, strict=True):
            np.testing.assert_array_equal(got, expected[most - count :])
