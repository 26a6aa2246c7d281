"""BlockManager: the forms of its arguments, and a table of wrong calls."""

import numpy as np
import pytest

from pagedkv import BlockManager, OutOfBlocks


def state(manager):
    """All that can be seen of a manager."""
    seqs = [s for s in range(-2, 100) if s in manager]
    return manager.stats(), [
        (s, manager.block_table(s).tolist(), manager.token_ids(s).tolist(), manager.num_computed(s)) for s in seqs
    ]


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
    (lambda m: m.allocate_batch([3, 3], [[1], [1]]), ValueError, "seq_ids: 3 is there twice"),
    (lambda m: m.allocate_batch([3, 1], [[1], [1]]), ValueError, "sequence 1 already exists: free it first"),
    (lambda m: m.allocate_batch([3], 5), TypeError, "token_ids: must hold one sequence of ids for each of seq_ids, not 5"),
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
    (lambda m: m.prepare([1], [4], [3]), ValueError, "sequence 1: query of 3 from 4 ends beyond its room for 6 tokens"),
    (lambda m: m.prepare([1], [2**62], [2**62]), ValueError, "ends beyond its room"),
    (lambda m: m.prepare([1], [0], []), ValueError, "query_lens: has 0 elements but seq_ids has 1"),
    (lambda m: m.prepare([1], [0], [1], max_seqs=-1), ValueError, "max_seqs is -1"),
    (lambda m: m.swap_in(1), ValueError, "sequence 1 is not swapped out"),
    (lambda m: m.swap_out(1), OutOfBlocks, "sequence 1 needs 2 host pages but 0 of 0 are free"),
    (lambda m: m.allocate("1", [1]), TypeError, "seq_id: must be an int, not 'str'"),
    (lambda m: m.allocate(3, range(2**62)), MemoryError, None),  # its bytes were counted as 0
    (lambda m: m.free_batch(range(2**61)), MemoryError, None),
    (lambda m: m.prepare(range(2**61), [0], [1]), MemoryError, None),
    (lambda m: m.match(range(2**62 + 1)), MemoryError, None),
    (lambda m: m.allocate(2**63, [1]), ValueError, "seq_id: 9223372036854775808 does not fit in 64 bits"),
    (lambda m: m.allocate(1), TypeError, "missing 1 required positional argument: 'token_ids'"),
    (lambda m: m.allocate(3, [1], tenant=b""), TypeError, "unexpected keyword argument 'tenant'"),
    (lambda m: "x" in m, TypeError, "seq_id: must be an int, not 'str'"),
    (lambda m: BlockManager(0, 4), ValueError, "num_blocks is 0 but must be at least 1"),
    (lambda m: BlockManager(4, 0), ValueError, "block_size is 0 but must be at least 1"),
    (lambda m: BlockManager(4, 4, eviction="fifo"), ValueError, "eviction is 'fifo' but must be 'reuse' or 'lru'"),
    (lambda m: BlockManager(4, 4, eviction=1), TypeError, "eviction: must be a string"),
    (lambda m: BlockManager(4, 4, _hash_bits=65), ValueError, r"_hash_bits is 65 but must be in 0\.\.64"),
    (lambda m: BlockManager(4, 4, _hash_bits=-1), ValueError, r"_hash_bits is -1 but must be in 0\.\.64"),
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
