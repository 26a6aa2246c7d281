"""The plan of decode attention: into which units sequences are cut, and where their parts are left."""

import numpy as np
import pytest
from cuda_tensors import compute_capability, make_pool, simple_kernel

import pagedkv

pytestmark = pytest.mark.gpu

# Columns of a plan's row: attention/plan/plan.h.
COLUMNS = ("signature", "seq", "tile", "first_query", "num_queries", "context", "first_step", "end_step", "part",
           "num_parts", "first_slot", "first_part")  # fmt: skip


# Keys of a CTA in one turn, by head_dim.
STEPS = {"bfloat16": {64: (64, 128, 256), 128: (32, 64, 128), 256: (32, 64)},
         "float8_e4m3fn": {64: (64, 128, 256), 128: (64, 128, 256), 256: (32, 64, 128)}}  # fmt: skip


@pytest.fixture
def as_on_an_h200(torch):
    if torch.cuda.get_device_properties(0).multi_processor_count != 132 or compute_capability(torch) not in (90, 100):
        pytest.skip("these numbers of sequences are for 132 SMs with room for four of the smallest CTAs")


def make_long_pool(torch, num_seqs, longest, heads):
    """make_pool's for long sequences, of which every other one has the same pages: two are enough memory."""
    _, k_cache, v_cache, pages = make_pool(torch, 2, longest, *heads, 128, 16)
    q = torch.randn(num_seqs, heads[0], 128, device="cuda", dtype=torch.bfloat16)
    return q, k_cache, v_cache, pages[torch.arange(num_seqs, device="cuda") % 2].contiguous()


def units_of(torch, tensors, lens, **arguments):
    """The rows that are units; no others stand between them."""
    plan = pagedkv.plan_attention(*tensors, torch.from_numpy(lens).cuda(), **arguments).cpu().numpy()
    units = plan[plan[:, COLUMNS.index("num_parts")] != 0]
    assert not plan[len(units) :, 1:].any()
    return [dict(zip(COLUMNS, row.tolist(), strict=True)) for row in units]


def parts_of(torch, tensors, lens):
    """Of each sequence that has keys, by the plan."""
    units = units_of(torch, tensors, lens)
    return {unit["seq"]: unit["num_parts"] for unit in units if lens[unit["seq"]]}


def are_cut_alike(q, k_cache, v_cache, block_tables, *rest):
    """With a plan and without. Without one, sequences stay whole where a warp has no lane for each and the table has room
    for no more than 16 steps of two warps."""
    num_seqs, table_width = block_tables.shape
    keys_of_warp = 32 if q.shape[-1] * k_cache.element_size() <= 128 else 16
    return num_seqs <= 32 or table_width * k_cache.shape[1] > 16 * 2 * keys_of_warp


def check_planned_and_plain(torch, tensors, lens):
    """Both give what the simple kernel gives, and the same bits where sequences are cut alike."""
    expected, expected_lse = simple_kernel(*tensors, lens, return_lse=True)
    plain, lse = pagedkv.paged_attention_fwd(*tensors, lens, return_lse=True)
    plan = pagedkv.plan_attention(*tensors, lens)
    planned, planned_lse = pagedkv.paged_attention_fwd(*tensors, lens, plan=plan, return_lse=True)
    for out, its_lse in (plain, lse), (planned, planned_lse):
        torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=1e-2)
        torch.testing.assert_close(its_lse, expected_lse, rtol=1e-4, atol=1e-4)
    if are_cut_alike(*tensors):
        assert torch.equal(planned, plain) and torch.equal(planned_lse, lse)


@pytest.mark.usefixtures("as_on_an_h200")
def test_sequences_of_one_length_are_not_cut(torch):
    """Where they fill the GPU, or more than once, even beside padding: each would be merged, and none ends sooner. Nor
    are those of a few steps where they leave some of it empty. A long one among them is cut all the same, and so are the
    few that are left over when the others have filled the GPU.
    """
    for count, left_over in (17, 0), (19, 0), (24, 0), (33, 0), (36, 3), (39, 6), (50, 0), (66, 0), (70, 4), (100, 0):
        rows = -(-count // 8) * 8
        tensors = make_pool(torch, rows, 1500, 16, 8, 128, 16)
        for length in (640, 1500) if count >= 33 else (640,):
            lens = np.where(np.arange(rows) < count, length, 0).astype(np.int32)
            by_seq = parts_of(torch, tensors, lens)
            parts = [by_seq[seq] for seq in range(count)]
            assert parts[: count - left_over] == [1] * (count - left_over), (count, length)
            assert all(2 <= n <= 66 // left_over for n in parts[count - left_over :]), (count, length)
    for count in (24, 40, 200):
        lens = np.full(count, 100, np.int32)
        lens[count // 2] = 30000
        parts = parts_of(torch, make_pool(torch, count, 30000, 16, 8, 128, 16), lens)
        assert parts.pop(count // 2) >= 8 and set(parts.values()) == {1}


@pytest.mark.parametrize(("num_seqs", "heads"), [(54, (16, 8)), (79, (40, 5))])
@pytest.mark.usefixtures("as_on_an_h200")
def test_many_that_are_left_over(torch, rng, num_seqs, heads):
    """More than half a wave of long ones: if any are cut, then only those."""
    longest, left_over = 12_000, num_seqs - 132 * 2 // heads[1]
    lens = longest - rng.integers(0, 50, num_seqs).astype(np.int32)
    tensors, on_gpu = make_long_pool(torch, num_seqs, longest, heads), torch.from_numpy(lens).cuda()
    parts = parts_of(torch, tensors, lens)
    assert {seq for seq in parts if parts[seq] > 1} <= set(range(num_seqs - left_over, num_seqs))
    check_planned_and_plain(torch, tensors, on_gpu)


@pytest.mark.parametrize(("count", "heads", "head_dim"), [(50, (16, 8), 128), (150, (16, 8), 128), (198, (42, 3), 256)])
@pytest.mark.usefixtures("as_on_an_h200")
def test_short_tables_have_the_smallest_ctas(torch, rng, count, heads, head_dim):
    """Of two warps, where longer tables have four if those of two do not all have work: starting a second wave would take
    longer than what it saves."""
    lens, small = rng.integers(1, 321, count).astype(np.int32), 32  # keys of a step of theirs
    for longest, step in (320, small), (3200, 2 * small if count == 50 else small):
        tensors = make_pool(torch, count, longest, *heads, head_dim, 16)
        units = units_of(torch, tensors, lens)
        assert {unit["seq"]: unit["end_step"] for unit in units if unit["part"] + 1 == unit["num_parts"]} == {
            seq: -(-int(n) // step) for seq, n in enumerate(lens)
        }
        check_planned_and_plain(torch, tensors, torch.from_numpy(lens).cuda())


@pytest.mark.parametrize("num_seqs", [9, 40])  # planned by each CTA itself, and by a kernel
def test_prompts_alone_leave_no_units(torch, rng, num_seqs):
    """A batch that may hold decodes, but does not: all are the prefill kernel's."""
    lens = rng.integers(700, 900, num_seqs).astype(np.int32)
    queries = rng.integers(100, 700, num_seqs)
    _, *tensors = make_pool(torch, num_seqs, 900, 16, 8, 128, 16)
    q = torch.randn(int(queries.sum()), 16, 128, device="cuda", dtype=torch.bfloat16)
    ends = torch.tensor([0, *np.cumsum(queries)], device="cuda", dtype=torch.int32)
    arguments = dict(cu_seqlens_q=ends, max_seqlen_q=700)
    on_gpu = torch.from_numpy(lens).cuda()
    expected = simple_kernel(q, *tensors, on_gpu, **arguments)
    plain = pagedkv.paged_attention_fwd(q, *tensors, on_gpu, **arguments)
    plan = pagedkv.plan_attention(q, *tensors, on_gpu, **arguments)
    planned = pagedkv.paged_attention_fwd(q, *tensors, on_gpu, plan=plan, **arguments)
    torch.testing.assert_close(plain.float(), expected.float(), rtol=2e-2, atol=1e-2)
    assert torch.equal(planned, plain)


@pytest.mark.usefixtures("as_on_an_h200")
def test_few_that_are_left_over_without_a_plan(torch):
    """At most 32 sequences are planned by each CTA itself: 4 of 20 are left over, since 16 fill the GPU."""
    tensors, lens = make_pool(torch, 20, 1500, 16, 16, 128, 16), np.full(20, 1500, np.int32)
    parts = parts_of(torch, tensors, lens)
    assert {seq for seq in parts if parts[seq] > 1} == {16, 17, 18, 19}
    check_planned_and_plain(torch, tensors, torch.from_numpy(lens).cuda())


def test_short_ones_behind_the_last_long_one_take_one_slot_each(torch):
    """They had two where each CTA plans for itself, so the long one had fewer parts than by the kernel that plans."""
    for heads, lens in ((40, 8), [82, 24666, 82, 82, 82]), ((96, 6), [2778, 9764, 21304, 1943, 5423, 9418, 0, 0, 0]):
        tensors = make_pool(torch, len(lens), max(lens), *heads, 64, 16)
        check_planned_and_plain(torch, tensors, torch.tensor(lens, dtype=torch.int32, device="cuda"))


@pytest.mark.usefixtures("as_on_an_h200")
def test_a_few_long_ones_among_many_have_parts_of_a_share(torch, rng):
    """A share is all steps divided by the places for CTAs. A part is hardly longer, or everything waits for it."""
    num_long, num_short, longest, step, places = 4, 300, 30_000, 32, 66
    where = rng.permutation(num_long + num_short)
    long, short = where[:num_long], where[num_long:]
    lens = np.zeros(len(where), np.int32)
    lens[long] = longest - rng.integers(0, 40, num_long)
    lens[short] = rng.integers(1, 65, num_short)
    _, k_cache, v_cache, pages = make_pool(torch, num_long + 1, longest, 16, 8, 128, 16)
    tables = pages[num_long].repeat(len(where), 1)  # the short ones share theirs
    tables[long] = pages[:num_long]
    q = torch.randn(len(where), 16, 128, device="cuda", dtype=torch.bfloat16)
    tensors, on_gpu = (q, k_cache, v_cache, tables), torch.from_numpy(lens).cuda()

    check_planned_and_plain(torch, tensors, on_gpu)

    steps = -(-lens // step)
    share = steps.sum() // places + 1
    parts = parts_of(torch, tensors, lens)
    assert all(steps[seq] / parts[seq] < 1.2 * share for seq in long)
    assert {parts[seq] for seq in short} == {1}


@pytest.mark.parametrize("num_seqs", [9, 40])  # planned by each CTA itself, and by a kernel
@pytest.mark.usefixtures("as_on_an_h200")
def test_short_ones_follow_each_other_beside_a_long_one(torch, rng, num_seqs):
    """Where each had a slot of its own, most of the GPU would wait for the parts of the long one."""
    longest, heads, slots = 400_000, (20, 2), 66
    lens = rng.integers(300, 1500, num_seqs).astype(np.int32)
    where = int(rng.integers(num_seqs))
    lens[where] = longest
    _, k_cache, v_cache, pages = make_pool(torch, 2, longest, *heads, 128, 16)
    tables = pages[1].repeat(num_seqs, 1)  # the short ones share theirs
    tables[where] = pages[0]
    q = torch.randn(num_seqs, heads[0], 128, device="cuda", dtype=torch.bfloat16)
    tensors, on_gpu = (q, k_cache, v_cache, tables), torch.from_numpy(lens).cuda()
    parts = parts_of(torch, tensors, lens)
    assert parts.pop(where) > slots - (num_seqs - 1) and set(parts.values()) == {1}

    check_planned_and_plain(torch, tensors, on_gpu)


@pytest.mark.parametrize(("num_seqs", "heads"), [(25, (64, 8)), (53, (16, 2))])
@pytest.mark.usefixtures("as_on_an_h200")
def test_long_ones_that_leave_slots_empty_have_rests(torch, rng, num_seqs, heads):
    """What the rests take fits into the slots that would have been empty."""
    longest = 20_000
    lens = longest - rng.integers(0, 200, num_seqs).astype(np.int32)
    tensors, on_gpu = make_long_pool(torch, num_seqs, longest, heads), torch.from_numpy(lens).cuda()
    assert set(parts_of(torch, tensors, lens).values()) == {2}
    check_planned_and_plain(torch, tensors, on_gpu)


def draw_lengths(rng, count):
    """Contexts of a kind: one length, nearly one, a long one or a few among short ones, all different, some empty."""
    longest = int(10 ** rng.uniform(1, 5)) + 1
    longest = min(longest, 4_000_000 // count)
    lens = np.full(count, longest)
    kind = rng.choice(["equal", "nearly", "one", "few", "ragged", "empty"])
    if kind == "nearly":
        lens -= rng.integers(0, longest // 20 + 1, count)
    elif kind in ("one", "few"):
        short = rng.permutation(count)[1 if kind == "one" else count // 8 + 1 :]
        lens[short] = np.maximum(longest // int(rng.choice([4, 30, 300])), 1)
    elif kind in ("ragged", "empty"):
        lens = rng.integers(kind == "ragged", longest + 1, count) * (
            rng.random(count) < (1 if kind == "ragged" else 0.7)
        )
    return lens.astype(np.int32)


def check_units(units, lens, queries, group, steps_of_cta):
    """All steps of every tile in parts, one after the other, and all parts of a head in places of their own."""
    parts_of, places = {}, []
    for unit in units:
        seq = unit["seq"]
        assert (unit["first_query"], unit["num_queries"]) == (sum(queries[:seq]), queries[seq])
        assert (unit["context"], unit["first_slot"]) == (lens[seq], 0)
        parts_of.setdefault((seq, unit["tile"]), []).append(unit)
    tiles = [{tile for its, tile in parts_of if its == seq} for seq in range(len(lens))]
    assert any(
        all(its == set(range(-(-n * group // rows))) for its, n in zip(tiles, queries, strict=True)) for rows in (8, 16)
    )
    ends = {}
    for (seq, _), parts in parts_of.items():
        parts.sort(key=lambda unit: unit["part"])
        assert [unit["part"] for unit in parts] == list(range(len(parts)))
        borders = [0, *(unit["end_step"] for unit in parts)]
        assert [unit["first_step"] for unit in parts] == borders[:-1] and borders == sorted(set(borders))
        assert {(unit["num_parts"], unit["first_part"]) for unit in parts} == {(len(parts), parts[0]["first_part"])}
        assert ends.setdefault(seq, borders[-1]) == borders[-1]
        if len(parts) > 1:
            assert borders[-1] > 3  # what a CTA has room for is not cut
            places += range(parts[0]["first_part"], parts[0]["first_part"] + len(parts))
    assert len(places) == len(set(places)) and set(places) <= set(range(len(places)))
    assert any(all(max(-(-lens[seq] // step), 1) == n for seq, n in ends.items()) for step in steps_of_cta)
    return {len(parts) for parts in parts_of.values()}


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn"])
def test_a_plan_covers_every_key_once(torch, rng, cache_dtype):
    """Read back, for batches of any kind."""
    numbers_of_parts = set()
    for i in range(150):
        kv_heads, group = int(rng.integers(1, 9)) if i else 1, int(rng.integers(1, 17))
        count = int(rng.choice([1, 2, 3, 7, 20, 32, 33, 50, 66, 100, 520, 2000])) if i else 1
        queries = rng.integers(1, 5, count).tolist() if i and rng.random() < 0.3 else [1] * count
        lens = np.maximum(draw_lengths(rng, count), queries if max(queries) > 1 else 0).astype(np.int32)
        if i == 0:
            lens[:] = 300_000  # in as many parts as there may be
        head_dim, page = int(rng.choice([64, 128, 256])), int(rng.choice([16, 64, 256]))
        if max(queries) * group > 16:
            continue  # prefill may take some
        q = torch.zeros(sum(queries), kv_heads * group, head_dim, device="cuda", dtype=torch.bfloat16)
        cache = torch.zeros(1, page, kv_heads, head_dim, device="cuda", dtype=getattr(torch, cache_dtype))
        width = -(-int(lens.max() or 1) // page) * int(rng.choice([1, 1, 8]))
        tables = torch.zeros(count, width, device="cuda", dtype=torch.int32)
        arguments = {}
        if max(queries) > 1:
            starts = torch.tensor([0, *np.cumsum(queries)], device="cuda", dtype=torch.int32)
            arguments = dict(cu_seqlens_q=starts, max_seqlen_q=max(queries))
        units = units_of(torch, (q, cache, cache, tables), lens, **arguments)
        numbers_of_parts |= check_units(units, lens, queries, group, STEPS[cache_dtype][head_dim])
    assert {1, 2, 3} <= numbers_of_parts and max(numbers_of_parts) > 60


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn"])
def test_any_batch_is_right_planned_and_plain(torch, rng, cache_dtype):
    """Lengths of every kind, so that there are parts, rests and whole sequences of all sizes."""
    for _ in range(40):
        kv_heads, count = int(rng.integers(1, 9)), int(rng.choice([1, 2, 5, 9, 20, 32, 33, 60, 130]))
        heads, head_dim = (kv_heads * int(rng.integers(1, 17)), kv_heads), int(rng.choice([64, 128, 256]))
        lens = np.minimum(draw_lengths(rng, count), 400_000 // count)
        tensors = make_pool(torch, count, int(lens.max() or 1), *heads, head_dim, int(rng.choice([16, 64])))
        if cache_dtype != "bfloat16":
            tensors = tensors[0], *(cache.to(getattr(torch, cache_dtype)) for cache in tensors[1:3]), tensors[3]
        check_planned_and_plain(torch, tensors, torch.from_numpy(lens).cuda())


@pytest.mark.parametrize(("head_dim", "kv_heads"), [(64, 8), (128, 8), (128, 3), (128, 32)])
def test_crowded_multiprocessors_over_fp8(torch, rng, head_dim, kv_heads):
    """More sequences than the smallest CTAs have places, up to several rounds of them: one length, and mixed ones. With 32
    KV heads they are few enough for each CTA to plan for itself."""
    places = torch.cuda.get_device_properties(0).multi_processor_count * 4 // kv_heads
    for count in (places, places + 1, places * 5 // 4, places * 3 // 2 + 1, int(rng.integers(places + 1, 5 * places))):
        for lens in np.full(count, 700, np.int32), np.minimum(draw_lengths(rng, count), 300_000 // count):
            tensors = make_pool(torch, count, int(lens.max() or 1), 2 * kv_heads, kv_heads, head_dim, 16)
            caches = (cache.to(torch.float8_e4m3fn) for cache in tensors[1:3])
            check_planned_and_plain(torch, (tensors[0], *caches, tensors[3]), torch.from_numpy(lens).cuda())
