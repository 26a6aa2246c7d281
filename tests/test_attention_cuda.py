"""Attention on CUDA beyond the shared case list: the tensor-core kernels, decode, plans, and graphs."""

from dataclasses import replace

import numpy as np
import pytest
from cases import ATTENTION_CASES
from cuda_tensors import make_chunks, make_pool, simple_kernel
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


def test_a_plan_for_something_else(torch):
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
    (q, *others), arguments = make_chunks(torch, *shape, 16)
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


def test_a_split_batch_gives_the_same_bits_every_time(torch):
    tensors = make_pool(torch, 3, 20000, 16, 8, 128, 16)
    lens = torch.tensor([20000, 700, 9000], device="cuda", dtype=torch.int32)
    forget(tensors[1:3], tensors[3], lens)
    first = pagedkv.paged_attention_fwd(*tensors, lens)
    for _ in range(50):
        assert torch.equal(pagedkv.paged_attention_fwd(*tensors, lens), first)
