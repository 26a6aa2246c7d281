"""expert_linear on a GPU: the shapes of models, graphs that replay another routing, weights that are fetched early."""

import numpy as np
import oracle
import pytest
from pools import get, put
from test_expert_weights import Weights
from test_experts import between

import pagedkv
from pagedkv import Graph, Stream, ops

GPU = "cuda:0"
HAS_GPU = ops.build_info()["cuda_problem"] is None
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HAS_GPU, reason=str(ops.build_info()["cuda_problem"]))]
HIDDEN, INTERMEDIATE, EXPERTS, CHOSEN = 2048, 768, 128, 8  # Qwen3 30B-A3B


def numbers(rng, shape, dtype="bfloat16"):
    return oracle.rounded(rng.standard_normal(shape, np.float32), dtype)


def draw_experts(rng, tokens, experts=EXPERTS, chosen=CHOSEN):
    return np.argsort(rng.random((tokens, experts)), 1)[:, :chosen].astype(np.int32)


@pytest.fixture(scope="module")
def layer():
    """Weights on the GPU, and the same numbers on the host in float32."""
    rng = np.random.default_rng(3)
    there, here = [], []
    for outputs, size in ((2 * INTERMEDIATE, HIDDEN), (HIDDEN, INTERMEDIATE)):
        some = oracle.rounded(rng.standard_normal((8, outputs, size), np.float32) / size**0.5, "bfloat16").astype(np.float32)
        here.append(np.stack([np.roll(some[e % 8], 17 * e, 0) for e in range(EXPERTS)]))
        there.append(put(here[-1], GPU, "bfloat16"))
    return *there, *here


def expected_of(x, experts, weights, up, down):
    """By expert, which is faster on the host than by pair."""
    act, out = np.zeros((*experts.shape, INTERMEDIATE)), np.zeros(x.shape)
    for expert in np.unique(experts):
        t, j = np.nonzero(experts == expert)
        product = oracle.rounded(x[t].astype(np.float32) @ up[expert].T, "bfloat16")
        act[t, j] = oracle.silu_and_mul(product, "bfloat16")
        np.add.at(out, t, weights[t, j, None] * (act[t, j].astype(np.float32) @ down[expert].T))
    return act, out


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 16, 31, 64, 65, 200, 256, 257, 520, 1100])
def test_a_layer_of_a_model(rng, layer, tokens):
    up, down, up_here, down_here = layer
    x, experts, before = numbers(rng, (tokens, HIDDEN)), draw_experts(rng, tokens), numbers(rng, (tokens, HIDDEN))
    weights = rng.random(experts.shape).astype(np.float32)
    act, expected = expected_of(x, experts, weights, up_here, down_here)
    ids, out = put(experts, GPU), put(before, GPU, "bfloat16")
    got = ops.expert_linear(put(x, GPU, "bfloat16"), up, ids, gated=True, weight_is_constant=True)
    np.testing.assert_allclose(get(got), act, atol=0.05, rtol=0.03)
    ops.expert_linear(got, down, ids, weights=put(weights, GPU), add_to_out=True, weight_is_constant=True,
                      experts_are_constant=True, out=out)  # fmt: skip
    np.testing.assert_allclose(get(out), expected + before, atol=0.06, rtol=0.03)
    same = put(before, GPU, "bfloat16")
    ops.expert_linear(got, down, ids, weights=put(weights, GPU), add_to_out=True, out=same)
    np.testing.assert_array_equal(get(same), get(out))


@pytest.mark.parametrize("tokens", [1, 4, 8, 24, 100])
def test_layers_in_a_graph_are_the_layers_step_by_step(rng, layer, tokens):
    """Routing is another one in each layer and replay; experts are read while the kernel before still runs."""
    up, down, _, _ = layer
    router = [put(numbers(rng, (EXPERTS, HIDDEN)) / HIDDEN**0.5 * 4, GPU, "bfloat16") for _ in range(4)]
    x, hidden = (pagedkv.empty((tokens, HIDDEN), "bfloat16", GPU) for _ in range(2))
    logits, act = pagedkv.empty((tokens, EXPERTS), "float32", GPU), pagedkv.empty((tokens, CHOSEN, INTERMEDIATE), "bfloat16", GPU)
    experts, weights = pagedkv.empty((tokens, CHOSEN), "int32", GPU), pagedkv.empty((tokens, CHOSEN), "float32", GPU)
    ones, stream, graph = put(np.ones(HIDDEN), GPU, "bfloat16"), Stream(GPU), Graph()

    def steps(after_each):
        for weight in router:
            ops.rms_norm(x, ones, out=hidden, stream=stream)
            after_each()
            ops.linear(hidden, weight, out=logits, weight_is_constant=True, stream=stream)
            after_each()
            ops.route_experts(logits, normalize=True, out_experts=experts, out_weights=weights, stream=stream)
            after_each()
            ops.expert_linear(hidden, up, experts, gated=True, weight_is_constant=True, out=act, stream=stream)
            after_each()
            ops.expert_linear(act, down, experts, weights=weights, add_to_out=True, weight_is_constant=True,
                              experts_are_constant=True, out=x, stream=stream)  # fmt: skip
            after_each()

    with graph.capture(stream):
        steps(lambda: None)
    for _ in range(10):
        first = put(numbers(rng, (tokens, HIDDEN)), GPU, "bfloat16")
        ops.synchronize(GPU)
        x.copy_(first, stream=stream)
        steps(stream.synchronize)
        expected = get(x)
        assert np.isfinite(expected).all() and len(np.unique(expected)) > 100
        for _ in range(3):
            x.copy_(first, stream=stream)
            graph.replay()
            stream.synchronize()
            np.testing.assert_array_equal(get(x), expected)


@pytest.mark.parametrize("tokens", [1, 2, 5, 8, 9, 40, 257, 300, 1100])
def test_a_layer_in_one_call(rng, layer, tokens):
    """One kernel for few, shared lists for many; in a graph, too, and beside another stream that has the same kernel."""
    up, down, up_here, down_here = layer
    x, before = numbers(rng, (tokens, HIDDEN)), numbers(rng, (tokens, HIDDEN))
    router = put(oracle.rounded(numbers(rng, (EXPERTS, HIDDEN)) / HIDDEN**0.5 * 4, "bfloat16"), GPU, "bfloat16")
    there, streams, graphs = put(x, GPU, "bfloat16"), [Stream(GPU), Stream(GPU)], [Graph(), Graph()]
    given = {"normalize": True, "add_to_out": True, "weight_is_constant": True}
    memory = [between(tokens, INTERMEDIATE, EXPERTS, CHOSEN, GPU, "bfloat16") for _ in streams]
    outs = [put(before, GPU, "bfloat16") for _ in streams]
    for graph, stream, its, out in zip(graphs, streams, memory, outs, strict=True):
        with graph.capture(stream):
            ops.moe_mlp(there, router, up, down, **given, **its, out=out, stream=stream)
    fresh, first = put(before, GPU, "bfloat16"), None
    for _ in range(20):
        for graph, stream, out in zip(graphs, streams, outs, strict=True):
            out.copy_(fresh, stream=stream)
            graph.replay()
        ops.synchronize(GPU)
        first = get(outs[0]) if first is None else first
        for out in outs:
            np.testing.assert_array_equal(get(out), first)
    ids, weights = get(memory[0]["experts"]).astype(np.int64), get(memory[0]["weights"])
    logits = x.astype(np.float32) @ get(router).astype(np.float32).T
    chosen = np.take_along_axis(logits, ids, 1)
    assert all(len(np.unique(row)) == CHOSEN for row in ids)
    assert (np.sort(logits, 1)[:, -CHOSEN] <= chosen.min(1) + 1e-4).all()
    np.testing.assert_allclose(weights, np.exp(chosen) / np.exp(chosen).sum(1, keepdims=True), rtol=1e-3)
    _, expected = expected_of(x, ids, weights, up_here, down_here)
    np.testing.assert_allclose(first, expected + before, atol=0.06, rtol=0.03)


@pytest.mark.parametrize("most, fewer", [(8, (2, 7)), (200, (40, 190)), (64, (1, 12, 33))])
def test_bits_of_a_token_do_not_depend_on_the_others(rng, layer, most, fewer):
    up, down, _, _ = layer
    x, experts = put(numbers(rng, (most, HIDDEN)), GPU, "bfloat16"), put(draw_experts(rng, most), GPU)
    weights = put(rng.random((most, CHOSEN)).astype(np.float32), GPU)

    def layer_of(first, last):
        rows = slice(first, last)
        act = ops.expert_linear(x[rows], up, experts[rows], gated=True)
        return get(ops.expert_linear(act, down, experts[rows], weights=weights[rows]))

    together = layer_of(0, most)
    np.testing.assert_array_equal(layer_of(0, most), together)
    for count in fewer:
        np.testing.assert_array_equal(layer_of(most - count, most), together[most - count :])


@pytest.mark.parametrize("tokens", [3, 50, 700])
def test_all_tokens_have_the_same_experts(rng, layer, tokens):
    up, down, up_here, down_here = layer
    x, weights = numbers(rng, (tokens, HIDDEN)), rng.random((tokens, CHOSEN)).astype(np.float32)
    experts = np.tile(np.array([127, 0, 5, 64, 63, 1, 126, 33], np.int32), (tokens, 1))
    act, expected = expected_of(x, experts, weights, up_here, down_here)
    got = ops.expert_linear(put(x, GPU, "bfloat16"), up, put(experts, GPU), gated=True)
    np.testing.assert_allclose(get(got), act, atol=0.05, rtol=0.03)
    out = ops.expert_linear(got, down, put(experts, GPU), weights=put(weights, GPU))
    np.testing.assert_allclose(get(out), expected, atol=0.06, rtol=0.03)


INSTANCES = [each for each in ops.kernel_instances() if each["kernel"].startswith("expert")]


@pytest.mark.parametrize("kind", INSTANCES, ids=lambda each: "-".join(str(each[name]) for name in ("kernel", "multiplies", "reads", "rows")))
def test_each_instance(rng, kind):
    """As many pairs as it takes of 4 experts, and a weight of an odd number of tiles, whose last step has half of its inputs."""
    dtype, reads = kind["multiplies"], kind["reads"]
    tokens = kind["rows"] if kind["kernel"] == "expert_few_kernel" else 2 * kind["rows"]
    if kind["kernel"] == "expert_many_kernel":
        tokens = 2500  # more than each CTA would list; those of rows in order are test_a_layer_in_one_call's
    ids = rng.integers(0, 4, (tokens, 1)).astype(np.int32)
    x, options = numbers(rng, (tokens, 352), dtype), {}
    if reads == dtype:
        values = oracle.rounded(numbers(rng, (4, 208, 352)) / 18, dtype)
        weight = put(values, GPU, dtype)
    else:
        made = Weights(rng, "int4 32" if reads == "uint8" else "float8 channels", 208, 352, 4, np.arange(4))
        options, values = made.given(GPU), made.values()
        weight = options.pop("weight")
    out = ops.expert_linear(put(x, GPU, dtype), weight, put(ids, GPU), **options)
    expected, tolerance = oracle.expert_linear(x, values, ids.astype(int)), 2 * oracle.tolerance(dtype)
    np.testing.assert_allclose(get(out), expected, atol=tolerance, rtol=tolerance)


def test_products_that_do_not_fit_the_scratch_memory(rng):
    """Of 256 million numbers: some tokens come after others."""
    tokens, chosen, outputs, size = 2100, 32, 4096, 64
    x, weight = numbers(rng, (tokens, chosen, size)), numbers(rng, (3, outputs, size)) / 8
    experts = rng.integers(0, 3, (tokens, chosen)).astype(np.int32)
    weights = rng.random((tokens, chosen)).astype(np.float32)
    out = ops.expert_linear(put(x, GPU, "bfloat16"), put(weight, GPU, "bfloat16"), put(experts, GPU), weights=put(weights, GPU))
    some = [0, 2047, 2048, 2049, 2050, 2099]
    expected = oracle.expert_linear(x[some], oracle.rounded(weight, "bfloat16"), experts[some], weights[some])
    np.testing.assert_allclose(get(out)[some], expected, atol=0.2, rtol=0.02)
