"""Scratch memory belongs to one call at a time: of several threads on one stream, and of graphs beside a stream's calls."""

from __future__ import annotations

import re
import subprocess
import sys
import threading

import pytest
from cuda_tensors import make_pool

import pagedkv
from pagedkv import Graph, Stream, ops

pytestmark = pytest.mark.gpu

# The first use of each kernel lets go of the GIL, between two launches of a call: then others call on the same stream.
FIRST_USES = """
import sys, threading
import numpy as np, torch
import pagedkv
from test_torch_operators import assert_same_bits, draw

seed, count = int(sys.argv[1]), 24
drawn = [[draw("qkv_attention_fwd", np.random.default_rng([seed, i]), "cuda:0") for _ in range(2)] for i in range(count)]
stream, barrier, results = pagedkv.Stream(), threading.Barrier(count), [None] * count
torch.cuda.synchronize()

def work(i):
    barrier.wait()
    results[i] = pagedkv._C.qkv_attention_fwd(**drawn[i][0], stream=stream)

threads = [threading.Thread(target=work, args=(i,)) for i in range(count)]
for thread in threads: thread.start()
for thread in threads: thread.join()
torch.cuda.synchronize()
for i, (shared, own) in enumerate(drawn):
    expected = pagedkv._C.qkv_attention_fwd(**own)
    torch.cuda.synchronize()
    assert_same_bits([results[i], shared], [expected, own])
"""


def test_first_uses_by_threads_that_share_a_stream(torch, environment, seed):
    for i in range(3):
        command = [sys.executable, "-c", FIRST_USES, str(seed + i)]
        run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        assert run.returncode == 0, run.stderr[-4000:]


def cut_keys(torch, rng):
    """Attention of one sequence in so many parts that it takes a good part of the card: (arguments, options)."""
    arguments = make_pool(torch, 1, 20_000, 8, 1, 128, 16)
    lens = torch.tensor([int(rng.integers(15_000, 20_001))], device="cuda", dtype=torch.int32)
    return (*arguments, lens), {"num_splits": 48}


@pytest.mark.parametrize("who_captures", ["pagedkv", "torch"])
def test_a_replay_beside_calls_on_the_stream_of_its_capture(torch, rng, who_captures):
    of_graph, of_calls, other = cut_keys(torch, rng), cut_keys(torch, rng), torch.cuda.Stream()
    outs = [torch.empty_like(arguments[0]) for arguments, _ in (of_graph, of_calls)]
    expected = [pagedkv.paged_attention_fwd(*arguments, **options) for arguments, options in (of_graph, of_calls)]
    side = torch.cuda.Stream()
    torch.cuda.synchronize()

    def attend(case, out, **on):
        pagedkv.paged_attention_fwd(*case[0], **case[1], out=out, **on)

    if who_captures == "torch":
        stream, graph = side, torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            attend(of_graph, outs[0])
        replay = graph.replay
    else:
        stream, graph = Stream(), Graph()
        with graph.capture(stream):
            attend(of_graph, outs[0])

        def replay():
            graph.replay(other)

    for _ in range(300):
        for out in outs:
            out.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(other):
            for _ in range(4):
                replay()
        for _ in range(4):
            attend(of_calls, outs[1], stream=stream)
        torch.cuda.synchronize()
        for out, right in zip(outs, expected, strict=True):
            assert torch.equal(out, right)


def test_what_kernels_report_while_the_host_asks(torch):
    """Every report is whole, and the first after a check is never lost."""
    tokens, slots = 500, 64
    key = torch.zeros(tokens, 1, 64, device="cuda")
    caches = torch.zeros(2, slots // 16, 16, 1, 64, device="cuda")
    bad = torch.full((200, tokens), -1, dtype=torch.int64)
    for i, row in enumerate(bad):
        row[7 * i % tokens] = slots + 3 * i
    bad = bad.cuda()
    torch.cuda.synchronize()
    stream = Stream()

    def ask() -> int:
        try:
            ops.check_errors()
        except ValueError as error:
            token, slot = map(int, re.search(r"token (\d+) .*?(\d+)", str(error)).groups())
            assert slot >= slots and token == 7 * ((slot - slots) // 3) % tokens, error
            return 1
        return 0

    for i in range(len(bad)):
        has_begun = threading.Event()

        def store(i=i, has_begun=has_begun):
            has_begun.set()
            pagedkv.store_kvcache(key, key, *caches, bad[i], stream=stream)

        thread = threading.Thread(target=store)
        thread.start()
        has_begun.wait()
        reported = sum(ask() for _ in range(5))
        thread.join()
        assert reported + ask() == 1
