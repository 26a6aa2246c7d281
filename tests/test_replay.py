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


def replay(trace, num_blocks, block_size, **options):
    """(hit tokens, evictions, refused requests) of requests that are computed and freed one after another."""
    manager = BlockManager(num_blocks, block_size, **options)
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


class Pages:
    """Cached pages, each (the id that holds its last token, its end in that id): a model that knows no tokens."""

    def __init__(self, num_blocks, eviction):
        self.num_blocks, self.eviction = num_blocks, eviction
        self.cached = OrderedDict(), OrderedDict()  # found once, found again: page -> number of its release
        self.evicted, self.num_released = {}, 0  # page -> number of its eviction, among all
        self.evictions = 0

    def __contains__(self, page):
        return any(page in pages for pages in self.cached)

    def __len__(self):
        return sum(map(len, self.cached))

    def evict(self):
        once, again = (next(iter(pages.items()), None) for pages in self.cached)
        is_again = not once or (again and again[1] + 3 * self.num_blocks < once[1])
        page, _ = self.cached[bool(is_again)].popitem(last=False)
        self.evictions += 1
        self.evicted[page] = self.evictions

    def is_known(self, page):
        return page in self.evicted and self.evictions - self.evicted[page] < 32 * self.num_blocks

    def release(self, page, is_found_again):
        self.cached[is_found_again and self.eviction == "reuse"][page] = self.num_released
        self.num_released += 1


def model_replay(trace, num_blocks, block_size, eviction):
    """What replay gives, by Pages."""
    pool, hit_pages, refused = Pages(num_blocks, eviction), 0, 0
    for length, ids in trace:
        ends = range(block_size, length + 1, block_size)
        pages = [(ids[(end - 1) // traces.ID_TOKENS], (end - 1) % traces.ID_TOKENS) for end in ends]
        hits = 0
        while hits < len(pages) and pages[hits] in pool:
            hits += 1
        used, total = hits, -(-length // block_size)
        if total > num_blocks:
            refused += 1
            continue
        for page in pages[:hits]:
            for cached in pool.cached:
                cached.pop(page, None)
        found_again = [True] * hits
        for page in [*pages[hits:], *[None] * (total - len(pages))]:  # the last page may not be full
            if used + len(pool) == num_blocks:
                pool.evict()
            used += 1
            if page:
                found_again.append(pool.is_known(page) and all(found_again[-1:]))
        assert not any(page in pool for page in pages)  # a chain loses its end before its start
        for page, is_found_again in zip(reversed(pages), reversed(found_again)):
            pool.release(page, is_found_again)
        hit_pages += hits
    return hit_pages * block_size, pool.evictions, refused


def check(trace, block_sizes, pool_tokens):
    for block_size in block_sizes:
        everything = sum(-(-length // block_size) for length, _ in trace)
        hits, evictions, refused = replay(trace, min(everything, 2**31 // block_size - 1), block_size)
        assert (hits, evictions, refused) == (traces.reusable_tokens(trace, block_size), 0, 0)
        for tokens in pool_tokens:
            num_blocks = max(tokens // block_size, 1)
            bounded = replay(trace, num_blocks, block_size, eviction="lru")
            assert bounded == model_replay(trace, num_blocks, block_size, "lru")
            assert bounded[0] <= hits and bounded[1] > 0
            got, wanted = replay(trace, num_blocks, block_size), model_replay(trace, num_blocks, block_size, "reuse")
            assert got == pytest.approx(wanted, rel=0.03)  # the table of what was evicted forgets a little early


def test_generated_trace(rng):
    trace = traces.generate(rng, 150)
    assert traces.reusable_tokens(trace, 16) > 0
    check(trace, [16, 24, 100, 512], [4_000, 20_000])


@pytest.mark.skipif(not PUBLIC.exists(), reason=f"no trace at {PUBLIC} (PAGEDKV_TRACE names it)")
def test_public_trace():
    trace = traces.load(PUBLIC)
    assert len(trace) == 3993
    check(trace, [512], [500_000, 4_000_000])
    check(trace[:1000], [16], [2_000_000])


@pytest.mark.skipif(not PUBLIC.exists(), reason=f"no trace at {PUBLIC} (PAGEDKV_TRACE names it)")
def test_what_is_found_again_stays_longer():
    """Of all prompt tokens, in percent: never 0.2 less than least recently used, and a twentieth more at a million."""
    trace = traces.load(PUBLIC)
    total = sum(length for length, _ in trace) / 100
    for tokens in 250_000, 350_000, 1_000_000, 4_000_000, 16_000_000:
        lru, reuse = (replay(trace, tokens // 512, 512, eviction=name)[0] / total for name in ("lru", "reuse"))
        assert reuse > lru - 0.2
        if tokens == 1_000_000:
            assert reuse > 1.05 * lru


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
