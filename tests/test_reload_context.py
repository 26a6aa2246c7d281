"""reload_context changes nothing that one could see."""

from __future__ import annotations

import numpy as np
import pytest
from busy_streams import on_gpu

import pagedkv
from pagedkv import Graph, Stream, ops


@pytest.mark.alone
@pytest.mark.gpu
def test_reload_context_changes_nothing(cuda, rng):
    x, out = on_gpu(rng.standard_normal((3, 8)).astype(np.float32)), pagedkv.empty((3, 4), device="cuda")
    expected = ops.silu_and_mul(x).tolist()
    stream, graph = Stream(), Graph()
    with graph.capture(stream):
        ops.silu_and_mul(x, out=out)
    lost = []
    for _ in range(3):
        before = ops.memory_info()[0]
        ops.reload_context("cuda:0")
        lost.append(before - ops.memory_info()[0])
    assert min(lost) <= 64 << 20  # what other processes take comes and goes
    graph.replay(stream)
    stream.synchronize()
    assert out.tolist() == expected == ops.silu_and_mul(x).tolist()
