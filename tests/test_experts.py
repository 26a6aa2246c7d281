"""route_experts and expert_linear against float64: any shape, ties, experts of nobody, bad ids."""

import numpy as np
import oracle
import pytest
from pools import floats, get, put, put_sliceable
from producer import Producer

import pagedkv
from pagedkv import ops

DTYPES = ["float32", "float16", "bfloat16"]


# --- route_experts


def route(logits, num_chosen, device, normalize=False):
    experts = put(np.full((len(logits), num_chosen), -7, np.int32), device)
    weights = put(np.full((len(logits), num_chosen), -7, np.float32), device)
    assert ops.route_experts(logits, normalize=normalize, out_experts=experts, out_weights=weights) is None
    return get(experts).astype(int), get(weights)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", [(0, 8, 2), (1, 1, 1), (3, 5, 5), (9, 128, 8), (65, 60, 4), (300, 512, 10), (4, 1024, 32), (2, 33, 32)],
                         ids=str)  # fmt: skip
def test_route_experts(rng, device, dtype, normalize, shape):
    tokens, experts, chosen = shape
    logits = oracle.rounded(rng.standard_normal((tokens, experts)) * 3, dtype)
    logits[1::3] = np.round(logits[1::3])  # many equals
    logits[2::5, ::2] = -np.inf
    got, weights = route(put(logits, device, dtype), chosen, device, normalize)
    expected, expected_weights = oracle.route_experts(logits, chosen, normalize)
    np.testing.assert_array_equal(got, expected)
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5, atol=1e-7)


def test_ties_go_to_the_lower_expert(device):
    logits = np.array([[0, 0, 0, 0], [1, 2, 2, 1], [-0.0, 0, -0.0, 1]], np.float32)
    got, weights = route(put(logits, device), 3, device, normalize=True)
    np.testing.assert_array_equal(got, [[0, 1, 2], [1, 2, 0], [3, 0, 1]])
    np.testing.assert_allclose(weights[0], 1 / 3, rtol=1e-6)


def test_huge_logits_have_a_softmax(device):
    logits = np.array([[3e38, -3e38, 3e38], [-3e38, -3e38, -3.2e38]], np.float32)
    got, weights = route(put(logits, device), 2, device)
    np.testing.assert_array_equal(got, [[0, 2], [0, 1]])
    np.testing.assert_allclose(weights, 0.5, rtol=1e-6)


def test_rows_of_logits_apart(rng, device):
    wide = np.full((6, 40), np.nan)
    wide[:, 3:20] = rng.standard_normal((6, 17))
    got, _ = route(put_sliceable(wide, device, "float32")[:, 3:20], 4, device)
    np.testing.assert_array_equal(got, oracle.route_experts(wide[:, 3:20].astype(np.float32), 4)[0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, None])
def test_logits_without_a_softmax(rng, device, bad):
    logits = rng.standard_normal((5, 40)).astype(np.float32)
    if bad is None:
        logits[3] = -np.inf
    else:
        logits[3, 17] = bad
    before = np.full((5, 3), -7)
    if device == "cpu":
        experts, weights = before.astype(np.int32), before.astype(np.float32)
        with pytest.raises(ValueError, match=r"logits\[3\] has no softmax"):
            ops.route_experts(logits, out_experts=experts, out_weights=weights)
        assert (experts == -7).all() and (weights == -7).all()
        return
    experts, weights = route(put(logits, device), 3, device)
    with pytest.raises(ValueError, match="logits: token 3 has no softmax"):
        ops.check_errors()
    np.testing.assert_array_equal(experts[3], [0, 1, 2])
    assert np.isnan(weights[3]).all()
    others = [0, 1, 2, 4]
    np.testing.assert_array_equal(experts[others], oracle.route_experts(logits[others], 3)[0])


def test_tokens_that_are_none_have_no_address():
    """What a producer says of a tensor without elements; a copy to nowhere is an error under UBSan."""
    logits, experts, weights = Producer(0, (0, 8), None, "f4"), Producer(0, (0, 3), None, "i4"), Producer(0, (0, 3), None, "f4")
    assert ops.route_experts(logits, out_experts=experts, out_weights=weights) is None
    x, weight = Producer(0, (0, 3, 8), None, "f4"), floats(8, 4, 8)
    ops.expert_linear(x, weight, experts, weights=weights, out=Producer(0, (0, 4), None, "f4"))


# --- expert_linear

# tokens, experts, chosen, inputs, outputs; beyond 8 tokens another kernel, beyond 64 rows of an expert another tile
SHAPES = [
    (0, 4, 2, 8, 6), (1, 8, 3, 7, 5), (2, 3, 3, 1, 2), (3, 4, 2, 0, 6), (3, 4, 2, 8, 0), (5, 9, 4, 33, 14),
    (1, 1, 1, 64, 16), (1, 128, 8, 256, 96), (2, 16, 4, 64, 48), (4, 6, 6, 520, 34), (7, 32, 8, 768, 136),
    (8, 40, 8, 128, 64), (9, 16, 4, 136, 66), (63, 8, 2, 64, 130), (64, 8, 2, 192, 128), (65, 8, 3, 72, 64),
    (300, 5, 2, 264, 200), (150, 3, 2, 264, 208), (33, 200, 1, 40, 24), (8, 64, 16, 40, 8),
]  # fmt: skip


def draw_experts(rng, tokens, experts, chosen):
    """Different ones for a token, as routing leaves them; the last expert is nobody's where there are enough."""
    most = experts - 1 if experts > chosen else experts
    return np.stack([rng.permutation(most)[:chosen] for _ in range(tokens)] or [np.zeros((0, chosen))]).reshape(-1, chosen).astype(np.int32)


def make_case(rng, shape, dtype, is_summed, ids=None):
    tokens, experts, chosen, size, outputs = shape
    x = oracle.rounded(rng.standard_normal((tokens, chosen, size) if is_summed else (tokens, size)), dtype)
    weight = oracle.rounded(rng.standard_normal((experts, outputs, size)) / max(size, 1) ** 0.5, dtype)
    ids = draw_experts(rng, tokens, experts, chosen) if ids is None else ids
    weight[np.setdiff1d(np.arange(experts), ids)] = np.nan  # what nobody has is not read into any result
    return x, weight, ids, rng.random((tokens, chosen)).astype(np.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_of_pairs(rng, device, dtype, gated, shape):
    if gated and shape[4] % 2:
        pytest.skip("a gate above up")
    x, weight, experts, _ = make_case(rng, shape, dtype, False)
    out = ops.expert_linear(put(x, device, dtype), put(weight, device, dtype), put(experts, device), gated=gated)
    expected, tolerance = oracle.expert_linear(x, weight, experts), oracle.tolerance(dtype)
    if gated:
        rows = oracle.rounded(expected, dtype).reshape(experts.size, shape[4])
        expected, tolerance = oracle.silu_and_mul(rows, dtype).reshape(*experts.shape, shape[4] // 2), 3 * tolerance
    np.testing.assert_allclose(get(out), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_sums_over_a_tokens_experts(rng, device, dtype, adds, shape):
    x, weight, experts, weights = make_case(rng, shape, dtype, True)
    out = before = oracle.rounded(rng.standard_normal((shape[0], shape[4])), dtype)
    out = put(before, device, dtype) if adds else None
    arguments = put(x, device, dtype), put(weight, device, dtype), put(experts, device)
    result = ops.expert_linear(*arguments, weights=put(weights, device), add_to_out=adds, out=out)
    assert out is None or result is out
    expected = oracle.expert_linear(x, weight, experts, weights) + (before if adds else 0)
    tolerance = 2 * oracle.tolerance(dtype)
    np.testing.assert_allclose(get(result), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("case", range(30))
@pytest.mark.parametrize("dtype", DTYPES)
def test_random_shapes(rng, device, dtype, case):
    tokens, chosen = int(rng.choice([*range(1, 10), 15, 16, 17, 40])), int(rng.integers(1, 9))
    experts = chosen + int(rng.integers(0, 24))
    step = int(rng.choice([1, 2, 8, 16]))
    shape = tokens, experts, chosen, step * int(rng.integers(1, 40)), 2 * step * int(rng.integers(1, 20))
    test_products_of_pairs(rng, device, dtype, bool(case % 2), shape)
    test_sums_over_a_tokens_experts(rng, device, dtype, bool(case % 2), shape)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [7, 130, 1000])
def test_many_experts_of_which_few_have_most_tokens(rng, device, dtype, tokens):
    ids = np.stack([rng.permutation(1024)[:3] for _ in range(tokens)]).astype(np.int32)
    ids[rng.random(tokens) < 0.6, 1] = 1023
    ids[rng.random(tokens) < 0.3, 2] = 1  # an expert may come twice
    shape = (tokens, 1024, 3, 40, 24)
    x, weight, _, weights = make_case(rng, shape, dtype, True, ids)
    there, tolerance = (put(weight, device, dtype), put(ids, device)), 2 * oracle.tolerance(dtype)
    out = ops.expert_linear(put(x, device, dtype), *there, weights=put(weights, device))
    np.testing.assert_allclose(get(out), oracle.expert_linear(x, weight, ids, weights), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("tokens", [1, 8, 9, 70, 300])
@pytest.mark.parametrize("kind", ["one for all", "the last", "twice the same"])
def test_uneven_experts(rng, device, dtype, kind, tokens):
    """All tokens have one expert, or one expert twice, whose two rows of x differ."""
    x, weight, _, weights = make_case(rng, (tokens, 6, 2, 64, 32), dtype, True)
    experts = np.full((tokens, 2), 5 if kind == "the last" else 2, np.int32)
    if kind == "one for all":
        experts[:, 1] = rng.integers(3, 5, tokens)
    weight = oracle.rounded(rng.standard_normal(weight.shape) / 8, dtype)
    weight[np.setdiff1d(np.arange(6), experts)] = np.nan
    there, tolerance = (put(weight, device, dtype), put(experts, device)), 2 * oracle.tolerance(dtype)
    out = ops.expert_linear(put(x, device, dtype), *there, weights=put(weights, device))
    np.testing.assert_allclose(get(out), oracle.expert_linear(x, weight, experts, weights), atol=tolerance, rtol=tolerance)
    out = ops.expert_linear(put(x[:, 0], device, dtype), *there)
    np.testing.assert_allclose(get(out), oracle.expert_linear(x[:, 0], weight, experts), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("tokens", [1, 6, 20])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_strides_with_poison_between(rng, device, dtype, tokens):
    """Rows of x, of each weight and of out apart from each other."""
    x, weight, experts, weights = make_case(rng, (tokens, 4, 3, 40, 16), dtype, True)
    wide_x, wide_weight = np.full((tokens, 4, 48), np.nan), np.full((4, 17, 56), np.nan)
    wide_x[:, 1:, 8:], wide_weight[:, :16, 8:48] = x, weight
    wide_x, wide_weight = (put_sliceable(a, device, dtype) for a in (wide_x, wide_weight))
    weight_there, experts_there = wide_weight[:, :16, 8:48], put(experts, device)
    tolerance = 2 * oracle.tolerance(dtype)
    out = put_sliceable(np.full((tokens, 24), -5.0), device, dtype)
    ops.expert_linear(wide_x[:, 1:, 8:], weight_there, experts_there, weights=put(weights, device), out=out[:, 3:19])
    expected = oracle.expert_linear(x, weight, experts, weights)
    np.testing.assert_allclose(get(out)[:, 3:19], expected, atol=tolerance, rtol=tolerance)
    assert (get(out)[:, [0, 1, 2, *range(19, 24)]] == -5).all()
    out = put_sliceable(np.full((tokens, 5, 24), -5.0), device, dtype)
    ops.expert_linear(wide_x[:, 1, 8:], weight_there, experts_there, out=out[:, 1:4, 4:20])
    expected = oracle.expert_linear(x[:, 0], weight, experts)
    np.testing.assert_allclose(get(out)[:, 1:4, 4:20], expected, atol=tolerance, rtol=tolerance)
    assert (get(out)[:, [0, 4]] == -5).all() and (get(out)[:, :, [0, 1, 2, 3, 20, 21, 22, 23]] == -5).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", [-1, 6, 2**31 - 1])
@pytest.mark.parametrize("tokens", [2, 12])
def test_experts_out_of_range(rng, device, dtype, bad, tokens):
    x, weight, experts, weights = make_case(rng, (tokens, 6, 3, 64, 32), dtype, True)
    experts[1, 1] = bad
    arguments = put(x, device, dtype), put(weight, device, dtype), put(experts, device)
    out = put(np.full((tokens, 32), -5.0), device, dtype)
    if device == "cpu":
        with pytest.raises(ValueError, match=rf"experts\[4\] is {bad} but must be 0 to 5"):
            ops.expert_linear(*arguments, weights=put(weights, device), out=out)
        assert (get(out) == -5).all()
        return
    message = f"experts: token 1 has expert {bad} but it must be at least 0 and below 6"
    ops.expert_linear(*arguments, weights=put(weights, device), out=out)
    with pytest.raises(ValueError, match=message):
        ops.check_errors()
    weights[1, 1], experts[1, 1] = 0, experts[1, 0]
    tolerance = 2 * oracle.tolerance(dtype)
    np.testing.assert_allclose(get(out), oracle.expert_linear(x, weight, experts, weights), atol=tolerance, rtol=tolerance)
    out = ops.expert_linear(put(x[:, 0], device, dtype), *arguments[1:])
    with pytest.raises(ValueError, match=message):
        ops.check_errors()
    expected = oracle.expert_linear(x[:, 0], weight, experts)
    expected[1, 1] = 0
    np.testing.assert_allclose(get(out), expected, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("most, fewer", [(8, (2, 3)), (40, (9, 17))])
def test_a_token_does_not_depend_on_its_batch(rng, device, dtype, most, fewer):
    x, weight, experts, weights = make_case(rng, (most, 32, 4, 192, 64), dtype, True)
    weight = put(np.nan_to_num(weight), device, dtype)

    def bits(first, last):
        there = put(experts[first:last], device)
        summed = ops.expert_linear(put(x[first:last], device, dtype), weight, there, weights=put(weights[first:last], device))
        return get(summed), get(ops.expert_linear(put(x[first:last, 0], device, dtype), weight, there, gated=True))

    together = bits(0, most)
    for count in fewer:
        for got, expected in zip(bits(most - count, most), together, strict=True):
            np.testing.assert_array_equal(got, expected[most - count :])


def test_sums_are_rounded_once(device):
    """Whole numbers, whose sum float32 holds exactly; bfloat16 has even ones only from 256 on."""
    weight, x = np.ones((3, 8, 8)), np.zeros((2, 3, 8))
    x[:, :, 0] = [[255, 1, 1], [1, 255, 1]]
    experts, weights = np.array([[0, 1, 2], [2, 1, 0]], np.int32), np.ones((2, 3), np.float32)
    out = put(np.full((2, 8), 1.0), device, "bfloat16")
    arguments = put(x, device, "bfloat16"), put(weight, device, "bfloat16"), put(experts, device)
    ops.expert_linear(*arguments, weights=put(weights, device), add_to_out=True, out=out)
    np.testing.assert_array_equal(get(out), 258)


def test_nan_stays_in_its_token(rng, device):
    x, weight, experts, weights = make_case(rng, (7, 4, 2, 64, 32), "bfloat16", True)
    x[2, 1, 5], weights[4, 0] = np.nan, np.nan
    arguments = put(x, device, "bfloat16"), put(weight, device, "bfloat16"), put(experts, device)
    out = get(ops.expert_linear(*arguments, weights=put(weights, device)))
    assert np.isnan(out[[2, 4]]).all() and np.isfinite(out[[0, 1, 3, 5, 6]]).all()


IDS = np.zeros((2, 3), np.int32)


@pytest.mark.parametrize(("call", "error", "message"), [
    (lambda: ops.expert_linear(floats(2, 4), floats(5, 6, 7), IDS), ValueError, "weight: dim 2 is 7 but x has K=4"),
    (lambda: ops.expert_linear(floats(2, 4), floats(6, 4), IDS), ValueError, "weight: has 2 dimensions but must have 3"),
    (lambda: ops.expert_linear(floats(1, 4), floats(5, 6, 4), IDS), ValueError, "experts: dim 0 is 2 but x has T=1"),
    (lambda: ops.expert_linear(floats(2, 4), floats(5, 6, 4), IDS.astype(np.int64)), TypeError, "experts: dtype is int64 but must be int32"),
    (lambda: ops.expert_linear(floats(2, 4), floats(5, 6, 4), IDS, weights=floats(2, 3)), ValueError, "x: has 2 dimensions but must have 3"),
    (lambda: ops.expert_linear(floats(2, 3, 4), floats(5, 6, 4), IDS, weights=floats(2, 4)), ValueError, "weights: dim 1 is 4 but x has C=3"),
    (lambda: ops.expert_linear(floats(2, 3, 4), floats(5, 6, 4), IDS, weights=floats(2, 3), gated=True), ValueError, "gated: not with weights"),
    (lambda: ops.expert_linear(floats(2, 4), floats(5, 7, 4), IDS, gated=True), ValueError, "weight: dim 1 is 7 but must be even"),
    (lambda: ops.expert_linear(floats(2, 4), floats(5, 6, 4), IDS, add_to_out=True), ValueError, "add_to_out: needs weights"),
    (lambda: ops.expert_linear(floats(2, 3, 4), floats(5, 6, 4), IDS, weights=floats(2, 3), add_to_out=True),
     ValueError, "add_to_out: needs out"),
    (lambda: ops.expert_linear(floats(2, 4), floats(0, 6, 4), IDS), ValueError, "weight: dim 0 is 0 but must be 1 to 1024"),
    (lambda: ops.expert_linear(floats(2, 4), floats(5, 6, 4), np.zeros((2, 33), np.int32)), ValueError, "experts: dim 1 is 33 but must be 1 to 32"),
    (lambda: ops.expert_linear(floats(2, 4), floats(5, 6, 4), IDS, out=floats(2, 3, 5)), ValueError, "out: dim 2 is 5 but weight has N=6"),
    (lambda: ops.expert_linear(floats(2, 4), floats(5, 6, 4), IDS, gated=True, out=floats(2, 3, 6)),
     ValueError, "out: dim 2 is 6 but half of weight has O=3"),
    (lambda: ops.route_experts(floats(2, 5), out_experts=np.zeros((2, 6), np.int32), out_weights=floats(2, 6)),
     ValueError, "out_experts: dim 1 is 6 but logits has 5 experts"),
    (lambda: ops.route_experts(floats(2, 1025), out_experts=IDS, out_weights=floats(2, 3)), ValueError, "logits: dim 1 is 1025 but must be 1 to 1024"),
    (lambda: ops.route_experts(floats(2, 5), out_experts=IDS.copy(), out_weights=floats(2, 2)),
     ValueError, "out_weights: dim 1 is 2 but out_experts has C=3"),
])  # fmt: skip
def test_refusals(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_many_tokens_take_little_memory(rng):
    """Their rows are ordered some at a time."""
    tokens = 5000
    x = rng.standard_normal((tokens, 64)).astype(np.float32)
    weight, experts = rng.standard_normal((3, 1024, 64)).astype(np.float32), rng.integers(0, 3, (tokens, 6)).astype(np.int32)
    out = ops.expert_linear(x, weight, experts)
    for t in (0, 2345, tokens - 1):
        np.testing.assert_allclose(out[t], oracle.expert_linear(x[t : t + 1], weight, experts[t : t + 1])[0], atol=1e-4)
    assert pagedkv.from_dlpack(out).shape == (tokens, 6, 1024)


# --- moe_mlp


def layer_of(rng, tokens, hidden, size, num_experts, chosen, dtype):
    """Its arguments by name, but what is in between, with logits that are small integers: no doubt which are the greatest."""
    x, router = (rng.integers(-1, 2, shape).astype(np.float32) for shape in ((tokens, hidden), (num_experts, hidden)))
    gate_up, down = (oracle.rounded(rng.standard_normal(shape) / shape[2] ** 0.5, dtype)
                     for shape in ((num_experts, 2 * size, hidden), (num_experts, hidden, size)))  # fmt: skip
    return {"x": x, "router": router, "gate_up": gate_up, "down": down}


def between(tokens, size, num_experts, chosen, device, dtype):
    shapes = {"logits": ((tokens, num_experts), "float32"), "experts": ((tokens, chosen), "int32"),
              "weights": ((tokens, chosen), "float32"), "activation": ((tokens, chosen, size), dtype)}  # fmt: skip
    return {name: pagedkv.empty(*of, device) for name, of in shapes.items()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("shape", [(1, 16, 8, 4, 2), (7, 40, 24, 5, 3), (3, 33, 5, 7, 7), (300, 72, 16, 6, 4)], ids=str)
def test_a_layer_of_experts(rng, device, dtype, normalize, shape):
    tokens, hidden, size, num_experts, chosen = shape
    its, before = layer_of(rng, *shape, dtype), oracle.rounded(rng.standard_normal((tokens, hidden)), dtype)
    given = {name: put(each, device, dtype) for name, each in its.items()}
    memory, out = between(tokens, size, num_experts, chosen, device, dtype), put(before, device, dtype)
    assert ops.moe_mlp(**given, normalize=normalize, add_to_out=True, **memory, out=out) is out
    expected, experts, weights = oracle.moe_mlp(*its.values(), chosen, dtype, normalize)
    np.testing.assert_array_equal(get(memory["experts"]), experts)
    np.testing.assert_allclose(get(memory["weights"]), weights, rtol=1e-5)
    tolerance = oracle.tolerance(dtype) * 8
    np.testing.assert_allclose(get(out), expected + before, atol=tolerance * (1 + np.abs(expected).max()), rtol=tolerance)
    got = ops.moe_mlp(**given, normalize=normalize, batch_invariant=True, **memory)
    np.testing.assert_allclose(get(got), expected, atol=tolerance * (1 + np.abs(expected).max()), rtol=tolerance)


def bad_layer(**changed):
    shapes = {"x": (2, 6), "router": (5, 6), "gate_up": (5, 8, 6), "down": (5, 6, 4), "logits": (2, 5), "weights": (2, 3), "activation": (2, 3, 4)}
    given = {name: floats(*shape) for name, shape in shapes.items()} | {"experts": np.zeros((2, 3), np.int32)}
    return lambda: ops.moe_mlp(**given | changed)


@pytest.mark.parametrize("call, message", [
    (bad_layer(router=floats(5, 7)), "router: dim 1 is 7 but x has K=6"),
    (bad_layer(gate_up=floats(5, 7, 6)), "gate_up: dim 1 is 7 but must be even: gate above up"),
    (bad_layer(gate_up=floats(4, 8, 6)), "gate_up: dim 0 is 4 but router has E=5"),
    (bad_layer(down=floats(5, 6, 3)), "down: dim 2 is 3 but half of gate_up has W=4"),
    (bad_layer(activation=floats(2, 3, 5)), "activation: dim 2 is 5 but half of gate_up has W=4"),
    (bad_layer(experts=np.zeros((2, 6), np.int32), weights=floats(2, 6), activation=floats(2, 6, 4)), "experts: dim 1 is 6 but router has 5 experts"),
    (bad_layer(logits=np.zeros((2, 5), np.float16)), "logits: dtype is float16"),
    (bad_layer(add_to_out=True), "add_to_out: needs out"),
])  # fmt: skip
def test_a_bad_layer(call, message):
    with pytest.raises((ValueError, TypeError), match=message):
        call()
