"""BlockManager.resize, explain, export_cache and import_cache: what they leave of the prefix cache, prompt by prompt."""

from __future__ import annotations

import random

import numpy as np
import pytest
from threads import in_threads

from pagedkv import BlockManager, OutOfBlocks

SALTS = [b"", b"a", b"b" * 100]


def draw_prompts(rng: random.Random, count: int, most: int = 40) -> list[tuple[list[int], bytes]]:
    """Many begin alike."""
    stems = [[rng.randrange(9) for _ in range(most)] for _ in range(3)]
    prompts = []
    for _ in range(count):
        stem = rng.choice(stems)[: rng.randint(0, most // 2)]
        prompts.append((stem + [rng.randrange(9) for _ in range(rng.randint(1, most // 2))], rng.choice(SALTS)))
    return prompts


def fill(manager: BlockManager, prompts, first_id: int = 0) -> None:
    """Each computed and gone again."""
    for seq_id, (prompt, salt) in enumerate(prompts, first_id):
        manager.allocate(seq_id, prompt, salt=salt)
        manager.commit(seq_id, len(prompt))
        manager.free(seq_id)
    manager.check()


def hits(manager: BlockManager, prompts) -> list[int]:
    return [manager.match(prompt, salt=salt)[0] for prompt, salt in prompts]


# --- resize


def test_growing_keeps_everything(seed):
    rng = random.Random(seed)
    for _ in range(50):
        size = rng.choice([1, 2, 4, 7])
        manager = BlockManager(rng.randint(45, 90), size, num_host_blocks=rng.choice([0, 40]))
        prompts = draw_prompts(rng, 20)
        fill(manager, prompts)
        manager.allocate(100, prompts[0][0], salt=prompts[0][1])
        before, table, stats = hits(manager, prompts), manager.block_table(100).tolist(), manager.stats()
        more = manager.num_blocks + rng.choice([1, 5, 100, 5000])
        manager.resize(more)
        manager.check()
        after = manager.stats()
        assert manager.num_blocks == more and after["free"] - stats["free"] == more - stats["num_blocks"]
        assert (hits(manager, prompts), manager.block_table(100).tolist()) == (before, table)
        assert {**after, "num_blocks": 0, "free": 0} == {**stats, "num_blocks": 0, "free": 0}
        manager.allocate(101, list(range(1000, 1000 + manager.num_free_blocks * size)))
        assert manager.num_free_blocks == 0
        manager.check()


def test_shrinking_drops_what_lies_behind_the_end(seed):
    """The cache of a prompt ends before the first page that went."""
    rng = random.Random(seed)
    for _ in range(80):
        size = rng.choice([1, 2, 4])
        manager = BlockManager(300, size)
        manager.allocate(-1, [7] * rng.randint(1, 40 * size))  # so that the pages of prompts begin anywhere
        prompts, tables = draw_prompts(rng, 12, 20), []
        for seq_id, (prompt, salt) in enumerate(prompts):
            manager.allocate(seq_id, prompt, salt=salt)
            manager.commit(seq_id, len(prompt))
        tables = [manager.block_table(seq_id).tolist() for seq_id in range(12)]
        living = set(rng.sample(range(12), rng.randint(0, 3)))
        for seq_id in rng.sample(range(12), 12):
            if seq_id not in living:
                manager.free(seq_id)
        if rng.random() < 0.7:
            manager.free(-1)
        used = [page for seq_id in living for page in tables[seq_id]]
        used += manager.block_table(-1).tolist() if -1 in manager else []
        lowest, evictions = max(used, default=-1) + 1, manager.stats()["evictions"]
        size_now = rng.randint(max(lowest, 1), 300)
        cached = manager.num_cached_blocks
        manager.resize(size_now)
        manager.check()
        assert manager.num_blocks == size_now and manager.num_used_blocks == len(set(used))
        assert manager.stats()["evictions"] - evictions == cached - manager.num_cached_blocks
        for (prompt, salt), table in zip(prompts, tables, strict=True):
            kept = next((i for i, page in enumerate(table) if page >= size_now), len(table))
            assert manager.match(prompt, salt=salt)[0] == min(kept, len(prompt) // size) * size
        assert [manager.block_table(seq_id).tolist() for seq_id in sorted(living)] == [tables[i] for i in sorted(living)]


def test_shrinking_below_what_is_used_is_refused():
    manager = BlockManager(100, 4)
    manager.allocate(1, range(40))
    manager.allocate(2, range(100, 140))
    manager.free(1)
    before = manager.stats()
    with pytest.raises(OutOfBlocks, match="num_blocks cannot be 19: 10 pages are in use, the last of them is page 19, so that it must be at least 20"):
        manager.resize(19)
    assert manager.stats() == before
    manager.resize(20)
    manager.free(2)
    manager.resize(1)
    manager.check()
    assert manager.num_blocks == 1
    for value, error, message in [(0, ValueError, "num_blocks is 0 but must be at least 1"), (-3, ValueError, "num_blocks is -3"),
                                  (2**29, ValueError, "below 2\\*\\*31"), (2**70, ValueError, "num_blocks"), ("7", TypeError, "num_blocks")]:  # fmt: skip
        with pytest.raises(error, match=message):
            manager.resize(value)
    assert manager.num_blocks == 1


def test_swapped_sequences_come_back_into_a_pool_of_another_size(seed):
    rng = random.Random(seed)
    for _ in range(30):
        manager = BlockManager(40, 4, num_host_blocks=40)
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 60))]
        manager.allocate(1, prompt)
        manager.commit(1, len(prompt))
        manager.swap_out(1)
        manager.resize(rng.randint(16, 300))
        manager.check()
        manager.swap_in(1)
        manager.check()
        assert manager.token_ids(1).tolist() == prompt and manager.block_table(1).max() < manager.num_blocks


def test_any_order_of_everything(seed):
    """Traffic, resizes and looks at the pool, with every invariant after each."""
    rng = random.Random(seed)
    for _ in range(20):
        manager = BlockManager(rng.randint(5, 40), rng.choice([1, 3, 4]), num_host_blocks=rng.choice([0, 20]))
        prompts, living = draw_prompts(rng, 10), []
        for number in range(120):
            what = rng.randrange(7)
            try:
                if what <= 1:
                    prompt, salt = rng.choice(prompts)
                    manager.allocate(number, prompt, salt=salt)
                    living.append(number)
                elif what == 2 and living:
                    seq_id = rng.choice(living)
                    manager.commit(seq_id, manager.num_tokens(seq_id))
                elif what == 3 and living:
                    manager.free(living.pop(rng.randrange(len(living))))
                elif what == 4 and living:
                    manager.swap_out(rng.choice(living))
                elif what == 5 and living:
                    manager.swap_in(rng.choice(living))
                else:
                    manager.resize(max(1, manager.num_blocks + rng.randint(-10, 10)))
            except (OutOfBlocks, ValueError):
                pass
            manager.check()
            manager._repr_html_()


def test_resizing_beside_other_threads():
    manager = BlockManager(50, 4)

    def work(number: int) -> None:
        rng = random.Random(number)
        for i in range(300):
            try:
                if number == 0:
                    manager.resize(rng.randint(40, 9000))
                else:
                    manager.allocate(number * 1000 + i, [rng.randrange(9) for _ in range(20)])
                    manager._repr_html_(), manager.stats()
                    manager.free(number * 1000 + i)
            except OutOfBlocks:
                pass

    in_threads(work, range(4))
    manager.check()


# --- explain


def test_explain():
    manager = BlockManager(8, 4)
    prompt = list(range(20))

    def explained(tokens=prompt, salt=b""):
        found = manager.explain(tokens, salt=salt)
        return found["hit_tokens"], found["pending_tokens"], found["reason"], found["evictions_since"]

    never = "the next page was never computed, or was evicted long ago"
    short = "the prompt is shorter than a page, and only full pages are cached"
    assert explained() == (0, 0, never, None) and explained([]) == explained([1, 2, 3]) == (0, 0, short, None)
    assert manager.explain(prompt)["num_tokens"] == 20
    manager.allocate(1, prompt)
    assert explained() == (0, 20, "the next page is being computed", None)
    manager.commit(1, 9)
    assert explained() == (8, 12, "the next page is being computed", None)
    manager.commit(1, 20)
    assert explained() == (20, 0, "all full pages are cached", None)
    assert explained([*prompt, 7]) == (20, 0, "all full pages are cached", None)
    assert explained([*prompt, 7, 7, 7, 7]) == (20, 0, never, None)
    assert explained(salt=b"mine") == (0, 0, "the next page is cached under another salt", None)
    assert explained([9] * 8, salt=b"mine") == (0, 0, never, None)
    manager.free(1)
    manager.allocate(2, [50] * 4 * 5)  # takes three free pages and the last two of the chain
    assert explained() == (12, 0, "the next page was evicted", 0)
    manager.free(2)
    manager.allocate(3, [60] * 4 * 2)
    found = explained()
    assert found[:3] == (12, 0, "the next page was evicted") or found[2] == "the next page was evicted"
    manager.free(3)
    manager.resize(2)
    assert explained()[2] == "the next page was evicted"
    assert BlockManager(4, 4, enable_prefix_caching=False).explain(prompt)["reason"] == "prefix caching is off"
    with pytest.raises(ValueError, match="token_ids"):
        manager.explain([-1])
    with pytest.raises(TypeError, match="salt: must be bytes"):
        manager.explain([1], salt="x")


def test_explain_counts_evictions(seed):
    """Beside the manager's own count, in a pool where nothing is forgotten."""
    rng = random.Random(seed)
    manager = BlockManager(64, 4)
    gone = {}
    for number in range(60):
        prompt = [number] * 4
        manager.allocate(number, prompt)
        manager.commit(number, 4)
        manager.free(number)
    for number in range(60, 90):
        before = manager.stats()["evictions"]
        cached = [n for n in range(60) if manager.match([n] * 4)[0]]
        manager.allocate(number, [1000 + number] * 4 * rng.randint(1, 4))
        manager.free(number)
        for n in cached:
            if not manager.match([n] * 4)[0]:
                gone[n] = before, manager.stats()["evictions"]
    total, num_known = manager.stats()["evictions"], 0
    for n, (before, after) in gone.items():
        found = manager.explain([n] * 4)
        if found["evictions_since"] is not None:  # it may have been overwritten by a later one
            num_known += 1
            assert total - after <= found["evictions_since"] < total - before
    assert not gone or num_known >= len(gone) // 4


# --- export and import


def test_what_goes_out_comes_in(seed):
    rng = random.Random(seed)
    for _ in range(60):
        size = rng.choice([1, 2, 4])
        source = BlockManager(rng.randint(90, 200), size)
        prompts = draw_prompts(rng, 15)
        fill(source, prompts)
        source.allocate(500, prompts[3][0], salt=prompts[3][1])  # one that lives, and one that is being computed
        source.allocate(501, [8] * 30, salt=b"c")
        before = source.stats()
        blocks, parents, indices, salts, tokens = source.export_cache()
        assert source.stats() == before and len(set(blocks.tolist())) == len(blocks)
        assert (parents < np.arange(len(parents))).all() and tokens.shape == (len(blocks) * size,)
        target = BlockManager(300, size, hash_key=b"k" * 16)
        placed = target.import_cache(parents, indices, salts, tokens)
        target.check()
        assert (placed >= 0).all() and len(set(placed.tolist())) == len(placed) == target.num_cached_blocks
        assert hits(target, prompts) == hits(source, prompts) and target.match([8] * 30, salt=b"c") == (0, 0)
        moved = dict(zip(blocks.tolist(), placed.tolist(), strict=True))
        for number, (prompt, salt) in enumerate(prompts):  # the same pages, in their new places
            try:
                found = source.allocate(600 + number, prompt, salt=salt)
            except OutOfBlocks:
                continue
            count = min(found, target.allocate(600 + number, prompt, salt=salt)) // size
            here, there = (manager.block_table(600 + number)[:count].tolist() for manager in (source, target))
            assert all(moved.get(a, b) == b for a, b in zip(here, there, strict=True))
            source.free(600 + number), target.free(600 + number)
        assert (target.import_cache(parents, indices, salts, tokens) == -1).all(), "it is there already"
        target.check()


def test_a_small_pool_takes_the_beginnings(seed):
    rng = random.Random(seed)
    for _ in range(40):
        source = BlockManager(100, 2)
        prompts = draw_prompts(rng, 15)
        fill(source, prompts)
        _, parents, indices, salts, tokens = source.export_cache()
        target = BlockManager(rng.randint(2, 30), 2)
        target.allocate(1, [77] * rng.randint(1, 2))
        placed = target.import_cache(parents, indices, salts, tokens)
        target.check()
        assert (placed >= 0).sum() == min(target.num_blocks - 1, len(parents)) == target.num_cached_blocks
        for i in np.flatnonzero(placed >= 0):
            assert parents[i] < 0 or placed[parents[i]] >= 0, "a page without its beginning"
        chains = hits(target, prompts)
        target.allocate(2, [99] * 2)  # evicts one: the end of a chain
        assert sum(a != b for a, b in zip(chains, hits(target, prompts), strict=True)) <= len(prompts)
        reachable = {page for i, page in enumerate(placed.tolist()) if page >= 0}
        assert len(reachable) == (placed >= 0).sum()
        target.check()


BAD = [
    (dict(parents=[0]), ValueError, r"parents\[0\] is 0 but must be -1 or that of a page before it"),
    (dict(parents=[5]), ValueError, r"parents\[0\] is 5"),
    (dict(parents=[-2]), ValueError, "parents: element 0 is -2"),
    (dict(indices=[1]), ValueError, r"salt_indices\[0\] is 1 but there are 1 salts"),
    (dict(indices=[0, 0]), ValueError, "salt_indices has 2 elements but parents has 1"),
    (dict(tokens=[1, 2, 3]), ValueError, "token_ids has 3 elements but parents has 1"),
    (dict(tokens=[1, -2]), ValueError, "token_ids: element 1 is -2"),
    (dict(salts=["x"]), TypeError, "salt: must be bytes"),
    (dict(salts=(b"",)), TypeError, "salts: must be a list"),
    (dict(parents=[-1, 0], indices=[0, 1], salts=[b"", b"x"], tokens=[1, 2, 3, 4]), ValueError, r"salt_indices\[1\] is 1 but its parent has 0"),
]  # fmt: skip


@pytest.mark.parametrize("change, error, message", BAD, ids=[m for _, _, m in BAD])
def test_bad_imports_change_nothing(change, error, message):
    manager = BlockManager(8, 2)
    given = dict(parents=[-1], indices=[0], salts=[b""], tokens=[1, 2]) | change
    with pytest.raises(error, match=message):
        manager.import_cache(given["parents"], given["indices"], given["salts"], given["tokens"])
    manager.check()
    assert manager.num_cached_blocks == 0


def test_a_watermark_follows_the_pool():
    """As a fraction, until it is set in pages."""
    manager = BlockManager(100, 4, watermark=0.5)
    manager.resize(20)
    assert manager.watermark_blocks == 10
    for seq_id in range(10):
        manager.allocate(seq_id, [1])
    with pytest.raises(OutOfBlocks):
        manager.allocate(10, [1])
    manager.resize(40)
    assert manager.watermark_blocks == 20
    manager.watermark_blocks = 3
    manager.resize(30)
    assert manager.watermark_blocks == 3


def test_nothing_to_export():
    manager = BlockManager(8, 2)
    blocks, parents, indices, salts, tokens = manager.export_cache()
    assert [len(each) for each in (blocks, parents, indices, salts, tokens)] == [0] * 5
    assert len(manager.import_cache(parents, indices, salts, tokens)) == 0
    off = BlockManager(8, 2, enable_prefix_caching=False)
    with pytest.raises(ValueError, match="prefix caching is off"):
        off.import_cache([-1], [0], [b""], [1, 2])
