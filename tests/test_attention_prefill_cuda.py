"""Hopper's prefill attention: the list of its items in a plan, and the parts into which they are cut."""

import numpy as np
import pytest
from cuda_tensors import compute_capability, make_chunks, simple_kernel
from test_decode_plan import are_cut_alike

import pagedkv
from pagedkv import ops

pytestmark = pytest.mark.gpu

# Columns of a plan's row that is an item of prefill: attention/prefill/batch.h.
COLUMNS = ("signature", "seq", "q_head", "first_token", "num_positions", "first_key", "context_len", "begin", "end",
           "part", "num_parts", "first_slot")  # fmt: skip


@pytest.fixture(autouse=True)
def on_hopper(torch):
    if compute_capability(torch) != 90:
        pytest.skip("other devices have no list")


def draw(torch, rng):
    """A random batch in which something is prefill: prompts alone, on cached keys, or among decodes."""
    kv_heads, head_dim = int(rng.integers(1, 9)), int(rng.choice([64, 96, 128, 256]))
    heads = kv_heads * int(rng.integers(1, 17)), kv_heads
    count = int(rng.choice([1, 2, 5, 33, 70]))
    queries = rng.integers(1, 4000 // count + 2, count)
    queries[rng.random(count) < rng.choice([0, 0.5, 0.9])] = 1
    queries[rng.integers(count)] = int(rng.integers(200, 900))
    past = rng.integers(0, 20000 // count + 1, count) * rng.integers(0, 2, count)
    contexts = [int(n) for n in queries + past]
    return make_chunks(torch, queries.tolist(), contexts, heads, head_dim, int(rng.choice([8, 16, 64, 256])))


def test_a_planned_call_gives_the_same_bits(torch, rng):
    """As one that lists its items itself, where decodes beside them are cut alike; and, each time, as the time before."""
    num_alike = 0
    for _ in range(25):
        tensors, arguments = draw(torch, rng)
        expected, expected_lse = simple_kernel(*tensors, **arguments, return_lse=True)
        plain, plain_lse = pagedkv.paged_attention_fwd(*tensors, **arguments, return_lse=True)
        torch.testing.assert_close(plain.float(), expected, rtol=2e-2, atol=2e-2)
        torch.testing.assert_close(plain_lse, expected_lse, rtol=1e-3, atol=1e-3)
        plan = torch.full_like(pagedkv.plan_attention(*tensors, **arguments), -1)
        assert pagedkv.plan_attention(*tensors, **arguments, out=plan) is plan
        are_alike = are_cut_alike(*tensors)
        num_alike += are_alike
        first, first_lse = (plain, plain_lse) if are_alike else (None, None)
        for _ in range(2):
            out = torch.full_like(plain, float("nan"))
            _, lse = pagedkv.paged_attention_fwd(*tensors, **arguments, plan=plan, out=out, return_lse=True)
            torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2)
            if first is not None:
                assert torch.equal(out, first) and torch.equal(lse, first_lse)
            first, first_lse = out, lse
        ops.check_errors()
    assert num_alike > 5


def test_a_graph_lists_items_for_the_lengths_that_it_finds(torch, rng):
    for _ in range(5):
        tensors, arguments = draw(torch, rng)
        lens = tensors[4]
        plan = pagedkv.plan_attention(*tensors, **arguments)
        out = torch.empty_like(tensors[0])
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            pagedkv.plan_attention(*tensors, **arguments, out=plan)
            for _ in range(3):
                pagedkv.paged_attention_fwd(*tensors, **arguments, plan=plan, out=out)
        queries = arguments["cu_seqlens_q"].diff()
        for _ in range(4):
            shrunk = torch.from_numpy(rng.random(len(lens))).cuda() * (lens - queries)
            lens.copy_(queries + shrunk.int())
            out.fill_(float("nan"))
            graph.replay()
            torch.testing.assert_close(out.float(), simple_kernel(*tensors, **arguments), rtol=2e-2, atol=2e-2)
        ops.check_errors()


def test_items_cover_every_token_and_key_once(torch, rng):
    """Read back, of sequences with as many queries each, which leave the decode kernel nothing."""
    numbers_of_parts, num_batches = set(), 0
    for i in range(40):
        kv_heads, group, count = int(rng.integers(1, 9)), int(rng.integers(1, 17)), int(rng.choice([1, 2, 7, 40]))
        queries = int(rng.integers(33, 3000 // count + 40))
        contexts = (queries + rng.integers(0, 40000 // count, count) * rng.integers(0, 2)).tolist()
        if i < 2:  # one whose items are cut, and one whose are not
            kv_heads, group, count, queries, contexts = 1, 8, 1, 300, [(300, 40000)[i]]
        shape = [queries] * count, contexts, (kv_heads * group, kv_heads), int(rng.choice([64, 128, 256])), 16
        tensors, arguments = make_chunks(torch, *shape)
        work = (queries - 1) * count * kv_heads * group * shape[3] * tensors[3].shape[1] * 16
        if queries * group <= 32 or work < 2e8:
            continue  # may be the decode kernel's as a whole
        num_batches += 1
        rows = pagedkv.plan_attention(*tensors, **arguments).cpu().numpy()
        rows = rows[rows[:, COLUMNS.index("num_positions")] > 0]
        parts_of, slots = {}, []
        for row in rows:
            item = dict(zip(COLUMNS, row.tolist(), strict=True))
            if item["part"] < item["num_parts"]:  # else nobody's: the item has fewer keys than parts
                place = item["seq"], item["q_head"], item["first_token"], item["num_positions"]
                parts_of.setdefault(place, []).append(item)
        seen = np.zeros((count * queries, kv_heads * group), int)
        for (seq, head, first, positions), parts in parts_of.items():
            assert head % group == 0 and positions * group <= 192  # an item has all query heads of its KV head
            seen[first : first + positions, head : head + group] += 1
            assert seq * queries <= first and first + positions <= (seq + 1) * queries
            parts.sort(key=lambda item: item["part"])
            assert [item["part"] for item in parts] == list(range(parts[0]["num_parts"]))
            borders = [0, *(item["end"] for item in parts)]
            assert [item["begin"] for item in parts] == borders[:-1] and borders == sorted(set(borders))
            assert borders[-1] == contexts[seq] - (seq + 1) * queries + first + positions  # what its last row sees
            numbers_of_parts.add(len(parts))
            if len(parts) > 1:
                slots += range(parts[0]["first_slot"], parts[0]["first_slot"] + len(parts))
        assert (seen == 1).all() and len(slots) == len(set(slots))
    assert 1 in numbers_of_parts and max(numbers_of_parts) > 3 and num_batches >= 10


def test_a_list_of_other_lengths(torch):
    """Recorded, or refused where the shapes say so."""
    tensors, arguments = make_chunks(torch, [300, 1, 500], [5000, 700, 500], (16, 4), 128, 16)
    plan = pagedkv.plan_attention(*tensors, **arguments)
    shorter = [*tensors[:4], tensors[4] - 1]
    pagedkv.paged_attention_fwd(*shorter, **arguments, plan=plan)
    with pytest.raises(ValueError, match=r"plan: made when sequence \d had \d+ keys, but context_lens has \d+ now"):
        ops.check_errors()
    whole = pagedkv.plan_attention(*tensors, **arguments, window_size=(100, 0))  # too few keys to cut items
    with pytest.raises(ValueError, match=r"plan: has \d+ rows but a batch of these shapes needs \d+"):
        pagedkv.paged_attention_fwd(*tensors, **arguments, plan=whole)
    tensors, arguments = make_chunks(torch, [300], [5000], (16, 4), 128, 16)  # nothing is the decode kernel's
    other = pagedkv.plan_attention(*tensors, **arguments, window_size=(4000, 0))
    pagedkv.paged_attention_fwd(*tensors, **arguments, plan=other)
    with pytest.raises(ValueError, match=r"plan: row \d+ was not made for these shapes"):
        ops.check_errors()


def test_few_items_over_many_keys_in_up_to_a_part_for_each_processor(torch):
    """One item, two, five: parts are counted in steps that reach as many as the GPU has processors. With 6 and 12 query
    heads of a KV head items have 2 and 4 of them. Of ten items four threads merge what one does of 27."""
    shapes = (
        (1, 2, 64, 60000, 128), (2, 2, 60, 30000, 128), (5, 2, 33, 9000, 128), (1, 2, 100, 100000, 128),
        (2, 6, 64, 20000, 128), (1, 12, 512, 9000, 128), (1, 2, 17, 70000, 64), (10, 1, 64, 20000, 64),
        (27, 1, 64, 20000, 64), (1, 1, 64, 50000, 256), (3, 2, 50, 20000, 256), (4, 1, 90, 9000, 80),
    )  # fmt: skip
    for kv_heads, group, queries, past, head_dim in shapes:
        heads = group * kv_heads, kv_heads
        tensors, arguments = make_chunks(torch, [queries], [past + queries], heads, head_dim, 16)
        out, lse = pagedkv.paged_attention_fwd(*tensors, **arguments, return_lse=True)
        expected, expected_lse = simple_kernel(*tensors, **arguments, return_lse=True)
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(lse, expected_lse, rtol=1e-3, atol=1e-3)
