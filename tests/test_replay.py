"""Traces through BlockManager: hit tokens against what the trace's ids say; small pools against an LRU model."""

import os
import sys
from collections import OrderedDict
from pathlib import Path

import pytest

from pagedkv import BlockManager, OutOfBlocks

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import traces  # noqa: E402

PUBLIC = Path(os.environ.get("PAGEDKV_TRACE", ROOT.parent / "shared" / "traces" / "mooncake_synthetic.jsonl"))


def replay(trace, num_blocks, block_size):
    """(hit tokens, evictions, refused requests) of requests that are computed and freed one after another."""
    manager = BlockManager(num_blocks, block_size)
    hits = refused = 0
    for number, (length, ids) in enumerate(trace):
        try:
            hits += manager.allocate(number, traces.expand(length, ids))
        except OutOfBlocks:
            refused += 1
            continue
        manager.commit(number, length)
        manager.free(number)
    manager.check()
    assert manager.stats()["used"] == 0 and manager.stats()["hit_tokens"] == hits
    return hits, manager.stats()["evictions"], refused


def lru_replay(trace, num_blocks, block_size):
    """The same by a model that knows no tokens: a page is (the id that holds its last token, its end in that id)."""
    cached = OrderedDict()  # least recently used first
    hit_pages = evictions = refused = 0
    for length, ids in trace:
        ends = range(block_size, length + 1, block_size)
        pages = [(ids[(end - 1) // traces.ID_TOKENS], (end - 1) % traces.ID_TOKENS) for end in ends]
        hits = 0
        while hits < len(pages) and pages[hits] in cached:
            hits += 1
        new = -(-length // block_size) - hits
        if new > num_blocks - hits:
            refused += 1
            continue
        for page in pages[:hits]:
            del cached[page]
        while new > num_blocks - hits - len(cached):
            cached.popitem(last=False)
            evictions += 1
        assert not any(page in cached for page in pages)  # a chain loses its end before its start
        cached.update((page, None) for page in reversed(pages))
        hit_pages += hits
    return hit_pages * block_size, evictions, refused


def check(trace, block_sizes, pool_tokens):
    for block_size in block_sizes:
        everything = sum(-(-length // block_size) for length, _ in trace)
        hits, evictions, refused = replay(trace, min(everything, 2**31 // block_size - 1), block_size)
        assert (hits, evictions, refused) == (traces.reusable_tokens(trace, block_size), 0, 0)
        for tokens in pool_tokens:
            num_blocks = max(tokens // block_size, 1)
            bounded = replay(trace, num_blocks, block_size)
            assert bounded == lru_replay(trace, num_blocks, block_size)
            assert bounded[0] <= hits and bounded[1] > 0


def test_generated_trace(rng):
    trace = traces.generate(rng, 150)
    assert traces.reusable_tokens(trace, 16) > 0
    check(trace, [16, 24, 100, 512], [4_000, 20_000])


@pytest.mark.skipif(not PUBLIC.exists(), reason=f"no trace at {PUBLIC} (PAGEDKV_TRACE names it)")
def test_public_trace():
    trace = traces.load(PUBLIC)
    assert len(trace) == 3993
    check(trace, [512], [500_000, 4_000_000])
    check(trace, [16], [2_000_000])
