"""Graphs on streams that are kept busy: what a graph holds, and what runs before and after a replay. Programs of random
copies, products, hand-overs and replays.

Whoever reads too early reads NaN.
"""

from __future__ import annotations

import gc

import numpy as np
import pytest
from busy_streams import BUSY, is_close, keep_busy, own, poisoned, side, silu_and_mul, x  # noqa: F401

import pagedkv
from pagedkv import Event, Graph, Stream, ops

pytestmark = pytest.mark.gpu


def test_a_graph_of_torchs_tensors(torch, x):  # noqa: F811
    value, out = torch.from_numpy(x).cuda(), torch.full((64, 256), float("nan"), device="cuda")
    ops.silu_and_mul(value, out=out.clone())
    torch.cuda.synchronize()
    graph = Graph()
    with graph.capture(Stream()):
        ops.silu_and_mul(value, out=out)
    assert graph.num_nodes == 1
    torch.cuda.synchronize()
    assert torch.isnan(out).all()
    side = torch.cuda.Stream()  # noqa: F811
    with torch.cuda.stream(side):  # replayed where torch works
        value.fill_(float("nan"))
        torch.cuda._sleep(BUSY)
        value.copy_(torch.from_numpy(x))
        graph.replay()
        result = out + 0
    side.synchronize()
    assert is_close(result, silu_and_mul(x))


def test_what_a_graph_cannot_hold_raises(torch, side, own, x, poisoned):  # noqa: F811
    graph, stream = Graph(), Stream()
    array = np.ones((2, 8), np.float32)
    with graph.capture(stream):
        ops.silu_and_mul(own, out=poisoned)
        with pytest.raises(
            RuntimeError, match="stream: a Graph is being captured, and work on this stream would be no"
        ):
            ops.silu_and_mul(own, out=poisoned, stream=side)
        with pytest.raises(RuntimeError, match="whose tensors are on the cpu would be no part of it"):
            ops.silu_and_mul(array)
        with pytest.raises(RuntimeError, match="this thread is capturing another Graph"):
            Graph().capture(Stream()).__enter__()
        ops.silu_and_mul(own, out=poisoned, stream=stream)
    assert graph.num_nodes == 2
    graph.replay()
    assert is_close(poisoned.tolist(), silu_and_mul(x))


def test_a_stream_that_has_joined_the_capture(torch, own, x, poisoned):  # noqa: F811
    graph, stream, other = Graph(), Stream(), Stream()
    event, back = Event(), Event()
    again = pagedkv.asarray(np.full((64, 256), np.nan, np.float32), device="cuda")
    ops.synchronize("cuda")
    with graph.capture(stream):
        event.record(stream)
        other.wait(event)
        ops.silu_and_mul(own, out=poisoned, stream=other)
        ops.silu_and_mul(own, out=again)
        back.record(other)
        stream.wait(back)
    assert graph.num_nodes == 2
    graph.replay()
    assert is_close(poisoned.tolist(), silu_and_mul(x)) and is_close(again.tolist(), silu_and_mul(x))


@pytest.mark.parametrize("framework", ["ours", "torch"])
def test_a_graph_holds_what_its_calls_made(torch, own, x, poisoned, framework):  # noqa: F811
    given = own if framework == "ours" else torch.from_numpy(x).cuda()
    ones = pagedkv.asarray(np.ones(256, np.float32), device="cuda")
    ops.scale_columns(ops.silu_and_mul(own), ones, out=poisoned)
    poisoned.copy_(np.full((64, 256), np.nan, np.float32))
    ops.synchronize("cuda")
    graph = Graph()
    with graph.capture(Stream()):
        middle = ops.silu_and_mul(given)
        ops.scale_columns(middle, ones, out=poisoned)
    del middle, ones
    gc.collect()
    churn = [torch.full((64, 256), 7.0, device="cuda") for _ in range(200)]
    ours = [pagedkv.asarray(np.full((64, 256), 7.0, np.float32), device="cuda") for _ in range(50)]
    torch.cuda.synchronize()
    for _ in range(3):
        graph.replay()
    assert is_close(poisoned.tolist(), silu_and_mul(x))
    assert all(bool((each == 7).all()) for each in churn) and all(np.all(np.array(t.tolist()) == 7) for t in ours)


def test_a_replay_is_a_write(torch, side, own, x, poisoned):  # noqa: F811
    """Whoever takes the result after a replay on a busy stream gets it, and the replay comes after what writes its
    input."""
    source = pagedkv.asarray(np.full(x.shape, np.nan, np.float32), device="cuda")
    graph = Graph()
    with graph.capture(Stream()):
        ops.silu_and_mul(source, out=poisoned)
    keep_busy(torch, side)
    source.copy_(own, stream=side)
    graph.replay()  # on the stream that it was captured on
    assert is_close(torch.from_dlpack(poisoned) + 0, silu_and_mul(x))
    poisoned.copy_(np.full((64, 256), np.nan, np.float32))
    keep_busy(torch, side)
    graph.replay(side)
    assert is_close(poisoned.tolist(), silu_and_mul(x))


def test_a_graph_of_torch(torch, own, x, poisoned):  # noqa: F811
    """Our Tensors inside torch.cuda.graph: what a call makes lives as long as the graph, and a call that would not be
    captured raises."""
    ones = pagedkv.asarray(np.ones(256, np.float32), device="cuda")
    nan = pagedkv.asarray(np.full((64, 256), np.nan, np.float32), device="cuda")
    ops.scale_columns(ops.silu_and_mul(own), ones, out=poisoned)
    pagedkv.asarray(torch.ones(1, device="cuda"))  # torch is known
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        current = torch.cuda.current_stream()
        middle = ops.silu_and_mul(own, stream=current)
        ops.scale_columns(middle, ones, out=poisoned, stream=current)
        with pytest.raises(RuntimeError, match="PyTorch is capturing a graph"):
            ops.silu_and_mul(own, out=poisoned)
    del middle
    gc.collect()
    ours = [pagedkv.asarray(np.full((64, 256), 7.0, np.float32), device="cuda") for _ in range(50)]
    for _ in range(3):
        poisoned.copy_(nan)
        torch.cuda.synchronize()
        torch.cuda._sleep(BUSY // 3)
        graph.replay()
        assert is_close(poisoned.tolist(), silu_and_mul(x))
    assert all(np.all(np.array(t.tolist()) == 7) for t in ours)
    del graph
    torch.cuda.synchronize()


# --- random programs


@pytest.mark.parametrize("round", range(6))
def test_random_programs(torch, rng, round):
    """Copies and products between Tensors on random streams, with random delays and hand-overs, give what the same
    program gives on the host."""
    cupy = pytest.importorskip("cupy")
    shape, size = (8, 16), 6
    values = [rng.standard_normal(shape).astype(np.float32) for _ in range(size)]
    tensors = [pagedkv.asarray(value, device="cuda") for value in values]
    factors = rng.standard_normal(16).astype(np.float32)
    weights = pagedkv.asarray(factors, device="cuda")
    torchs = [torch.cuda.Stream() for _ in range(3)]
    ours = [Stream() for _ in range(2)]
    graphs = []
    for i in range(3):
        a, b = rng.choice(size, 2, replace=False)
        graph = Graph()
        with graph.capture(ours[i % 2]):
            ops.scale_columns(tensors[a], weights, out=tensors[b])
        graphs.append((graph, a, b))
    for _ in range(80):
        kind = rng.integers(8)
        stream = [*torchs, *ours][rng.integers(5)]
        if rng.integers(4) == 0:
            with torch.cuda.stream(torch.cuda.ExternalStream(stream.cuda_stream)):
                torch.cuda._sleep(int(rng.integers(4_000_000)))
        a, b = rng.choice(size, 2, replace=False)
        if kind <= 2:
            given = stream if rng.integers(2) else stream.cuda_stream
            ops.scale_columns(tensors[a], weights, out=tensors[b], stream=given)
            values[b] = values[a] * factors
        elif kind == 3:
            fresh = cupy.cuda.Stream(non_blocking=True)
            tensors[b].copy_(tensors[a], stream=fresh.ptr)
            values[b] = values[a].copy()
        elif kind == 4:
            with ours[rng.integers(2)]:
                tensors[b].copy_(values[a] if rng.integers(2) else tensors[a])
            values[b] = values[a].copy()
        elif kind == 5:
            graph, a, b = graphs[rng.integers(3)]
            graph.replay([*torchs, *ours, None][rng.integers(6)])
            values[b] = values[a] * factors
        elif kind == 6:
            with torch.cuda.stream(torchs[rng.integers(3)]) as current:
                taken = torch.from_dlpack(tensors[a]) + 0
                torch.cuda.current_stream().synchronize()
                assert np.allclose(taken.cpu().numpy(), values[a], rtol=1e-4, atol=1e-6), current
        else:
            assert np.allclose(tensors[a].tolist(), values[a], rtol=1e-4, atol=1e-6)
    for tensor, value in zip(tensors, values, strict=True):
        assert np.allclose(tensor.tolist(), value, rtol=1e-4, atol=1e-6)
