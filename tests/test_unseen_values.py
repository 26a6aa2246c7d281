"""inf and NaN in keys and values reach the queries that see them, and no others; on the CPU, of every instruction set."""

import resource

import numpy as np
import pytest
from again import run_again
from pools import get, put

import pagedkv


def draw(rng):
    """A call over one or two sequences with bad numbers in a few keys; where they are, and what sees what."""
    block, kv_heads, group = int(rng.choice([1, 7, 16])), int(rng.integers(1, 3)), int(rng.choice([1, 2, 5]))
    head_dim = int(rng.choice([8, 64, 72]))
    contexts = rng.integers(1, 150, int(rng.integers(1, 3)))
    queries = np.array([int(rng.integers(1, min(int(c), 90) + 1)) for c in contexts])
    window = (int(rng.integers(-1, 40)), int(rng.integers(-1, 6)))
    causal, per_seq = bool(rng.random() < 0.7), int(contexts.max() + block - 1) // block
    tables = rng.permutation(len(contexts) * per_seq).astype(np.int32).reshape(len(contexts), per_seq)
    caches = rng.standard_normal((2, tables.size, block, kv_heads, head_dim))
    right = 0 if causal else window[1]
    sees, bad_sees, places = [], [], []
    for s, (context, count) in enumerate(zip(contexts, queries, strict=True)):
        bad = rng.choice(context, min(int(rng.integers(0, 4)), context), replace=False)
        places += [(tables[s, key // block], key % block) for key in bad]
        for position in range(context - count, context):
            keys = np.arange(context)
            seen = ((window[0] < 0) | (keys >= position - window[0])) & ((right < 0) | (keys <= position + right))
            sees.append(seen.any())
            bad_sees.append(seen[bad].any())
    q = rng.standard_normal((int(queries.sum()), kv_heads * group, head_dim))
    options = dict(block_tables=tables, context_lens=contexts.astype(np.int32), causal=causal, window_size=window,
                   cu_seqlens_q=np.concatenate([[0], np.cumsum(queries)]).astype(np.int32))  # fmt: skip
    return q, caches, places, options, np.array(sees), np.array(bad_sees)


@pytest.mark.parametrize("dtype, cache_dtype", [("float32", None), ("float16", None), ("bfloat16", None), ("bfloat16", "float8_e4m3fn")])
@pytest.mark.parametrize("what", ["keys", "values"])
def test_not_finite(rng, what, dtype, cache_dtype):
    for _ in range(25):
        q, caches, places, options, _, bad_sees = draw(rng)
        outs = []
        for is_bad in (False, True):
            if is_bad:
                for page, slot in places:
                    number = np.nan if cache_dtype else rng.choice([np.inf, -np.inf, np.nan])
                    caches[int(what == "values"), page, slot, :, int(rng.integers(caches.shape[-1]))] = number
            k_cache, v_cache = (put(cache, "cpu", cache_dtype or dtype) for cache in caches)
            outs.append(get(pagedkv.paged_attention_fwd(put(q, "cpu", dtype), k_cache, v_cache, **options)))
        assert np.isfinite(outs[0]).all()
        np.testing.assert_array_equal(outs[0][~bad_sees], outs[1][~bad_sees])
        if what == "values":
            assert not np.isfinite(outs[1][bad_sees]).all(2).any(), "who sees it has it"


def test_every_instruction_set(lesser_isa):
    said = run_again(__file__, "not_finite", PAGEDKV_CPU_ISA=lesser_isa)
    assert " 8 passed" in said, said


def test_splits_take_no_memory():
    """The CPU's own division depends on a sequence alone, so num_splits changes neither it nor the result."""
    q, cache = np.ones((64, 128, 8, 64), np.float32), np.ones((512, 16, 4, 64), np.float32)
    tables, lens = np.arange(512, dtype=np.int32).reshape(64, 8), np.full(64, 128, np.int32)
    expected = pagedkv.paged_attention_fwd(q.reshape(-1, 8, 64), cache, cache, tables, lens)
    few = pagedkv.paged_attention_fwd(q[:, 0], cache, cache, tables, lens)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert np.array_equal(expected, pagedkv.paged_attention_fwd(q.reshape(-1, 8, 64), cache, cache, tables, lens, num_splits=256))
    assert np.array_equal(few, pagedkv.paged_attention_fwd(q[:, 0], cache, cache, tables, lens, num_splits=256))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024
