"""Salts, tokens and ids that are equal only where somebody writes them one behind the other, or as strings.

A page is found by its salt, all tokens before it and its own, each compared as what it is. With hash_bits=0 all hashes
are equal, so nothing is left to luck.
"""

from __future__ import annotations

import copy
import itertools

import numpy as np
import pytest
from block_model import Model, OutOfPages

from pagedkv import BlockManager, OutOfBlocks


def bytes_of(*tokens: int) -> bytes:
    return np.array(tokens, np.int32).tobytes()


SALTS = [
    b"", b"\0", b"\0\0", b"1", b"12", b"123", b"1\0", b"\x001", b"1,2", b"[1]", b"None", b"-1", b"0",
    bytes_of(1), bytes_of(1, 2), bytes_of(2), bytes_of(1) + b"\0", bytes(8), bytes(16), b"\xff" * 8,
    b"x" * 9999 + b"1", b"x" * 9999 + b"2", b"x" * 10_000,
]  # fmt: skip
TOKENS = [0, 1, 2, 3, 12, 23, 123, 0x31, 0x3231, 2**31 - 1]


@pytest.mark.parametrize("hash_bits", [64, 0])
@pytest.mark.parametrize("block_size", [1, 2])
def test_no_salt_finds_the_pages_of_another(block_size, hash_bits):
    """Every salt before every end of [1, 2, 3, 12], as though the salt were the tokens that are missing."""
    ends = [(1, 2, 3, 12), (2, 3, 12), (3, 12), (12,), (1, 2), (2, 3), (23, 12), (123, 12), (0, 1), (0x3231, 3)]
    prompts = [(salt, tokens) for salt in SALTS for tokens in ends]
    manager = BlockManager(1000, block_size, _hash_bits=hash_bits)
    known: set[tuple[bytes, tuple[int, ...]]] = set()  # salts and whole pages that were served
    for is_again, (salt, tokens) in itertools.product((False, True), prompts):
        beginnings = [tokens[:end] for end in range(block_size, len(tokens) + 1, block_size)]
        hits = sum((salt, tokens[: len(beginning)]) in known for beginning in beginnings) * block_size
        assert hits == len(beginnings) * block_size or not is_again
        assert manager.match(tokens, salt=salt) == (hits, 0)
        assert manager.allocate(1, tokens, salt=salt) == hits
        manager.commit(1, len(tokens))
        manager.free(1)
        known.update((salt, beginning) for beginning in beginnings)
    manager.check()


def test_no_salt_is_the_empty_one():
    """By definition: who wants none to be apart from all must say one."""
    manager = BlockManager(8, 2)
    manager.allocate(1, [1, 2])
    manager.commit(1, 2)
    assert manager.match([1, 2]) == manager.match([1, 2], salt=b"") == (2, 0)
    assert manager.match([1, 2], salt=b"\0") == (0, 0)


@pytest.mark.parametrize("hash_bits", [64, 2, 0])
@pytest.mark.parametrize("block_size", [1, 2, 3])
def test_salts_that_come_and_go_against_the_model(rng, block_size, hash_bits):
    """In a pool that is always full: a salt that nobody uses any more gives its place to another."""
    model, manager = Model(12, block_size), BlockManager(12, block_size, _hash_bits=hash_bits)
    for seq_id in range(500):
        salt = SALTS[rng.integers(len(SALTS) if rng.random() < 0.3 else 4)]
        tokens = [TOKENS[i] for i in rng.integers(1, 4, rng.integers(0, 4 * block_size))]
        tokens[-1:] = [TOKENS[rng.integers(len(TOKENS))]] if tokens else []
        trial = copy.deepcopy(model)
        try:
            hits = trial.allocate({seq_id: tokens}, salt)[0]
        except OutOfPages:
            with pytest.raises(OutOfBlocks):
                manager.allocate(seq_id, tokens, salt=salt)
        else:
            model = trial
            assert manager.allocate(seq_id, tokens, salt=salt) == hits
            model.commit(seq_id, len(tokens))
            manager.commit(seq_id, len(tokens))
        while len(model.seqs) > 2 or (model.seqs and rng.random() < 0.2):
            victim = int(rng.choice(list(model.seqs)))
            model.free(victim)
            manager.free(victim)
        manager.check()
        stats = manager.stats()
        assert (stats["hit_tokens"], stats["evictions"], stats["used"]) == (
            model.hit_tokens,
            model.evictions,
            model.used(),
        )
    assert model.hit_tokens and model.evictions


IDS = [
    1, 12, 123, 2, 23, 3, 11, 111, 0, -1, -12, -11, 10, 100, 2**31 - 1, 2**31, -(2**31), 2**32, 2**32 + 1, -(2**32) + 1,
    2**53, 2**53 + 1, 2**63 - 1, 2**63 - 2, -(2**63), -(2**63) + 1,
]  # fmt: skip


def test_every_id_is_itself(rng):
    """Ids whose digits or low words are alike, and the ends of int64."""
    manager = BlockManager(100, 2)
    order = rng.permutation(len(IDS)).tolist()
    for i in order:
        assert IDS[i] not in manager
        manager.allocate(IDS[i], [i, i, i])
    pages = [manager.block_table(seq_id).tolist() for seq_id in IDS]
    assert len({page for table in pages for page in table}) == 2 * len(IDS)
    manager.append_batch(IDS, list(range(len(IDS))))
    for i, seq_id in enumerate(IDS):
        assert manager.token_ids(seq_id).tolist() == [i] * 4 and manager.block_table(seq_id).tolist() == pages[i]
    step = manager.prepare(IDS, [3] * len(IDS), [1] * len(IDS))
    assert step.block_tables.tolist() == pages
    for n, i in enumerate(order):
        manager.free(IDS[i])
        assert IDS[i] not in manager and len(manager) == len(IDS) - n - 1
        assert all(IDS[j] in manager for j in order[n + 1 :])
        manager.check()
    with pytest.raises(KeyError):
        manager.free(1)


@pytest.mark.parametrize("seq_id", [2**63, -(2**63) - 1, 2**64, 10**30])
def test_an_id_beyond_int64_is_refused(seq_id):
    """And not taken for the one that it is modulo 2**64."""
    manager = BlockManager(8, 2)
    manager.allocate(0, [1])
    for call in (lambda: manager.allocate(seq_id, [1]), lambda: manager.free(seq_id), lambda: seq_id in manager):
        with pytest.raises(ValueError, match=f"seq_id: {seq_id} does not fit in 64 bits"):
            call()
    assert len(manager) == 1 and 0 in manager


def test_a_salt_is_bytes():
    """Never a string, whose bytes depend on an encoding, nor a number, of which bytes(n) would make zeros."""
    manager = BlockManager(8, 2)
    for salt in ("1", 1, None, ["1"]):
        with pytest.raises(TypeError, match="salt"):
            manager.allocate(1, [1, 2], salt=salt)
    assert len(manager) == 0
