"""BlockManager rule by rule. (test_block_manager_state.py: everything at once against a model.)"""

import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import time

import numpy as np
import pytest

from pagedkv import BlockManager, OutOfBlocks


def serve(manager, seq_id, tokens, **kwargs):
    """A request that is computed and freed; returns its hit tokens."""
    hits = manager.allocate(seq_id, tokens, **kwargs)
    manager.commit(seq_id, len(tokens))
    manager.free(seq_id)
    return hits


def state(manager):
    """All that can be seen of a manager."""
    seqs = [s for s in range(-2, 100) if s in manager]
    return manager.stats(), [
        (s, manager.block_table(s).tolist(), manager.token_ids(s).tolist(), manager.num_computed(s)) for s in seqs
    ]


# --- prefix hits


def test_hits_are_whole_computed_pages():
    manager = BlockManager(16, 4)
    assert manager.allocate(1, range(10)) == 0
    assert manager.match(range(10)) == (0, 8)  # sequence 1 is computing them
    manager.commit(1, 6)
    assert manager.match(range(10)) == (4, 4)
    manager.commit(1, 10)
    assert manager.match(range(10)) == (8, 0)  # the third page is not full
    assert manager.allocate(2, range(12)) == 8 and manager.num_computed(2) == 8
    assert manager.block_table(1)[:2].tolist() == manager.block_table(2)[:2].tolist()
    assert manager.stats()["shared"] == 2
    manager.check()


def test_a_fully_cached_prompt_hits_entirely_and_is_not_stored_again():
    manager = BlockManager(16, 4)
    manager.allocate(1, range(8))
    manager.commit(1, 8)
    assert manager.allocate(2, range(8)) == 8
    step = manager.prepare([2], [7], [1])  # its last token, for the logits
    assert step.slot_mapping.tolist() == [-1]
    assert step.positions.tolist() == [7] and step.context_lens.tolist() == [8]
    assert step.block_tables.tolist() == [manager.block_table(1).tolist()]


def test_cached_pages_outlive_their_sequence_and_lose_the_end_of_a_chain_first():
    manager = BlockManager(4, 2)
    serve(manager, 1, [1, 2, 3, 4, 5, 6, 7, 8])
    assert manager.stats()["cached"] == 4
    manager.allocate(2, [9])  # evicts one page
    assert manager.stats()["evictions"] == 1
    assert manager.match([1, 2, 3, 4, 5, 6, 7, 8]) == (6, 0)
    manager.check()


def test_least_recently_used_goes_first():
    manager = BlockManager(3, 1)
    for token in (1, 2, 3):
        serve(manager, 0, [token])
    serve(manager, 0, [1])  # used again
    manager.allocate(5, [4])
    assert [manager.match([token])[0] for token in (1, 2, 3)] == [1, 0, 1]


def test_freed_pages_are_taken_before_cached_ones():
    manager = BlockManager(4, 2)
    serve(manager, 0, [1, 2])
    manager.allocate(1, [3])
    manager.free(1)
    manager.allocate(2, [4, 5, 6, 7, 8])
    assert manager.stats()["evictions"] == 0 and manager.match([1, 2]) == (2, 0)


def test_hits_of_a_batch_are_not_evicted_by_it():
    manager = BlockManager(4, 2)
    serve(manager, 0, [1, 2])
    serve(manager, 0, [3, 4])
    hits = manager.allocate_batch([1, 2, 3], [[5, 6, 7, 8], [1, 2], [3, 4]])
    assert hits.tolist() == [0, 2, 2] and hits.dtype == np.int64
    manager.check()


def test_pages_that_a_batch_revives_are_counted_once():
    manager = BlockManager(3, 2)
    serve(manager, 0, [1, 2])
    assert manager.allocate_batch([1, 2, 3], [[1, 2], [1, 2, 3], [1, 2, 4]]).tolist() == [2, 2, 2]
    assert manager.stats()["used"] == 3


def test_generated_tokens_are_cached_too():
    manager = BlockManager(8, 2)
    manager.allocate(1, [1])
    for token in (2, 3, 4):
        manager.append(1, token)
    manager.commit(1, 4)
    assert manager.match([1, 2, 3, 4, 5]) == (4, 0)


def test_without_prefix_caching_nothing_is_found():
    manager = BlockManager(8, 2, enable_prefix_caching=False)
    assert serve(manager, 1, [1, 2, 3, 4]) == serve(manager, 1, [1, 2, 3, 4]) == 0
    assert manager.stats()["cached"] == 0 and manager.stats()["free"] == 8


def test_reset_forgets_everything_and_stale_sequences_are_never_cached():
    manager = BlockManager(8, 2)
    serve(manager, 1, [1, 2])
    manager.allocate(2, [3, 4, 5])
    manager.commit(2, 3)
    assert manager.reset_prefix_cache() == 2
    manager.append(2, 6)
    manager.commit(2, 4)
    assert manager.match([1, 2]) == manager.match([3, 4, 5, 6]) == (0, 0)
    manager.free(2)
    assert manager.stats()["free"] == 8
    assert serve(manager, 3, [1, 2]) == 0 and serve(manager, 3, [1, 2]) == 2
    manager.check()


# --- COMPAT.md defect 1: collisions. With hash_bits=0 every page has the same hash.


@pytest.mark.parametrize("hash_bits", [64, 0, 1])
def test_colliding_prompts_never_share(hash_bits):
    manager = BlockManager(64, 2, _hash_bits=hash_bits)
    assert serve(manager, 1, [1, 2, 3, 4]) == 0
    assert serve(manager, 2, [5, 6, 3, 4]) == 0  # the second page has equal tokens and other ancestors
    assert serve(manager, 3, [3, 4, 1, 2]) == 0
    assert serve(manager, 4, [1, 2, 3, 4]) == 4
    assert serve(manager, 5, [5, 6, 3, 5]) == 2
    manager.check()


def test_results_do_not_depend_on_the_hash(rng):
    """A random load of overlapping prompts on managers that hash well, badly and not at all."""
    managers = [BlockManager(40, 2, hash_key=bytes(16))] + [BlockManager(40, 2, _hash_bits=bits) for bits in (3, 0)]
    living = []
    for seq_id in range(400):
        tokens = rng.integers(0, 2, rng.integers(1, 14)).astype(np.int32)
        salt = bytes(rng.integers(0, 2, rng.integers(0, 3), dtype=np.uint8))
        results = []
        for manager in managers:
            try:
                hits = manager.allocate(seq_id, tokens, salt=salt)
                manager.commit(seq_id, max(len(tokens) - 1, hits))
            except OutOfBlocks:
                hits = None
            results.append((hits, manager.stats(), manager.match(tokens, salt=salt)))
        assert results[0] == results[1] == results[2]
        if results[0][0] is not None:
            living.append(seq_id)
        while len(living) > 4:
            victim = living.pop(rng.integers(len(living)))
            for manager in managers:
                manager.free(victim)
    assert managers[0].stats()["hit_tokens"] and managers[0].stats()["evictions"]
    for manager in managers:
        manager.check()


def test_salts_separate_tenants():
    manager = BlockManager(64, 2)
    prompt = [1, 2, 3, 4]
    assert serve(manager, 1, prompt, salt=b"tenant 1") == 0
    assert serve(manager, 2, prompt, salt=b"tenant 2") == 0
    assert serve(manager, 3, prompt) == 0
    assert serve(manager, 4, prompt, salt=b"tenant 1") == 4
    assert manager.match(prompt, salt=b"tenant 3") == (0, 0)
    assert manager.match(prompt, salt=b"tenant") == (0, 0)
    for i in range(1000):  # unused salts leave nothing behind
        serve(manager, 5, prompt, salt=str(i).encode())
    manager.check()


# --- COMPAT.md defect 6: equal prompts in one step


def test_of_two_equal_copies_the_living_one_is_still_found():
    manager = BlockManager(5, 2)
    assert manager.allocate_batch([1, 2], [[1, 2, 3, 4], [1, 2, 3, 4]]).tolist() == [0, 0]
    manager.commit_batch([1, 2], [4, 4])
    assert manager.stats()["used"] == 4 and manager.stats()["shared"] == 0
    first = set(manager.block_table(1).tolist())
    manager.free(1)
    manager.allocate(3, [9, 9, 9, 9, 9, 9])  # takes the free page and evicts the copy of sequence 1
    assert first < set(manager.block_table(3).tolist())
    assert manager.match([1, 2, 3, 4]) == (4, 0)
    manager.free(3)
    assert manager.allocate(4, [1, 2, 3, 4]) == 4
    assert manager.block_table(4).tolist() == manager.block_table(2).tolist()
    manager.check()


def test_children_stay_reachable_through_a_twin_of_their_parent():
    manager = BlockManager(6, 2)
    manager.allocate_batch([1, 2], [[1, 2], [1, 2, 3, 4]])
    manager.commit_batch([1, 2], [2, 4])
    manager.free(1)
    manager.allocate(3, [7] * 8)  # evicts sequence 1's copy of the first page
    assert manager.stats()["evictions"] == 1
    assert manager.match([1, 2, 3, 4]) == (4, 0)


def test_pending_pages_are_found_by_match_only_and_vanish_with_their_sequence():
    manager = BlockManager(8, 2)
    manager.allocate(1, [1, 2, 3, 4])
    assert manager.match([1, 2, 3, 4]) == (0, 4)
    assert manager.allocate(2, [1, 2, 3, 4]) == 0
    manager.free(1)
    assert manager.match([1, 2, 3, 4]) == (0, 4)
    manager.truncate(2, 3)  # nobody computes the second page any more
    assert manager.match([1, 2, 3, 4]) == (0, 2)
    manager.free(2)
    assert manager.match([1, 2, 3, 4]) == (0, 0)
    assert manager.stats()["free"] == 8


def test_a_pending_page_that_all_sharers_were_truncated_into_is_not_promised():
    manager = BlockManager(8, 4)
    manager.allocate(1, [1, 2, 3, 4])
    manager.fork(1, 2)
    manager.truncate(1, 2)
    assert manager.match([1, 2, 3, 4]) == (0, 4)  # sequence 2 still computes it
    manager.truncate(2, 3)
    assert manager.match([1, 2, 3, 4]) == (0, 0)
    manager.check()


# --- COMPAT.md defect 11: costs


def best(function, repeats=5):
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return min(times)


def test_taking_a_page_from_the_middle_of_the_cached_list_is_not_linear():
    def hit_time(num_blocks):
        manager = BlockManager(num_blocks, 1)
        for token in range(num_blocks):
            serve(manager, 0, [token])

        def hits():
            for token in range(num_blocks // 2, num_blocks // 2 + 1000):
                serve(manager, 0, [token])

        return best(hits)

    assert hit_time(64_000) < 12 * hit_time(2_000)  # linear would be 32 times; caches account for some


def test_a_refused_prompt_is_not_hashed_to_its_end():
    prompt = np.arange(1_000_000, dtype=np.int32)
    small, large = BlockManager(100, 16), BlockManager(70_000, 16)
    small.allocate(1, prompt[:1600])

    def refused():
        with pytest.raises(OutOfBlocks):
            small.allocate(2, prompt)

    def accepted():
        large.allocate(2, prompt)
        large.free(2)

    assert best(refused) < 0.5 * best(accepted)  # what is left is the look at every token id


def test_watermark_keeps_room_for_those_who_run():
    manager = BlockManager(10, 2, watermark=0.2)
    manager.allocate(1, [1] * 8)
    assert manager.can_allocate(8) and not manager.can_allocate(9)
    assert not manager.can_allocate([2] * 9)
    with pytest.raises(OutOfBlocks):
        manager.allocate(2, [2] * 9)
    manager.allocate(2, [2] * 8)
    manager.append(1, [1] * 4)  # growth may use what is kept back
    manager.free_batch([1, 2])
    assert manager.can_allocate(20)  # who is alone may have all, or a long prompt would wait for ever
    manager.allocate(3, [3] * 20)


def test_the_watermark_can_follow_the_load():
    manager = BlockManager(10, 2, watermark=0.2)
    assert manager.watermark_blocks == 2
    manager.allocate(1, [1] * 4)
    manager.watermark_blocks = 5
    assert manager.can_allocate(6) and not manager.can_allocate(7)
    with pytest.raises(ValueError, match="watermark_blocks is -1"):
        manager.watermark_blocks = -1
    assert manager.watermark_blocks == 5


# --- growing, copy on write


def test_fork_shares_and_the_first_writer_gets_a_copy():
    manager = BlockManager(8, 4)
    manager.allocate(1, [1, 2, 3, 4, 5, 6])
    manager.commit(1, 6)
    manager.fork(1, 2)
    assert manager.num_computed(2) == 6 and manager.stats()["shared"] == 2
    page = manager.block_table(1)[1]
    pairs = manager.append(2, 7)
    assert pairs.dtype == np.int32 and pairs.tolist() == [[page, manager.block_table(2)[1]]]
    assert manager.append(1, 8).shape == (0, 2)  # the last owner writes in place
    assert manager.token_ids(1).tolist() == [1, 2, 3, 4, 5, 6, 8]
    assert manager.token_ids(2).tolist() == [1, 2, 3, 4, 5, 6, 7]
    manager.check()


def test_a_page_that_a_sibling_has_computed_is_not_stored_again():
    manager = BlockManager(8, 4)
    manager.allocate(1, [1, 2, 3, 4, 5])
    manager.fork(1, 2)
    manager.commit(1, 4)  # page 0 may be hit and read from now on
    table = manager.block_table(2).tolist()
    step = manager.prepare([2], [0], [5])
    assert manager.num_computed(2) == 0
    assert step.slot_mapping.tolist() == [-1] * 4 + [table[1] * 4]


def test_sharers_that_grow_in_one_batch_need_one_copy_less_than_they_are():
    manager = BlockManager(3, 4)
    manager.allocate(1, [1, 2])
    manager.fork(1, 2)
    manager.fork(1, 3)
    assert len(manager.append_batch([1, 2, 3], [7, 8, 9])) == 2
    assert [manager.token_ids(s).tolist() for s in (1, 2, 3)] == [[1, 2, 7], [1, 2, 8], [1, 2, 9]]
    assert manager.num_free_blocks == 0


def test_a_page_in_the_index_leaves_it_before_its_owner_writes():
    manager = BlockManager(8, 4)
    manager.allocate(1, [1, 2, 3, 4])
    manager.commit(1, 4)
    manager.truncate(1, 2)
    assert manager.match([1, 2, 3, 4]) == (4, 0)  # the KV is still there
    assert manager.append(1, [9]).shape == (0, 2)
    assert manager.match([1, 2, 3, 4]) == (0, 0)
    manager.append(1, [9])
    manager.commit(1, 4)
    assert manager.match([1, 2, 9, 9]) == (4, 0)
    manager.check()


def test_a_shared_page_in_the_index_is_copied_before_it_is_written():
    manager = BlockManager(8, 4)
    manager.allocate(1, [1, 2, 3, 4])
    manager.commit(1, 4)
    manager.allocate(2, [1, 2, 3, 4])
    manager.truncate(2, 3)
    assert len(manager.append(2, 9)) == 1
    assert manager.token_ids(1).tolist() == [1, 2, 3, 4] and manager.match([1, 2, 3, 4]) == (4, 0)


def test_reserve_makes_room_for_tokens_that_are_not_known_yet():
    manager = BlockManager(8, 4)
    manager.allocate(1, [1, 2, 3])
    manager.commit(1, 3)
    assert manager.reserve(1, 6).shape == (0, 2)
    table = manager.block_table(1).tolist()
    step = manager.prepare([1], [3], [2])
    assert step.slot_mapping.tolist() == [table[0] * 4 + 3, table[1] * 4]
    manager.commit(1, 5)  # computed before the ids are known
    assert manager.num_tokens(1) == 3 and manager.match([1, 2, 3, 4]) == (0, 0)
    manager.append(1, [4])
    assert manager.match([1, 2, 3, 4]) == (4, 0)
    assert manager.block_table(1).tolist() == table
    with pytest.raises(ValueError, match="has room for 6"):
        manager.commit(1, 7)
    manager.truncate(1, 4)  # gives the rest of the room back
    assert len(manager.block_table(1)) == 1


def test_reserve_copies_a_shared_page_and_fork_does_not_share_reserved_room():
    manager = BlockManager(8, 4)
    manager.allocate(1, [1, 2, 3])
    manager.reserve(1, 9)
    manager.fork(1, 2)
    assert len(manager.block_table(2)) == 1
    assert len(manager.reserve(2, 4)) == 1
    assert len(manager.reserve(1, 4)) == 0
    manager.check()


def test_truncate_lowers_what_is_computed():
    manager = BlockManager(8, 2)
    manager.allocate(1, [1, 2, 3, 4, 5])
    manager.commit(1, 5)
    manager.truncate(1, 3)
    assert manager.num_computed(1) == 3 and len(manager.block_table(1)) == 2
    manager.truncate(1, 0)
    assert manager.num_tokens(1) == 0 and manager.stats()["used"] == 0
    manager.append(1, [1, 2])
    assert manager.num_computed(1) == 0
    manager.check()


def test_an_empty_sequence_is_a_sequence():
    manager = BlockManager(2, 4)
    assert manager.allocate(1, []) == 0
    manager.fork(1, 2)
    assert manager.block_table(1).shape == (0,) and manager.token_ids(2).shape == (0,)
    step = manager.prepare([1, 2], [0, 0], [0, 0])
    assert step.slot_mapping.shape == (0,) and step.block_tables.shape == (2, 0)
    assert step.cu_seqlens_q.tolist() == [0, 0, 0]
    manager.append(1, [])
    manager.free_batch([1, 2])
    manager.free_batch([])
    assert manager.prepare([], [], []).cu_seqlens_q.tolist() == [0]


# --- swap


def test_swap_moves_a_sequence_to_the_host_and_back():
    manager = BlockManager(4, 2, num_host_blocks=4)
    manager.allocate(1, [1, 2, 3, 4, 5])
    manager.commit(1, 5)
    table = manager.block_table(1).tolist()
    pairs = manager.swap_out(1)
    assert pairs[:, 0].tolist() == table and manager.stats()["host_used"] == 3
    assert manager.token_ids(1).tolist() == [1, 2, 3, 4, 5]
    manager.allocate(2, [9] * 6)  # evicts the end of what the prefix cache kept
    manager.free(2)
    back = manager.swap_in(1)
    assert back[:, 0].tolist() == pairs[1:, 1].tolist()  # the first page was still cached: no copy
    assert back[:, 1].tolist() == manager.block_table(1)[1:].tolist()
    assert manager.num_computed(1) == 5 and manager.stats()["host_used"] == 0
    manager.check()


def test_only_pages_with_kv_are_copied_by_a_swap():
    manager = BlockManager(4, 2, num_host_blocks=4)
    manager.allocate(1, [1, 2, 3, 4, 5, 6])
    manager.commit(1, 3)
    assert len(manager.swap_out(1)) == 2
    assert manager.match([1, 2, 3, 4]) == (2, 0)
    assert len(manager.swap_in(1)) == 1  # page 0 is in the cache, page 2 holds no KV
    manager.check()


def test_a_swapped_sequence_can_only_be_looked_at_and_freed():
    manager = BlockManager(4, 2, num_host_blocks=2)
    manager.allocate(1, [1, 2, 3])
    manager.swap_out(1)
    before = manager.stats()
    calls = [
        lambda: manager.append(1, 4), lambda: manager.reserve(1, 4), lambda: manager.commit(1, 3),
        lambda: manager.fork(1, 2), lambda: manager.truncate(1, 1), lambda: manager.swap_out(1),
        lambda: manager.block_table(1), lambda: manager.prepare([1], [0], [1]),
    ]  # fmt: skip
    for call in calls:
        with pytest.raises(ValueError, match="sequence 1 is swapped out: swap_in it first"):
            call()
    assert manager.num_tokens(1) == 3 and manager.stats() == before
    manager.free(1)
    assert manager.stats()["host_free"] == 2


def test_swap_without_room_changes_nothing():
    manager = BlockManager(4, 2, num_host_blocks=1)
    manager.allocate(1, [1, 2, 3])
    before = state(manager)
    with pytest.raises(OutOfBlocks, match="sequence 1 needs 2 host pages but 1 of 1 are free"):
        manager.swap_out(1)
    assert state(manager) == before
    manager.truncate(1, 2)
    manager.swap_out(1)
    manager.allocate(2, [5] * 8)
    before = manager.stats()
    with pytest.raises(OutOfBlocks):
        manager.swap_in(1)
    assert manager.stats() == before


# --- prepare


def test_prepare_fills_a_ragged_batch():
    manager = BlockManager(16, 4)
    manager.allocate_batch([10, -20], [range(9), [5, 6]])
    manager.commit(10, 4)
    step = manager.prepare([10, -20], [4, 0], [5, 2])
    a, b = manager.block_table(10).tolist(), manager.block_table(-20).tolist()
    assert step.slot_mapping.tolist() == [a[1] * 4 + i for i in range(4)] + [a[2] * 4, b[0] * 4, b[0] * 4 + 1]
    assert step.positions.tolist() == [4, 5, 6, 7, 8, 0, 1]
    assert step.context_lens.tolist() == [9, 2]
    assert step.cu_seqlens_q.tolist() == [0, 5, 7]
    assert step.block_tables.tolist() == [a, b + [-1, -1]]
    assert step.max_seqlen_q == 5
    assert all(array.dtype == np.int32 and array.flags.c_contiguous for array in step[:5])


def test_prepare_needs_no_more_table_than_the_context():
    manager = BlockManager(16, 4)
    manager.allocate(1, range(16))
    assert manager.prepare([1], [0], [5]).block_tables.shape == (1, 2)
    assert manager.prepare([1], [0], [5], max_blocks=7).block_tables.shape == (1, 7)


def test_prepare_keeps_its_memory_and_views_outlive_the_manager():
    manager = BlockManager(64, 4)
    manager.allocate_batch(range(4), [range(8)] * 4)
    hints = dict(max_tokens=32, max_seqs=4, max_blocks=4)
    first = manager.prepare([0], [0], [8], **hints)
    second = manager.prepare([0, 1, 2, 3], [0] * 4, [8] * 4, **hints)
    assert [a.ctypes.data for a in first[:5]] == [a.ctypes.data for a in second[:5]]
    expected = [array.copy() for array in second[:5]]
    manager.append_batch(range(4), [range(40)] * 4)
    third = manager.prepare([0, 1, 2, 3], [8] * 4, [40] * 4)  # needs more: new memory, the old one lives on
    assert third.slot_mapping.size == 160
    del manager, third, first
    gc.collect()
    for array, wanted in zip(second[:5], expected):
        assert np.array_equal(array, wanted)


# --- input forms


@pytest.mark.parametrize(
    "make",
    [list, tuple, lambda t: np.array(t, np.int32), lambda t: np.array(t, np.int64),
     lambda t: np.array(t * 2, np.int32)[: len(t)], lambda t: np.repeat(np.array(t, np.int64), 2)[::2],
     lambda t: [np.int64(x) for x in t]],
)  # fmt: skip
def test_token_ids_come_in_many_forms(make):
    manager = BlockManager(8, 2)
    tokens = [3, 1, 4, 1, 2**31 - 1]
    manager.allocate(1, make(tokens))
    manager.append(1, make(tokens))
    assert manager.token_ids(1).tolist() == tokens * 2
    assert manager.match(make(tokens))[1] == 4
    manager.append(1, np.int64(7))
    assert manager.token_ids(1)[-1] == 7


def test_torch_token_ids():
    torch = pytest.importorskip("torch")
    manager = BlockManager(8, 2)
    manager.allocate(1, torch.tensor([1, 2, 3]))
    manager.append_batch(torch.tensor([1]), torch.tensor([4], dtype=torch.int32))
    assert manager.token_ids(1).tolist() == [1, 2, 3, 4]


def test_sequence_ids_are_any_int64():
    manager = BlockManager(8, 2)
    ids = [-(2**63), 2**63 - 1, 0, -1]
    manager.allocate_batch(ids, [[1]] * 4)
    assert all(i in manager for i in ids) and len(manager) == 4
    manager.free_batch(ids)


# --- wrong use: (call, exception, message)

BAD_CALLS = [
    (lambda m: m.free(7), KeyError, "there is no sequence 7"),
    (lambda m: m.append(7, 1), KeyError, "there is no sequence 7"),
    (lambda m: m.fork(7, 8), KeyError, "there is no sequence 7"),
    (lambda m: m.block_table(7), KeyError, "there is no sequence 7"),
    (lambda m: m.token_ids(7), KeyError, "there is no sequence 7"),
    (lambda m: m.num_tokens(7), KeyError, "there is no sequence 7"),
    (lambda m: m.prepare([7], [0], [0]), KeyError, "there is no sequence 7"),
    (lambda m: m.free_batch([1, 7]), KeyError, "there is no sequence 7"),
    (lambda m: m.free_batch([1, 1]), ValueError, "seq_ids: 1 is there twice"),
    (lambda m: m.allocate(1, [1]), ValueError, "sequence 1 already exists: free it first"),
    (lambda m: m.allocate_batch([3, 3], [[1], [1]]), ValueError, "sequence 3 already exists"),
    (lambda m: m.fork(1, 2), ValueError, "sequence 2 already exists"),
    (lambda m: m.fork(1, 1), ValueError, "sequence 1 already exists"),
    (lambda m: m.allocate(3, [1, -1]), ValueError, r"token_ids: element 1 is -1 but must be in \[0, 2147483647\]"),
    (lambda m: m.allocate(3, [2**31]), ValueError, "token_ids: element 0 is 2147483648"),
    (lambda m: m.allocate(3, [2**70]), ValueError, "token_ids: element 0"),
    (lambda m: m.allocate(3, np.array([-5])), ValueError, "token_ids: element 0 is -5"),
    (lambda m: m.allocate(3, np.array([[1]])), ValueError, "token_ids: has 2 dimensions but must have 1"),
    (lambda m: m.allocate(3, np.array([1.0])), TypeError, "token_ids: dtype is float64|token_ids"),
    (lambda m: m.allocate(3, ["x"]), TypeError, "token_ids: element 0"),
    (lambda m: m.allocate(3, 5), TypeError, "token_ids"),
    (lambda m: m.append(1, -1), ValueError, r"token_ids: -1 is out of range 0\.\.2\*\*31-1"),
    (lambda m: m.append(1, 2**31), ValueError, "token_ids: 2147483648 is out of range"),
    (lambda m: m.append(1, [3, -3]), ValueError, "token_ids: element 1 is -3"),
    (lambda m: m.append_batch([1, 2], [1]), ValueError, "token_ids: has 1 elements but seq_ids has 2"),
    (lambda m: m.append_batch([1, 2], [[1], [-1]]), ValueError, "token_ids: element 0 is -1"),
    (lambda m: m.append_batch([1, 1], [1, 1]), ValueError, "seq_ids: 1 is there twice"),
    (lambda m: m.allocate(3, [1], salt="x"), TypeError, "salt: must be bytes, not 'str'"),
    (lambda m: m.match([1], salt=None), TypeError, "salt: must be bytes, not 'NoneType'"),
    (lambda m: m.commit(1, 3), ValueError, "num_computed_tokens is 3 but sequence 1 has 4 computed already"),
    (lambda m: m.commit(1, -1), ValueError, "num_computed_tokens is -1"),
    (lambda m: m.commit(1, 7), ValueError, "num_computed_tokens is 7 but sequence 1 has room for 6"),
    (lambda m: m.commit_batch([1], [1, 2]), ValueError, "num_computed_tokens: has 2 elements but seq_ids has 1"),
    (lambda m: m.truncate(1, 7), ValueError, "num_tokens is 7 but sequence 1 has 6 tokens"),
    (lambda m: m.truncate(1, -1), ValueError, "num_tokens is -1"),
    (lambda m: m.reserve(1, -1), ValueError, "num_tokens: -1 is out of range"),
    (lambda m: m.reserve(1, 2**40), ValueError, "num_tokens: 1099511627776 is out of range"),
    (lambda m: m.reserve(1, 2**31 - 1), OutOfBlocks, r"\d+ more pages are needed but 5 of 8 can be given"),
    (lambda m: m.allocate(3, range(5, 26)), OutOfBlocks, "6 more pages are needed but 5 of 8 can be given"),
    (lambda m: m.allocate_batch([3, 4], [range(5, 16), range(5, 16)]), OutOfBlocks, "6 more pages are needed"),
    (lambda m: m.append_batch([1, 2], [[1] * 15, [2] * 15]), OutOfBlocks, "8 more pages are needed"),
    (lambda m: m.can_allocate(-1), ValueError, "the number of tokens is -1"),
    (lambda m: m.prepare([1], [-1], [1]), ValueError, "query_starts: -1 is negative"),
    (lambda m: m.prepare([1], [0], [-1]), ValueError, "query_lens: -1 is negative"),
    (lambda m: m.prepare([1], [4], [3]), ValueError, "sequence 1: query of 3 from 4 ends behind its room for 6 tokens"),
    (lambda m: m.prepare([1], [2**62], [2**62]), ValueError, "ends behind its room"),
    (lambda m: m.prepare([1], [0], []), ValueError, "query_lens: has 0 elements but seq_ids has 1"),
    (lambda m: m.prepare([1], [0], [1], max_seqs=-1), ValueError, "max_seqs is -1"),
    (lambda m: m.swap_in(1), ValueError, "sequence 1 is not swapped out"),
    (lambda m: m.swap_out(1), OutOfBlocks, "sequence 1 needs 2 host pages but 0 of 0 are free"),
    (lambda m: m.allocate("1", [1]), TypeError, "seq_id: must be an int, not 'str'"),
    (lambda m: m.allocate(2**63, [1]), ValueError, "seq_id: 9223372036854775808 does not fit in 64 bits"),
    (lambda m: m.allocate(1), TypeError, "missing 1 required positional argument: 'token_ids'"),
    (lambda m: m.allocate(3, [1], tenant=b""), TypeError, "unexpected keyword argument 'tenant'"),
    (lambda m: "x" in m, TypeError, "seq_id: must be an int, not 'str'"),
    (lambda m: BlockManager(0, 4), ValueError, "num_blocks is 0 but must be at least 1"),
    (lambda m: BlockManager(4, 0), ValueError, "block_size is 0 but must be at least 1"),
    (lambda m: BlockManager(2**20, 2**12), ValueError, "slots are int32"),
    (lambda m: BlockManager(4, 4, num_host_blocks=-1), ValueError, "num_host_blocks is -1"),
    (lambda m: BlockManager(4, 4, watermark=1.0), ValueError, "watermark is 1 but must be at least 0 and less than 1"),
    (lambda m: BlockManager(4, 4, watermark=float("nan")), ValueError, "watermark is nan"),
    (lambda m: BlockManager(4, 4, hash_key=b"short"), ValueError, "hash_key: has 5 bytes but must have 16"),
    (lambda m: BlockManager(4, 4, hash_key="x" * 16), TypeError, "hash_key: must be bytes or None"),
]  # fmt: skip


@pytest.mark.parametrize("number", range(len(BAD_CALLS)))
def test_wrong_use_says_what_is_wrong_and_changes_nothing(number):
    call, exception, message = BAD_CALLS[number]
    manager = BlockManager(8, 4)
    manager.allocate(1, range(6))
    manager.commit(1, 4)
    manager.fork(1, 2)
    manager.append(2, 9)  # 3 pages used, one of them shared
    before = state(manager)
    with pytest.raises(exception, match=message):
        call(manager)
    assert state(manager) == before
    manager.check()


def test_out_of_blocks_is_a_memory_error():
    assert issubclass(OutOfBlocks, MemoryError)


# --- looking


def test_stats_add_up():
    manager = BlockManager(10, 4, num_host_blocks=3)
    manager.allocate(1, range(10))
    manager.commit(1, 10)
    manager.fork(1, 2)
    serve(manager, 3, [7] * 4)
    manager.allocate(4, [8])
    manager.reserve(4, 9)
    assert manager.stats() == {
        "num_blocks": 10, "block_size": 4, "num_seqs": 3, "used": 6, "cached": 1, "free": 3, "shared": 3, "pending": 0,
        "host_used": 0, "host_free": 3, "waste_tokens": 2 + 11, "hit_tokens": 0, "lookup_tokens": 15, "evictions": 0,
        "copies": 0,
    }  # fmt: skip
    assert (manager.num_blocks, manager.block_size, manager.num_host_blocks) == (10, 4, 3)
    assert (manager.num_used_blocks, manager.num_free_blocks, manager.num_cached_blocks) == (6, 4, 1)
    assert manager.num_free_host_blocks == 3 and len(manager) == 3


def test_text_and_picture():
    manager = BlockManager(10, 4)
    manager.allocate(1, range(8))
    manager.commit(1, 8)
    manager.fork(1, 2)
    serve(manager, 3, [9] * 4)
    text = str(manager)
    assert text == repr(manager) and 2 <= len(text.splitlines()) <= 4
    assert "10 pages of 4 tokens, 2 sequences" in text and "2 used (2 shared), 1 cached, 7 free" in text
    html = manager._repr_html_()
    assert text in html and html.count("<svg") == html.count("</svg>") == 1
    widths = [int(width) + 1 for width in re.findall(r"<rect [^>]*width='(\d+)'", html)]
    assert sum(widths) == 10 * 9  # ten cells, in runs of one colour
    large = BlockManager(1_000_000, 16)._repr_html_()
    assert "one cell: 500 pages" in large and len(large) < 200_000


def test_every_method_has_a_docstring_and_a_signature():
    import inspect

    for name in dir(BlockManager):
        method = getattr(BlockManager, name)
        if not name.startswith("_") and callable(method):
            assert method.__doc__ and inspect.signature(method), name
    assert list(inspect.signature(BlockManager.allocate).parameters) == ["self", "seq_id", "token_ids", "salt"]


# --- threads, memory


def test_calls_from_many_threads_are_atomic():
    manager = BlockManager(4096, 4)
    errors = []

    def work(first):
        try:
            for i in range(300):
                ids = [first + i, first + i + 100_000]
                manager.allocate_batch(ids, [range(i % 50), range(10)])
                manager.append_batch(ids, [1, 2])
                manager.prepare(ids, [0, 0], [1, 1])
                manager.fork(ids[0], -ids[0] - 1)
                manager.append(ids[0], [3] * 5)
                manager.commit(ids[1], 10)
                manager.free_batch([*ids, -ids[0] - 1])
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(t * 1000,)) for t in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    manager.check()
    assert len(manager) == 0 and manager.stats()["used"] == 0


def test_arguments_that_run_code_see_a_whole_manager():
    manager = BlockManager(8, 2)

    class Token:
        def __index__(self):
            manager.check()
            manager.allocate(len(manager) + 100, [1])
            return 5

    manager.allocate(1, [Token(), Token()])
    assert manager.token_ids(1).tolist() == [5, 5] and len(manager) == 3


@pytest.mark.skipif("asan" in os.environ.get("LD_PRELOAD", ""), reason="AddressSanitizer keeps freed memory")
def test_nothing_leaks():
    code = """
        import gc, resource
        import numpy as np
        from pagedkv import BlockManager, OutOfBlocks

        def work():
            manager = BlockManager(512, 4, num_host_blocks=64)
            ids, prompts = list(range(32)), [list(range(i, i + 40)) for i in range(32)]
            for salt in (b"", b"x" * 1000):
                manager.allocate_batch(ids, prompts, salt=salt)
                manager.commit_batch(ids, [40] * 32)
                for seq_id in ids:
                    manager.fork(seq_id, seq_id + 100)
                    manager.append(seq_id + 100, np.arange(5))
                for bad in ([1, -1], ["x"], range(10**4)):
                    try:
                        manager.allocate(999, bad, salt=b"y" * 1000)
                    except (ValueError, TypeError, OutOfBlocks):
                        pass
                manager.swap_out(3)
                manager.swap_in(3)
                step = manager.prepare(ids, [0] * 32, [40] * 32)
                manager.stats(), repr(manager), manager._repr_html_(), manager.match(prompts[0]), manager.check()
                manager.token_ids(5), manager.block_table(5)
                manager.free_batch([*ids, *(i + 100 for i in ids)])
            return step

        def peak():
            return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

        for _ in range(30):
            work()
        gc.collect()
        before = peak()
        for _ in range(300):
            work()
        gc.collect()
        grown = peak() - before
        assert grown < 2000, f"{grown} KiB more after 300 rounds"
        import sys
        none = sys.getrefcount(BlockManager)
        for _ in range(100):
            work()
        assert abs(sys.getrefcount(BlockManager) - none) < 5
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=120)


def test_a_burst_of_equal_prompts_is_not_quadratic():
    def burst(count):
        manager = BlockManager(16 * count, 4)
        ids, prompts = range(count), [range(64)] * count
        return best(lambda: (manager.allocate_batch(ids, prompts), manager.free_batch(ids)))

    assert burst(2000) < 40 * burst(200)
