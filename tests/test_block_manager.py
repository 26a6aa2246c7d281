"""BlockManager: what the prefix cache finds and keeps, and what it costs.

The rest rule by rule: test_block_manager_seqs.py, _errors.py, _object.py; everything at once against a model: _state.py.
"""

import time

import numpy as np
import pytest
from block_model import serve

from pagedkv import BlockManager, OutOfBlocks

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


# --- a prefix is not shared because another one has its hash. With hash_bits=0 every page has the same hash.


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


# --- equal prompts in one step: the index must not lose the copy that still lives


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


# --- costs: taking a page is not linear in the pool, and a prompt that is refused is not hashed to its end


def best(function, repeats=5):
    """Seconds of this thread's own: other processes may have the machine meanwhile."""
    times = []
    for _ in range(repeats):
        start = time.thread_time()
        function()
        times.append(time.thread_time() - start)
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


def test_a_burst_of_equal_prompts_is_not_quadratic():
    def burst(count):
        manager = BlockManager(16 * count, 4)
        ids, prompts = range(count), [range(64)] * count
        return best(lambda: (manager.allocate_batch(ids, prompts), manager.free_batch(ids)))

    assert burst(2000) < 40 * burst(200)
