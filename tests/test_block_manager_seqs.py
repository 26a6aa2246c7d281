"""BlockManager: sequences grow, share, are copied on write, move to the host and back; the arrays of a step."""

import gc

import numpy as np
import pytest

from pagedkv import BlockManager, OutOfBlocks

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
    before = manager.stats(), manager.block_table(1).tolist()
    with pytest.raises(OutOfBlocks, match="sequence 1 needs 2 host pages but 1 of 1 are free"):
        manager.swap_out(1)
    assert (manager.stats(), manager.block_table(1).tolist()) == before
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
