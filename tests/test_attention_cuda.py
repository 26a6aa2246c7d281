"""Attention on CUDA beyond the shared case list: the tensor-core kernels, plans, graphs, and what bits depend on."""

from dataclasses import replace

import numpy as np
import pytest
from cases import ATTENTION_CASES
from pools import forget, make_batch
from test_attention import check, run

import pagedkv
from pagedkv import ops

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("case", ATTENTION_CASES, ids=lambda case: case.name)
def test_case_on_tensor_cores(torch, rng, case, dtype):
    """The shared list is float32, which these kernels do not take."""
    batch = make_batch(replace(case, dtype=dtype), rng)
    results = run(batch, "cuda:0")
    check(batch, results)
    for is_constant in (False, True):
        planned = run(batch, "cuda:0", has_plan=True, past_is_constant=is_constant)
        assert all(np.array_equal(*pair) for pair in zip(results, planned))


def make_pool(torch, num_seqs, longest, heads, kv_heads, head_dim, page):
    """Random q, caches and tables for one query a sequence; the tables in random order."""
    blocks = -(-longest // page)
    q = torch.randn(num_seqs, heads, head_dim, device="cuda", dtype=torch.bfloat16)
    caches = torch.randn(2, num_seqs * blocks, page, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    tables = torch.randperm(num_seqs * blocks, device="cuda", dtype=torch.int32).view(num_seqs, blocks)
    return q, caches[0], caches[1], tables


def simple_kernel(q, k_cache, v_cache, *rest, **arguments):
    """The same in float32, by the kernel that takes one key at a time."""
    return pagedkv.paged_attention_fwd(q.float(), k_cache.float(), v_cache.float(), *rest, **arguments)


# batch, context (0: ragged), heads: one sequence in many parts, some parts, none, and lengths that differ 10,000 times
@pytest.mark.parametrize("num_splits", [0, 4])
@pytest.mark.parametrize(("batch", "context", "heads"), [
    (1, 1, (16, 8)), (1, 40000, (16, 8)), (1, 9000, (64, 4)), (1, 5000, (4, 4)), (2, 7000, (160, 1)), (9, 3000, (8, 2)),
    (1, 60000, (8, 1)), (1, 30000, (12, 1)),  # merged by a kernel of its own
    (40, 0, (32, 8)), (72, 0, (16, 8)), (150, 0, (16, 8)), (250, 0, (16, 8)), (700, 0, (4, 2)),
    (1500, 0, (4, 1))])  # fmt: skip
def test_decode_of_any_batch(torch, rng, batch, context, heads, num_splits):
    tensors = make_pool(torch, batch, context or 2000, *heads, 128, 16)
    lens = rng.integers(0, 2001, batch) * (rng.random(batch) < 0.9) if context == 0 else np.full(batch, context)
    lens = torch.from_numpy(lens.astype(np.int32)).cuda()
    forget(tensors[1:3], tensors[3], lens)
    expected, expected_lse = simple_kernel(*tensors, lens, return_lse=True)
    for plan in (None, pagedkv.plan_attention(*tensors, lens, num_splits=num_splits)):
        out = torch.full_like(tensors[0], float("nan"))
        _, lse = pagedkv.paged_attention_fwd(*tensors, lens, num_splits=num_splits, plan=plan, out=out, return_lse=True)
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("heads", [(16, 8), (64, 4), (4, 4), (64, 1), (1, 1)])
def test_a_plan_in_memory_that_steps_share(torch, rng, heads):
    """It has no more rows than is promised. Those behind it stay, and those of the step before do no harm."""
    group, longest = heads[0] // heads[1], 2500
    q, *tensors = make_pool(torch, 300, longest, *heads, 64, 16)
    queries = ([1] * 300, [300, 1, 77, 1, 1], [1] * 40, [3] * 100, [1999] + [1] * 250, [17], [40, 0, 1, 2], [9] * 60,
               [100] + [1] * 20, [0], [1])  # fmt: skip
    rows_of = {i: len(lens) * (1 + heads[1]) + sum(lens) * group * (8 + heads[1]) // 64 + 5120
               for i, lens in enumerate(queries)}  # fmt: skip
    memory = torch.full((max(rows_of.values()), 12), -7, device="cuda", dtype=torch.int32)
    for i, lens_q in enumerate(queries):
        q = torch.randn(sum(lens_q), *q.shape[1:], device="cuda", dtype=torch.bfloat16)
        contexts = np.array(lens_q) + rng.integers(0, 500, len(lens_q))
        contexts, offsets = (torch.from_numpy(x.astype(np.int32)).cuda() for x in (contexts, np.cumsum([0, *lens_q])))
        caches, tables = [cache.clone() for cache in tensors[:2]], tensors[2][: len(lens_q)]
        forget(caches, tables, contexts)
        batch = q, *caches, tables, contexts
        ragged = {"cu_seqlens_q": offsets, "max_seqlen_q": max(lens_q)}
        num_rows, before = len(pagedkv.plan_attention(*batch, **ragged)), memory.clone()
        assert num_rows <= rows_of[i]
        assert pagedkv.plan_attention(*batch, **ragged, out=memory) is memory
        assert torch.equal(memory[num_rows:], before[num_rows:])
        planned = pagedkv.paged_attention_fwd(*batch, **ragged, plan=memory)
        assert not planned.isnan().any()
        assert torch.equal(planned, pagedkv.paged_attention_fwd(*batch, **ragged))
    ops.check_errors()


def test_a_graph_plans_for_the_lengths_that_it_finds(torch, rng):
    """One plan and two layers in a graph, replayed with other lengths and tables."""
    for batch in (1, 7, 200):
        q, k_cache, v_cache, tables = make_pool(torch, batch, 3000, 16, 8, 128, 16)
        layers, fresh = [(k_cache, v_cache), (v_cache, k_cache)], (k_cache.clone(), v_cache.clone())
        lens = torch.full((batch,), 5, device="cuda", dtype=torch.int32)

        def step(q=q, layers=layers, tables=tables, lens=lens):
            plan = pagedkv.plan_attention(q, *layers[0], tables, lens)
            return [pagedkv.paged_attention_fwd(q, *layer, tables, lens, plan=plan) for layer in layers]

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = step()
        for _ in range(3):
            lens.copy_(torch.from_numpy(rng.integers(0, 3001, batch).astype(np.int32)))
            tables.copy_(tables[:, torch.randperm(tables.shape[1])].clone())
            for cache, values in zip((k_cache, v_cache), fresh, strict=True):
                cache.copy_(values)
            forget((k_cache, v_cache), tables, lens)
            graph.replay()
            for out, layer in zip(captured, layers, strict=True):
                expected = simple_kernel(q, *layer, tables, lens)
                torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("queries", [1, 5])
@pytest.mark.parametrize(("batch", "longest"), [(1, 30000), (3, 40), (150, 1500)])
def test_what_is_read_before_a_layer_has_stored_its_keys(torch, rng, batch, longest, queries):
    """past_is_constant: layers in a graph store the keys of their queries, NaN until then, and attend at once."""
    _, *caches, tables = make_pool(torch, batch, longest, 16, 8, 128, 16)
    q, *new = torch.randn(3, batch * queries, 16, 128, device="cuda", dtype=torch.bfloat16)
    layers = [[cache.clone() for cache in caches] for _ in range(3)]
    tokens = [cache.view(-1, 8, 128) for layer in layers for cache in layer]
    lens = torch.full((batch,), queries, device="cuda", dtype=torch.int32)
    slots = torch.zeros(batch * queries, device="cuda", dtype=torch.int32)

    def step():
        plan = pagedkv.plan_attention(q, *layers[0], tables, lens)
        outs = []
        for layer in layers:
            pagedkv.store_kvcache(*(x[:, :8] for x in new), *layer, slots)
            outs.append(pagedkv.paged_attention_fwd(q, *layer, tables, lens, plan=plan, past_is_constant=True))
        return outs

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(5):
        lens.copy_(torch.from_numpy(rng.integers(queries, longest + 1, batch).astype(np.int32)))
        positions = (lens[:, None] - queries + torch.arange(queries, device="cuda")).long()
        slots.copy_((tables.gather(1, positions // 16) * 16 + positions % 16).view(-1))
        for layer in layers:
            for cache, values in zip(layer, caches, strict=True):
                cache.copy_(values)
            forget(layer, tables, lens)
        for cache in tokens:
            cache[slots.long()] = float("nan")
        graph.replay()
        for out, layer in zip(captured, layers, strict=True):
            expected = simple_kernel(q, *layer, tables, lens)
            torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)


def test_a_plan_for_something_else(torch, rng):
    """Refused where the shapes say so, recorded where only the device can tell; the call after it is right."""
    tensors = make_pool(torch, 20, 2000, 16, 8, 128, 16)
    lens = torch.full((20,), 1500, device="cuda", dtype=torch.int32)
    forget(tensors[1:3], tensors[3], lens)
    good = pagedkv.paged_attention_fwd(*tensors, lens)
    assert not good.isnan().any()
    plan = pagedkv.plan_attention(*tensors, lens)

    with pytest.raises(ValueError, match=r"plan: has \d+ rows but a batch of these shapes needs 160"):
        pagedkv.paged_attention_fwd(*tensors, lens, num_splits=8, plan=plan)
    with pytest.raises(ValueError, match=r"out: has \d+ rows but a batch of these shapes needs 160"):
        pagedkv.plan_attention(*tensors, lens, num_splits=8, out=plan)
    with pytest.raises(TypeError, match="plan: dtype is int64"):
        pagedkv.paged_attention_fwd(*tensors, lens, plan=plan.long())
    with pytest.raises(BufferError, match="plan: is on cpu"):
        pagedkv.paged_attention_fwd(*tensors, lens, plan=plan.cpu())

    other = pagedkv.plan_attention(*tensors, lens, window_size=(100, 0))
    assert other.shape == plan.shape
    pagedkv.paged_attention_fwd(*tensors, lens, plan=other)
    with pytest.raises(ValueError, match=r"plan: row \d+ was not made for these shapes"):
        ops.check_errors()
    pagedkv.paged_attention_fwd(*tensors, lens - 1, plan=plan)
    with pytest.raises(ValueError, match="had 1500 keys, but context_lens has 1499 now"):
        ops.check_errors()


def recorded_error():
    try:
        ops.check_errors()
    except ValueError as error:
        return str(error)
    return ""


def broken_plans(torch, rng, plan):
    """Copies of a plan in which something is not as it was planned."""
    for column in range(12):
        for value in (-1, 0, 7, 2**30, 2**31 - 1, -(2**31), int(rng.integers(1, 4000))):
            broken = plan.clone()
            broken[int(rng.integers(3)) :: 3, column] = value
            yield broken
            broken = plan.clone()
            broken[int(rng.integers(len(plan))), column] += value
            yield broken
    yield torch.zeros_like(plan)
    yield plan ^ -(2**31)  # what a hash that is a sum does not see
    broken = plan.clone()
    broken[:, [3, 5]] ^= -(2**31)
    yield broken
    for _ in range(10):
        broken, (i, j) = plan.clone(), rng.choice(len(plan), 2, replace=False)
        broken[[i, j]] = broken[[j, i]]  # sound rows in each other's place
        yield broken


@pytest.mark.parametrize("kind", ["decode", "few, cut", "merged apart", "mixed"])
def test_a_plan_that_was_changed(torch, rng, kind):
    """A plan is only memory: whatever was changed in it is recorded, nothing outside is touched, and after check_errors
    calls are right again, with the plan or without, and with other queries, which find nothing of the call before."""
    shape = {
        "decode": ([1] * 20, [1500] * 20, (16, 4), 128),
        "few, cut": ([1] * 3, [20000, 700, 9000], (16, 4), 128),
        "merged apart": ([1] * 3, [20000, 700, 9000], (12, 1), 256),
        "mixed": ([300, 1, 500, 1], [5000, 700, 500, 9000], (16, 4), 128),
    }[kind]
    (q, *others), arguments = make_chunks(torch, rng, *shape, 16)
    batches = [(each, *others) for each in (q, torch.randn_like(q), torch.randn_like(q))]
    plan = pagedkv.plan_attention(*batches[0], **arguments)
    expected = [pagedkv.paged_attention_fwd(*each, **arguments, plan=plan) for each in batches]
    plain = [pagedkv.paged_attention_fwd(*each, **arguments) for each in batches]
    for i, broken in enumerate(broken_plans(torch, rng, plan)):
        is_work_changed = (broken != plan).any(1)[plan[:, 4] > 0].any()  # few of the other rows are read
        pagedkv.paged_attention_fwd(*batches[i % 3], **arguments, plan=broken)
        error = recorded_error()
        assert "was not made for these shapes or was changed" in error if error else not is_work_changed
        for j in (i + 1, i + 2):
            assert torch.equal(pagedkv.paged_attention_fwd(*batches[j % 3], **arguments, plan=plan), expected[j % 3])
            assert torch.equal(pagedkv.paged_attention_fwd(*batches[j % 3], **arguments), plain[j % 3])
        ops.check_errors()


def make_chunks(torch, rng, queries, contexts, heads, head_dim, page):
    """(q, k_cache, v_cache, tables, lens), and what tells them apart: these queries at the end of these contexts."""
    lens = torch.tensor(contexts, device="cuda", dtype=torch.int32)
    _, *others = make_pool(torch, len(contexts), max(contexts), *heads, head_dim, page)
    forget(others[:2], others[2], lens)
    q = torch.randn(sum(queries), heads[0], head_dim, device="cuda", dtype=torch.bfloat16)
    starts = torch.tensor([0, *np.cumsum(queries)], device="cuda", dtype=torch.int32)
    return (q, *others, lens), dict(cu_seqlens_q=starts, max_seqlen_q=max(queries))


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
        tensors, arguments = make_chunks(
            torch, rng, queries, contexts, heads, head_dim, int(rng.choice([8, 16, 64, 256]))
        )
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
        tensors, arguments = make_chunks(torch, rng, queries, contexts, (16, 8), 128, 16)
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
    (q, k_cache, v_cache, tables, lens), ends = make_chunks(torch, rng, queries, contexts, (16, 8), 64, 16)
    options = {"sinks": torch.randn(16, device="cuda"), "num_splits": 1}
    together = pagedkv.paged_attention_fwd(q, k_cache, v_cache, tables, lens, **ends, **options)
    for seq, (own_q, expected) in enumerate(zip(q.split(queries), together.split(queries), strict=True)):
        own = slice(seq, seq + 1)
        starts = torch.tensor([0, queries[seq]], device="cuda", dtype=torch.int32)
        alone = pagedkv.paged_attention_fwd(own_q, k_cache, v_cache, tables[own], lens[own], cu_seqlens_q=starts,
                                            max_seqlen_q=queries[seq], **options)  # fmt: skip
        assert torch.equal(alone, expected)


def test_a_split_batch_gives_the_same_bits_every_time(torch):
    tensors = make_pool(torch, 3, 20000, 16, 8, 128, 16)
    lens = torch.tensor([20000, 700, 9000], device="cuda", dtype=torch.int32)
    forget(tensors[1:3], tensors[3], lens)
    first = pagedkv.paged_attention_fwd(*tensors, lens)
    for _ in range(50):
        assert torch.equal(pagedkv.paged_attention_fwd(*tensors, lens), first)
