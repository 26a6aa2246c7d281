"""Graph: a capture and its replays on a GPU, errors inside a capture, and what a graph keeps alive."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from busy_streams import on_gpu

import pagedkv
from pagedkv import Graph, Stream, ops


def test_a_graph_that_is_not_captured():
    graph = Graph()
    assert repr(graph) == "Graph(not captured)" and graph.num_nodes == 0
    with pytest.raises(RuntimeError, match="not captured yet"):
        graph.replay()
    with pytest.raises(RuntimeError, match="entered once, by"):
        graph.__enter__()
    with pytest.raises(RuntimeError, match="not being captured"):
        graph.__exit__(None, None, None)
    with pytest.raises(TypeError, match=r"stream: must be a pagedkv\.Stream, not 7"):
        graph.capture(7)


@pytest.mark.gpu
def test_a_graph_repeats_its_work_on_new_values(cuda, rng):
    stream = Stream()
    x, hidden, out = (pagedkv.empty((5, n), device="cuda") for n in (64, 32, 32))
    weight = rng.standard_normal(32).astype(np.float32)
    weight_there = on_gpu(weight)
    out.copy_(np.zeros((5, 32), np.float32))
    ops.synchronize("cuda")
    graph = Graph()
    with graph.capture(stream) as entered:
        assert entered is graph
        ops.silu_and_mul(x, out=hidden)
        ops.rms_norm(hidden, weight_there, out=out)
    assert graph.num_nodes == 2 and repr(graph) == "Graph(device='cuda:0', num_nodes=2)"
    stream.synchronize()
    assert not np.array(out.tolist()).any(), "a capture runs nothing"
    for replay_on in (None, stream, Stream()):
        values = rng.standard_normal((5, 64)).astype(np.float32)
        x.copy_(values, stream=replay_on or stream)
        graph.replay(replay_on)
        (replay_on or stream).synchronize()
        gate, up = values[:, :32].astype(np.float64), values[:, 32:]
        expected = gate / (1 + np.exp(-gate)) * up
        expected /= np.sqrt((expected**2).mean(axis=1, keepdims=True) + 1e-6)
        assert np.abs(np.array(out.tolist()) - expected * weight).max() < 1e-4
    with pytest.raises(RuntimeError, match="captured already"):
        graph.capture(stream)


@pytest.mark.gpu
def test_an_error_inside_a_capture_comes_out_as_it_is(cuda):
    stream = Stream()
    x = on_gpu(np.ones((4, 64), np.float32))
    out = on_gpu(np.ones((4, 32), np.float32))
    graph = Graph()
    with pytest.raises(ValueError, match="out: dim 1 is 64"), graph.capture(stream):
        ops.silu_and_mul(x, out=x)
    with pytest.raises(pagedkv.CudaError, match="cudaDeviceSynchronize: cudaErrorStreamCapture"), graph.capture(stream):
        ops.silu_and_mul(x, out=out)
        ops.synchronize("cuda")
    with pytest.raises(pagedkv.CudaError, match="cudaStreamEndCapture"), graph.capture(stream):  # swallowed inside
        try:
            stream.synchronize()
        except pagedkv.CudaError:
            pass
    assert graph.num_nodes == 0
    with graph.capture(stream):
        with pytest.raises(RuntimeError, match="captured already"):
            graph.capture(stream)
        ops.silu_and_mul(x, out=out)
    graph.replay()
    stream.synchronize()
    assert out.tolist()[3][31] == pytest.approx(0.7310586)
    with pytest.raises(RuntimeError, match="has not entered"):
        stream.__exit__(None, None, None)


@pytest.mark.alone
@pytest.mark.gpu
def test_graphs_give_their_memory_back(cuda):
    stream = Stream()
    x = on_gpu(np.ones((4, 64), np.float32))
    out = on_gpu(np.ones((4, 32), np.float32))

    def capture() -> Graph:
        graph = Graph()
        with graph.capture(stream):
            for _ in range(500):
                ops.silu_and_mul(x, out=out)
        graph.replay()
        return graph

    for _ in range(5):
        capture()
    stream.synchronize()
    before = ops.memory_info()[0]
    for _ in range(100):
        capture()
    stream.synchronize()
    assert before - ops.memory_info()[0] <= 32 << 20  # the driver keeps some


@pytest.mark.gpu
def test_a_graph_outlives_its_stream(cuda):
    graph, stream = Graph(), Stream()
    x = on_gpu(np.ones((16, 64), np.float32))
    out = on_gpu(np.zeros((16, 16), np.float32))
    with graph.capture(stream):
        ops.linear(x, x, out=out)  # has its workspace from the stream
    del stream
    gc.collect()
    graph.replay()
    ops.synchronize("cuda")
    assert out.tolist()[7][7] == 64


@pytest.mark.gpu
def test_what_a_capture_lets_go_of(cuda):
    x = on_gpu(np.ones((16, 64), np.float32))
    out = on_gpu(np.zeros((16, 16), np.float32))
    stream, graph, other = Stream(), Graph(), Graph()
    with other.capture(stream):
        ops.linear(x, x, out=out)
    with pytest.raises(ZeroDivisionError), Graph().capture(stream):
        raise ZeroDivisionError
    assert gc.isenabled()
    with graph.capture(stream):
        assert not gc.isenabled()
        del other  # destroying a graph, memory or a stream does not end the capture
        pagedkv.empty(1 << 20, "uint8", "cuda")
        Stream()
        ops.linear(x, x, out=out)
    assert gc.isenabled() and graph.num_nodes > 0
    graph.replay()
    ops.synchronize("cuda")
    assert out.tolist()[7][7] == 64
