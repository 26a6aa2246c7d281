"""Prefill's list of items, by the code of the GPU on an emulated CTA: any batch, read back and checked, without a GPU."""

import heapq
from itertools import pairwise

import numpy as np
import pytest
from emulated import load, load_fusing, struct_of

COLUMNS = ("signature", "seq", "q_head", "first_token", "num_positions", "first_key", "context_len", "begin", "end",
           "part", "num_parts", "first_slot")  # fmt: skip
Batch = struct_of("num_seqs", "num_tokens", "max_seqlen_q", "num_kv_heads", "group", "head_dim", "max_keys", "min_rows",
                  "max_rows", "window_left", "window_right", "cut_tile", "num_rows", "heads", "positions", "most_parts",
                  "first_bad_kind")  # fmt: skip


@pytest.fixture(scope="module")
def list_on_cpu(tmp_path_factory):
    return load(tmp_path_factory.mktemp("list"), "prefill_list_on_cpu.cpp", "list_on_cpu")


@pytest.fixture(scope="module")
def list_by_fma(tmp_path_factory):
    return load_fusing(tmp_path_factory.mktemp("fma"), "prefill_list_on_cpu.cpp", "list_on_cpu")


def test_the_compiler_does_not_choose_a_cut(list_on_cpu, list_by_fma, rng):
    """A kernel that plans and one that lists its items itself are compiled apart, and cut alike all the same."""
    for _ in range(200):
        batch, starts, lens = draw_chunks(rng) if rng.integers(2) else draw(rng)
        assert items_of(list_on_cpu, batch, starts, lens) == items_of(list_by_fma, batch, starts, lens)


def items_of(list_on_cpu, batch, starts, lens):
    """The rows that are items; behind the last one there are none."""
    rows = np.zeros((1 << 16, len(COLUMNS)), np.int32)
    list_on_cpu(batch, starts, lens, rows, len(rows))
    rows = rows[: batch.num_rows]
    is_item = rows[:, COLUMNS.index("num_positions")] != 0
    count = int(is_item.sum())
    assert is_item[:count].all() and batch.first_bad_kind == 0
    return [dict(zip(COLUMNS, row.tolist(), strict=True)) for row in rows[:count]]


def draw(rng):
    """Prompts, chunks behind many keys and decodes; every other batch has few long ones, which are worth a cut."""
    count, is_long = int(rng.choice([1, 2, 5, 31, 32, 33, 70])), bool(rng.integers(2))
    queries = np.where(rng.random(count) < 0.3, rng.integers(0, 3, count), rng.integers(0, rng.choice([40, 900]), count))
    past = rng.integers(0, rng.choice([1, 300, 3000]), count)
    if is_long:
        past[rng.random(count) < 2 / count] += int(10 ** rng.uniform(3, 5))
    lens = np.maximum(queries + past - (rng.random(count) < 0.1) * 7, 0).astype(np.int32)  # some fewer keys than tokens
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    batch = Batch(count, int(starts[-1]), int(queries.max()), int(rng.integers(1, 9)), int(rng.integers(1, 17)))
    batch.head_dim = int(rng.choice([64, 128, 256]))
    batch.max_keys = int(lens.max()) + int(rng.integers(1, 5000))
    batch.min_rows, batch.max_rows = int(rng.choice([0, 0, 8, 16])), 2**31 - 1
    batch.window_left, batch.window_right = int(rng.choice([-1, -1, 100, 2000])), int(rng.choice([0, 0, -1, 30]))
    batch.cut_tile = int(rng.choice([0, 80 if batch.head_dim == 256 else 128])) if is_long else 0
    return batch, starts, lens


def draw_chunks(rng):
    """One to three chunks behind many keys, more items than CTAs, and prompts beside them that are far shorter."""
    num_chunks, num_short = int(rng.integers(1, 4)), int(rng.integers(0, 30))
    past = int(10 ** rng.uniform(3.7, 5))
    queries = np.concatenate([np.full(num_chunks, rng.integers(300, min(4000, past // 9))), rng.integers(1, 200, num_short)])
    past -= rng.integers(0, past // 20, num_chunks) * rng.integers(0, 2)
    lens = (queries + np.concatenate([past, np.zeros(num_short, int)])).astype(np.int32)
    order = rng.permutation(len(lens))
    queries, lens = queries[order], lens[order]
    starts = np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    batch = Batch(len(lens), int(starts[-1]), int(queries.max()), int(rng.integers(1, 9)), int(rng.integers(1, 17)))
    batch.head_dim, batch.max_keys, batch.max_rows = int(rng.choice([64, 128, 256])), int(lens.max()), 2**31 - 1
    batch.window_left, batch.window_right = int(rng.choice([-1, -1, -1, 3000])), 0
    batch.cut_tile = 80 if batch.head_dim == 256 else 128
    return batch, starts, lens


def keys_of_item(batch, first_key, num_positions, context):
    """Those that some position sees: a position's own key is first_key and its number."""
    begin = max(first_key - batch.window_left, 0) if batch.window_left >= 0 else 0
    last = first_key + num_positions - 1
    end = max(min(context, last + batch.window_right + 1), 0) if batch.window_right >= 0 else context
    return begin, end


def check_parts(batch, parts, whole):
    """Each key is in one part, borders are the tiles'."""
    parts.sort(key=lambda item: item["part"])
    assert [item["part"] for item in parts] == list(range(parts[0]["num_parts"]))
    assert len({item["first_slot"] for item in parts}) == 1
    assert [parts[0]["begin"], parts[-1]["end"]] == list(whole)
    for before, behind in pairwise(parts):
        assert before["begin"] < before["end"] == behind["begin"] < behind["end"]
        assert behind["begin"] % batch.cut_tile == 0


def check_items(batch, starts, lens, items):
    """All tokens of every bundle of heads in one item each, which goes through all keys that they see. Returns the parts."""
    places, parts_of = [], {}
    for item in items:
        if item["part"] >= item["num_parts"]:
            continue  # nobody's: the item has fewer keys than its level says
        parts_of.setdefault((item["seq"], item["q_head"], item["first_token"]), []).append(item)
        if item["num_parts"] > 1:
            places.append(item["first_slot"] + item["part"])
    assert len(places) == len(set(places)) and set(places) <= set(range(batch.most_parts))
    expected = set()
    for seq in range(batch.num_seqs):
        count = int(starts[seq + 1] - starts[seq])
        if not batch.min_rows < count * batch.group <= batch.max_rows:
            continue
        for skipped in range(0, count, batch.positions):
            num_positions, first_key = min(batch.positions, count - skipped), int(lens[seq]) - count + skipped
            whole = keys_of_item(batch, first_key, num_positions, int(lens[seq]))
            for q_head in range(0, batch.num_kv_heads * batch.group, batch.heads):
                key = seq, q_head, int(starts[seq]) + skipped
                expected.add(key)
                for item in parts_of[key]:
                    assert (item["num_positions"], item["first_key"]) == (num_positions, first_key)
                    assert item["context_len"] == lens[seq]
                check_parts(batch, parts_of[key], whole)
    assert parts_of.keys() == expected
    return len(places)


def test_every_list_covers_every_token_and_key_once(list_on_cpu, rng):
    num_cut = num_parts = 0
    for _ in range(250):
        batch, starts, lens = draw(rng)
        if batch.num_tokens == 0:
            continue
        parts = check_items(batch, starts, lens, items_of(list_on_cpu, batch, starts, lens))
        num_cut, num_parts = num_cut + (parts > 0), num_parts + parts
    assert num_cut > 10 and num_parts > 300


def time_of(units, begin=150, leave=0):
    """When the last of 132 CTAs ends, in keys. A unit is (its keys, parts of its item), and each CTA takes one at a time.
    To begin it takes as long as `begin` keys; a part takes `leave` keys more, until its result is left for the merge."""
    ends = [0] * 132
    for keys, num_parts in units:
        heapq.heapreplace(ends, ends[0] + keys + begin + (leave if num_parts > 1 else 0))
    return max(ends)


def unit_of(item):
    return item["end"] - item["begin"], item["num_parts"]


def test_cutting_chunks_beside_short_prompts_takes_no_longer(list_on_cpu, rng):
    """Items of about one length, more than there are CTAs or fewer: the last CTA ends hardly later than if all were whole, and 8 % sooner on average."""
    num_cut, shares = 0, []
    for _ in range(200):
        batch, starts, lens = draw_chunks(rng)
        items = items_of(list_on_cpu, batch, starts, lens)
        check_items(batch, starts, lens, items)
        items = [item for item in items if item["part"] < item["num_parts"]]
        keys_of = {}  # of whole items, in the list's order
        for item in items:
            begin, end = keys_of_item(batch, item["first_key"], item["num_positions"], item["context_len"])
            keys_of[item["seq"], item["q_head"], item["first_token"]] = end - begin
        whole, key_us = [(keys, 1) for keys in keys_of.values()], 5.2e-3 + 5.1e-5 * batch.head_dim
        begin, leave = 1.0 / key_us, 1.8 / key_us  # as measured: csrc/cuda/thresholds.h
        shares.append(time_of(map(unit_of, items), begin, leave) / time_of(whole, begin, leave))
        num_cut += len(items) > len(keys_of)
    assert num_cut > 40 and max(shares) < 1.06 and np.mean(shares) < 0.95, (num_cut, max(shares), np.mean(shares))


def draw_few(rng):
    """Two to four chunks behind so many keys each that their items have very different lengths, and parts pay."""
    count = int(rng.integers(2, 5))
    queries, past = rng.integers(64, 600, count), (10 ** rng.uniform(3.7, 5, count)).astype(int)
    lens, starts = (queries + past).astype(np.int32), np.concatenate([[0], np.cumsum(queries)]).astype(np.int32)
    batch = Batch(count, int(starts[-1]), int(queries.max()), int(rng.integers(1, 9)), int(rng.integers(1, 9)))
    batch.head_dim, batch.max_keys, batch.max_rows = int(rng.choice([64, 128, 256])), int(lens.max()), 2**31 - 1
    batch.window_left, batch.cut_tile = -1, 80 if batch.head_dim == 256 else 128
    return batch, starts, lens


def test_items_of_several_lengths_are_cut_so_that_ctas_end_together(list_on_cpu, rng):
    """The last CTA ends not long after all would, if keys were divided evenly among them: 19 % later on average. In a few
    batches of a thousand it takes twice as long: they have few keys, or one part more than CTAs."""
    shares = []
    for _ in range(200):
        items = [item for item in items_of(list_on_cpu, *draw_few(rng)) if item["part"] < item["num_parts"]]
        units = list(map(unit_of, items))
        shares.append(132 * time_of(units) / sum(keys for keys, _ in units))
    assert np.mean(shares) < 1.23 and sorted(shares)[-5] < 2.3, (np.mean(shares), sorted(shares)[-5:])


L2_BYTES = 50 << 20  # of the emulated GPU


def test_chunks_fit_in_the_cache_and_the_longest_come_first(list_on_cpu, rng):
    """Of every 32 neighbouring sequences. Those whose items are listed at the same time have no more keys, of 16 bits each
    element, than half of the cache holds, or there is only one."""
    num_beyond = 0
    for _ in range(150):
        batch, starts, lens = draw(rng)
        if batch.num_tokens == 0:
            continue
        first, last = {}, {}
        for place, item in enumerate(items_of(list_on_cpu, batch, starts, lens)):
            first.setdefault(item["seq"], place)
            last[item["seq"]] = place

        def levels(seq):
            count = int(starts[seq + 1] - starts[seq])
            return max(int(lens[seq]) - count, 0) // batch.positions + -(-count // batch.positions)

        for one, behind in pairwise(first):
            assert (one // 32, -levels(one)) <= (behind // 32, -levels(behind))
        keys_at_once = L2_BYTES // (2 * 2 * 2 * batch.num_kv_heads * batch.head_dim)
        if batch.max_seqlen_q <= batch.positions and batch.heads == batch.group:
            continue  # every sequence is one item of a KV head: keys are read once
        num_beyond += int(lens[list(first)].sum()) > keys_at_once
        for seq in first:
            others = [each for each in first if first[each] <= first[seq] <= last[each]]
            assert len(others) == 1 or int(lens[others].sum()) <= keys_at_once
    assert num_beyond > 30, num_beyond
