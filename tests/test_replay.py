"""Traces through BlockManager: hit tokens against what the trace's ids say; small pools against an LRU model. And
through the engine, where requests arrive while others run."""

import os
import sys
from collections import OrderedDict
from dataclasses import replace
from pathlib import Path

import pytest
from checkpoints import write_model

from pagedkv import LLM, BlockManager, OutOfBlocks, SamplingParams

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT / "benchmarks"))
import serve_trace  # noqa: E402
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


@pytest.mark.parametrize("behind", [0, 1])
def test_requests_that_arrive_while_others_run(tmp_path, rng, device, behind):
    """The engine gives each the tokens that it gives it alone, whatever arrives when and shares what with whom."""
    requests = traces.generate_requests(rng, 12, per_second=1000)
    requests = [replace(request, input_length=min(request.input_length, 1200)) for request in requests]
    folder = write_model(tmp_path, max_position_embeddings=2048)
    options = {"block_size": 16, "num_blocks": 260, "max_num_seqs": 6, "max_num_batched_tokens": 256}
    with LLM(folder, device=device, **options) as llm:
        llm._runner.num_behind = behind
        served = serve_trace.serve(llm, requests)
        row = serve_trace.summary(llm, served, 1.0)
        assert row["refused"] == 0 and row["new_tokens"] == sum(request.output_length for request in requests)
        assert llm.manager.num_free_blocks == llm.manager.num_blocks
        llm.manager.check()
        for request, (output, late) in zip(requests, served, strict=True):
            assert late >= 0
            params = SamplingParams(temperature=0.6, max_tokens=request.output_length, ignore_eos=True, seed=0)
            prompt = traces.token_ids(request, llm.config.vocab_size)
            (alone,) = llm.generate([prompt], params, use_tqdm=False)
            assert (output.prompt_token_ids, output.token_ids) == (prompt, alone.token_ids)
