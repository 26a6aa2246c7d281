"""Attention on CUDA over prompts, alone or among decodes; and num_splits, which makes bits independent of the batch."""

import numpy as np
import pytest
from cuda_tensors import make_chunks, make_pool, simple_kernel
from pools import forget

import pagedkv

pytestmark = pytest.mark.gpu


# What makes parts of prompts: one chunk or a few at the end of long contexts, alone or among decodes and short prompts.
@pytest.mark.parametrize("kind", ["plain", "window", "sinks and softcap", "fp8", "all keys seen"])
def test_prompts_whose_keys_are_cut_into_parts(torch, rng, kind):
    for _ in range(8):
        kv_heads, head_dim = int(rng.integers(1, 5)), int(rng.choice([64, 96, 128] + [256] * (kind != "fp8")))
        heads = kv_heads * int(rng.integers(1, 17)), kv_heads
        chunks = int(rng.integers(1, 4))
        queries = [int(n) for n in np.r_[rng.integers(20, 400, chunks), rng.integers(1, 40, rng.integers(0, 40))]]
        past = np.r_[rng.integers(0, 20000, chunks), rng.integers(0, 2000, len(queries) - chunks)]
        if rng.random() < 0.5:
            queries[chunks:] = [1] * (len(queries) - chunks)
        order = rng.permutation(len(queries))
        queries, contexts = [queries[i] for i in order], [int(past[i]) + queries[i] for i in order]
        tensors, arguments = make_chunks(torch, queries, contexts, heads, head_dim, int(rng.choice([8, 16, 64, 256])))
        if kind == "window":
            arguments["window_size"] = int(rng.integers(0, 5000)), int(rng.integers(0, 9))
        elif kind == "all keys seen":
            arguments["causal"] = False
        elif kind == "sinks and softcap":
            arguments |= dict(sinks=torch.randn(heads[0], device="cuda"), softcap=5.0)
        elif kind == "fp8":
            tensors = tensors[0], *(cache.to(torch.float8_e4m3fn) for cache in tensors[1:3]), *tensors[3:]
        out = torch.full_like(tensors[0], float("nan"))
        _, lse = pagedkv.paged_attention_fwd(*tensors, **arguments, out=out, return_lse=True)
        expected, expected_lse = simple_kernel(*tensors, **arguments, return_lse=True)
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
        for _ in range(3):
            again = pagedkv.paged_attention_fwd(*tensors, **arguments)
            assert torch.equal(again, out)


@pytest.mark.parametrize("past", [4000, 200])
def test_layers_that_mix_prompts_and_decodes(torch, rng, past):
    """Two kernels beside each other answer a layer, or one where there are few keys, and what comes behind waits: what a
    layer gives is the next one's queries and new keys, in a graph and without one."""
    for _ in range(6):
        queries = [1] * int(rng.integers(1, 60)) + rng.integers(2, 300, rng.integers(1, 4)).tolist()
        contexts = [n + int(rng.integers(0, past)) for n in queries]
        tensors, arguments = make_chunks(torch, queries, contexts, (16, 8), 128, 16)
        q, k_cache, v_cache, tables, lens = tensors
        starts, seqs = arguments["cu_seqlens_q"].tolist(), len(queries)
        slots = torch.cat([
            tables[s, torch.arange(contexts[s] - queries[s], contexts[s], device="cuda") // 16] * 16
            + torch.arange(contexts[s] - queries[s], contexts[s], device="cuda") % 16
            for s in range(seqs)
        ]).int()  # fmt: skip
        assert starts[-1] == len(slots)

        def layers(attend, caches, q=q, slots=slots):
            x = q
            for _ in range(5):
                pagedkv.store_kvcache(x[:, :8].contiguous(), x[:, 8:].contiguous(), *caches, slots)
                x = attend(x, *caches)
            return x

        def together(x, *caches, rest=(tables, lens), arguments=arguments):
            return pagedkv.paged_attention_fwd(x, *caches, *rest, **arguments)

        def one_by_one(x, *caches, tables=tables, lens=lens, queries=queries):
            torch.cuda.synchronize()
            parts = [pagedkv.paged_attention_fwd(part, *caches, tables[s : s + 1], lens[s : s + 1],
                                                 cu_seqlens_q=torch.tensor([0, len(part)], device="cuda", dtype=torch.int32),
                                                 max_seqlen_q=len(part))
                     for s, part in enumerate(x.split(queries))]  # fmt: skip
            torch.cuda.synchronize()
            return torch.cat(parts)

        fresh = k_cache.clone(), v_cache.clone()
        expected = layers(one_by_one, (fresh[0].clone(), fresh[1].clone())).float()
        caches = fresh[0].clone(), fresh[1].clone()
        got = layers(together, caches)
        torch.testing.assert_close(got.float(), expected, rtol=5e-2, atol=5e-2)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = layers(together, caches)
        for _ in range(20):
            for cache, values in zip(caches, fresh, strict=True):
                cache.copy_(values)
            captured.fill_(float("nan"))
            graph.replay()
            assert torch.equal(captured, got)


@pytest.mark.parametrize(
    ("head_dim", "page", "k_scale"),
    [(64, 8, 1.0), (96, 24, 1.0), (128, 16, 1.0), (128, 16, -0.7), (128, 16, 0.0), (128, 256, 1.0), (256, 16, 1.0)],
)
def test_prompts_over_an_fp8_pool(torch, head_dim, page, k_scale):
    """Many items of several tiles, NaN behind the last keys; then NaN that is not to be hidden."""
    lens = torch.tensor([900, 65, 1300, 128, 3, 700], device="cuda", dtype=torch.int32)
    starts = torch.nn.functional.pad(lens.cumsum(0).int(), (1, 0))
    _, *caches, tables = make_pool(torch, len(lens), 1300, 8, 4, head_dim, page)
    forget(caches, tables, lens)
    caches = [cache.to(torch.float8_e4m3fn) for cache in caches]
    q = torch.randn(int(starts[-1]), 8, head_dim, device="cuda", dtype=torch.bfloat16)
    arguments = dict(cu_seqlens_q=starts, max_seqlen_q=1300)
    scales = torch.full((4,), k_scale, device="cuda")
    out = pagedkv.paged_attention_fwd(q, *caches, tables, lens, k_scale=scales, **arguments)
    expected = simple_kernel(q.float() * k_scale, *caches, tables, lens, **arguments)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)

    caches[0].view(torch.uint8)[tables[0, 0], 1, 3, 5] = 0xFF
    caches[1].view(torch.uint8)[tables[2, 0], 0, 2, 7] = 0x7F
    is_nan = pagedkv.paged_attention_fwd(q, *caches, tables, lens, **arguments).isnan()
    assert is_nan[1:900, 6:].all() and is_nan[starts[2] : starts[3], 4:6, 7].all()
    assert is_nan.sum() == 899 * 2 * head_dim + 1300 * 2


@pytest.mark.parametrize("lengths", [(40, 40, 40), (1, 0, 39)])
def test_a_q_with_room_for_the_most_tokens_of_every_sequence(torch, lengths):
    """Where its rows are all in use nobody decodes; where they are not, one token is answered all the same."""
    starts = torch.tensor([0, *np.cumsum(lengths)], device="cuda", dtype=torch.int32)
    lens = torch.tensor([300, 70, 90], device="cuda", dtype=torch.int32)
    q, *others = make_pool(torch, 120, 300, 16, 8, 128, 16)
    forget(others[:2], others[2][:3], lens)
    arguments = dict(cu_seqlens_q=starts, max_seqlen_q=40)
    out = torch.full_like(q, 5.0)
    pagedkv.paged_attention_fwd(q, *others[:2], others[2][:3], lens, out=out, **arguments)
    expected = simple_kernel(q, *others[:2], others[2][:3], lens, **arguments)
    torch.testing.assert_close(out[: sum(lengths)].float(), expected[: sum(lengths)], rtol=2e-2, atol=2e-2)
    assert (out[sum(lengths) :] == 5.0).all()


@pytest.mark.parametrize("num_splits", [1, 4])
def test_num_splits_makes_bits_independent_of_the_batch(torch, rng, num_splits):
    """Alone, among others (with fewer and more queries), and on other page sizes."""
    q, k_cache, v_cache, tables = make_pool(torch, 150, 3008, 16, 8, 128, 16)
    lens = torch.from_numpy(rng.integers(1, 3009, 150).astype(np.int32)).cuda()
    lens[0] = 3008
    forget((k_cache, v_cache), tables, lens)
    together = pagedkv.paged_attention_fwd(q, k_cache, v_cache, tables, lens, num_splits=num_splits)
    for seqs in ([0], [3], [0, 1, 2], list(range(100))):
        out = pagedkv.paged_attention_fwd(q[seqs], k_cache, v_cache, tables[seqs], lens[seqs], num_splits=num_splits)
        assert torch.equal(out, together[seqs])
    for page in (1, 32, 47):
        blocks = -(-3008 // page)
        keys = torch.full((2, 3, blocks * page, 8, 128), float("nan"), device="cuda", dtype=torch.bfloat16)
        for to, cache in zip(keys, (k_cache, v_cache), strict=True):
            to[:, :3008] = cache[tables[:3].long()].view(3, 3008, 8, 128)
        paged = keys.view(2, 3 * blocks, page, 8, 128)
        table = torch.arange(3 * blocks, device="cuda", dtype=torch.int32).view(3, blocks)
        out = pagedkv.paged_attention_fwd(q[:3], *paged, table, lens[:3], num_splits=num_splits)
        assert torch.equal(out, together[:3])
    starts = torch.tensor([0, 1, 1 + 7], device="cuda", dtype=torch.int32)  # 14 rows beside: another tile
    wide = torch.cat((q[:1], q[10:17]))
    out = pagedkv.paged_attention_fwd(wide, k_cache, v_cache, tables[:2], lens[:2], cu_seqlens_q=starts, max_seqlen_q=7,
                                      num_splits=num_splits)  # fmt: skip
    assert torch.equal(out[:1], together[:1])


@pytest.mark.parametrize("heads", [(4, 4), (16, 8), (28, 4), (40, 8), (20, 1)], ids=str)
@pytest.mark.parametrize("num_splits", [1, 4])
def test_num_splits_makes_bits_independent_of_the_batch_for_any_queries(torch, rng, heads, num_splits):
    """Sequences of 1 to 40 queries: each alone, all together, and pairs."""
    num_queries = [1, 2, 3, 4, 5, 8, 9, 17, 40, int(rng.integers(1, 40))]
    starts = np.concatenate(([0], np.cumsum(num_queries)))
    q, k_cache, v_cache, tables = make_pool(torch, len(num_queries), 3008, *heads, 128, 16)
    q = torch.randn(starts[-1], heads[0], 128, device="cuda", dtype=torch.bfloat16)
    lens = torch.from_numpy(rng.integers(40, 3009, len(num_queries)).astype(np.int32)).cuda()
    forget((k_cache, v_cache), tables, lens)

    def attend(seqs):
        rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in seqs])
        lengths = [num_queries[i] for i in seqs]
        ends = torch.tensor([0, *np.cumsum(lengths)], device="cuda", dtype=torch.int32)
        out = pagedkv.paged_attention_fwd(q[rows], k_cache, v_cache, tables[seqs], lens[seqs], cu_seqlens_q=ends,
                                          max_seqlen_q=max(lengths), num_splits=num_splits)  # fmt: skip
        return dict(zip(seqs, out.split(lengths), strict=True))

    together = attend(list(range(len(num_queries))))
    for i in range(len(num_queries)):
        for seqs in ([i], [i, int(rng.integers(i))] if i else [i]):
            for seq, out in attend(seqs).items():
                assert torch.equal(out, together[seq]), (num_queries[seq], seqs)


def test_num_splits_makes_bits_independent_of_long_prompts_beside(torch, rng):
    """With head_dim 64 long prompts may be taken in larger items, and a sink shows where an item begins."""
    queries = [700, 130, 900, 800]
    contexts = [n + int(rng.integers(0, 300)) for n in queries]
    (q, k_cache, v_cache, tables, lens), ends = make_chunks(torch, queries, contexts, (16, 8), 64, 16)
    options = {"sinks": torch.randn(16, device="cuda"), "num_splits": 1}
    together = pagedkv.paged_attention_fwd(q, k_cache, v_cache, tables, lens, **ends, **options)
    for seq, (own_q, expected) in enumerate(zip(q.split(queries), together.split(queries), strict=True)):
        own = slice(seq, seq + 1)
        starts = torch.tensor([0, queries[seq]], device="cuda", dtype=torch.int32)
        alone = pagedkv.paged_attention_fwd(own_q, k_cache, v_cache, tables[own], lens[own], cu_seqlens_q=starts,
                                            max_seqlen_q=queries[seq], **options)  # fmt: skip
        assert torch.equal(alone, expected)
