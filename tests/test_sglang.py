"""SGLang's attention backend, driven as its scheduler would, beside attention in float64 over each request's own keys.

The modules that it imports are stand-ins and, where it is installed, SGLang's own.
"""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
from fake_sglang import ForwardBatch, ForwardMode, Layer, imported, torch
from sglang_server import KINDS, Graph, Kind, Server, attention, serve

from pagedkv import ops


@pytest.fixture(params=["stand-ins"] + ["sglang"] * (importlib.util.find_spec("sglang") is not None))
def sglang(request, monkeypatch):
    return imported(monkeypatch, is_real=request.param == "sglang")


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_requests(sglang, seed, device, kind, page_size):
    serve(Server(sglang, seed, device, page_size, KINDS[kind]))


@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("kind", KINDS)
def test_decodes_in_a_graph(sglang, seed, device, kind, page_size):
    server = Server(sglang, seed, device, page_size, KINDS[kind])
    graph = Graph(server)
    requests = serve(server)
    for work in (requests, requests[:1], requests[1:3], requests, requests[3:], requests[:3]):
        graph.replay([(request, 1) for request in work])
    server.run(ForwardMode.EXTEND, [(requests[0], 9), (requests[2], 1)])  # after a graph, without one
    if device != "cpu":
        ops.check_errors()


def test_an_encoder(sglang, seed, device):
    """Its queries see the keys behind them, too, and a window reaches to both sides."""
    server = Server(sglang, seed, device, 16, KINDS["window"])
    for layer in server.layers:
        layer.attn_type = sglang.AttentionType.ENCODER_ONLY
    work = [(server.add(), 50), (server.add(), 1), (server.add(), 129)]
    batch = server.batch(ForwardMode.EXTEND, work)
    server.backend.init_forward_metadata(batch)
    for layer, (q, k, v, _) in zip(server.layers, server.inputs(180)):
        out, first = server.backend.forward(q, k, v, layer, batch), 0
        for _, count in work:
            rows = slice(first, first := first + count)
            heads = q[rows].double().view(count, layer.tp_q_head_num, -1)
            expected = attention(layer, heads, k[rows].double(), v[rows].double(), None, is_causal=False)
            torch.testing.assert_close(out[rows].double().view_as(expected), expected, atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("kind", ["float32", "window pool, bfloat16"])
def test_a_padded_prefill(sglang, seed, device, kind):
    """Between the pieces of a graph the layers are called with the real tokens of the batch that was announced."""
    server = Server(sglang, seed, device, 16, KINDS[kind])
    work = [(server.add(), 21), (server.add(), 7)]
    batch = server.batch(ForwardMode.EXTEND, work)
    real = batch.out_cache_loc
    batch.out_cache_loc = torch.cat([real, torch.zeros_like(real[:4])])
    server.backend.init_forward_metadata(batch)
    batch.out_cache_loc = real
    for layer, given in zip(server.layers, server.inputs(len(real))):
        q, k, v, sinks = given
        out = server.backend.forward(q, k, v, layer, batch, sinks=sinks)
        server.check(work, layer, given, out)


def test_a_batch_without_sequences(sglang, seed, device):
    """Of a data-parallel rank that has nothing to do."""
    server = Server(sglang, seed, device, 16, KINDS["float32"])
    empty = torch.zeros(0, dtype=torch.int64, device=device)
    batch = ForwardBatch(sglang.ForwardMode.IDLE, 0, empty, empty, empty, empty.cpu())
    server.backend.init_forward_metadata(batch)
    (q, k, v, _), layer = server.inputs(0)[0], server.layers[0]
    assert server.backend.forward(q, k, v, layer, batch).shape == (0, layer.tp_q_head_num * layer.v_head_dim)


def test_the_host_may_not_know_the_lengths(sglang, seed):
    server = Server(sglang, seed, "cpu", 16, KINDS["float32"])
    batch, work = server.batch, [(server.add(), 40), (server.add(), 3)]
    server.batch = lambda *given: replace(batch(*given), seq_lens_cpu=None)
    server.run(ForwardMode.EXTEND, work)


def test_deterministic_inference(monkeypatch, seed):
    """A sequence's result does not depend on the batch: the keys of each are added up in one part."""
    sglang = imported(monkeypatch, is_real=False, is_deterministic=True)
    server = Server(sglang, seed, "cpu", 16, KINDS["float32"])
    given = []
    monkeypatch.setattr(ops, "paged_attention_fwd", spied(ops.paged_attention_fwd, given))
    server.run(ForwardMode.EXTEND, [(server.add(), 40)])
    assert [each["num_splits"] for each in given] == [1, 1]


def test_the_layers_of_a_kind_share_a_plan(sglang, monkeypatch, seed):
    """One for each kind of layer and step, made by the first of them: in a graph, inside it."""
    layers = [Layer(i, sliding_window_size=-1 if i % 2 else 20) for i in range(6)]
    server = Server(sglang, seed, "cpu", 16, Kind(layers))
    planned, attended = [], []
    monkeypatch.setattr(ops, "plan_attention", spied(ops.plan_attention, planned))
    monkeypatch.setattr(ops, "paged_attention_fwd", spied(ops.paged_attention_fwd, attended))
    server.run(ForwardMode.EXTEND, work := [(server.add(), 40), (server.add(), 3)])
    server.put_back()
    assert len(planned) == 2 and len(attended) == 6 and not any(each["past_is_constant"] for each in attended)
    assert all(each["plan"] is attended[i % 2]["plan"] for i, each in enumerate(attended))
    planned.clear(), attended.clear()
    graph = Graph(server)
    for _ in range(2):
        graph.replay([(request, 1) for request, _ in work])
    assert len(planned) == 4 and len(attended) == 12 and all(each["past_is_constant"] for each in attended)
    planned.clear()
    for _ in range(3):  # warm-ups, and what is captured
        graph.layers()
    assert len(planned) == 6


def spied(function, calls: list[dict]):
    def call(*args, **options):
        calls.append(options)
        return function(*args, **options)

    return call
