"""Arguments that change while a call reads them: by code of another argument, or by another thread."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest

import pagedkv
from pagedkv import BlockManager, ops


def test_an_import_that_changes_its_salts():
    """Code of a number may change the list: the salts that were given count."""
    source = BlockManager(8, 4)
    source.allocate(1, range(8), salt=b"x" * (1 << 20))
    source.commit(1, 8)
    _, _, indices, salts, tokens = source.export_cache()

    class Clears:
        def __index__(self):
            salts.clear()
            return -1

    target = BlockManager(8, 4)
    assert target.import_cache([Clears(), 0], indices, salts, tokens).tolist() == [0, 1]
    assert target.match(range(9), salt=b"x" * (1 << 20))[0] == 8 and not salts
    target.check()


def test_an_import_whose_numbers_another_thread_changes():
    """They are checked, and then used without the GIL."""
    n, is_over = 20_000, threading.Event()
    parents, indices, tokens = np.full(n, -1, np.int32), np.zeros(n, np.int32), np.arange(n, dtype=np.int32)

    def write():
        while not is_over.is_set():
            indices[n // 2 :], parents[n // 2 :] = 2**30, 2**30
            indices[n // 2 :], parents[n // 2 :] = 0, -1

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    manager, outcomes = BlockManager(n, 1), set()
    for _ in range(200):
        try:
            outcomes.add(int((manager.import_cache(parents, indices, [b""], tokens) >= 0).sum()))
        except ValueError:
            outcomes.add(None)
        manager.check()
        manager.reset_prefix_cache()
    is_over.set()
    thread.join()
    assert outcomes <= {n, None}


def test_tokens_that_another_thread_changes():
    """They are checked, and then kept without the GIL."""
    n, is_over = 100_000, threading.Event()
    tokens = np.zeros(n, np.int32)

    def write():
        while not is_over.is_set():
            tokens[n // 2] = -5
            tokens[n // 2] = 7

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    manager, num_kept = BlockManager(n, 4), 0
    for _ in range(100):
        try:
            manager.allocate(1, tokens)
            manager.append(1, tokens)
        except ValueError:
            pass
        if 1 in manager:
            num_kept += 1
            assert manager.token_ids(1).min() >= 0
            manager.free(1)
    is_over.set()
    thread.join()
    assert num_kept
    manager.check()


F32, I32, T = np.float32, np.int32, 20_000
POOL = (T // 16, 16, 1, 8)


def a_store():
    key, caches, slots = np.ones((T, 1, 8), F32), [np.zeros(POOL, F32) for _ in range(2)], np.arange(T)
    return slots, lambda: ops.store_kvcache(key, key, *caches, slots), lambda _: caches[1][-1, -1, 0, 0] == 1


def an_append():
    key, caches = np.ones((T, 1, 8), F32), [np.zeros(POOL, F32) for _ in range(2)]
    table = np.arange(T // 16, dtype=I32)[None]
    lens = np.zeros(1, I32)
    return table[0], lambda: ops.append_kvcache(key, key, *caches, table, lens), lambda _: caches[1][-1, -1, 0, 0] == 1


def lengths_of_an_append():
    key, caches = np.ones((T, 1, 8), F32), [np.zeros(POOL, F32) for _ in range(2)]
    table, lens = np.arange(T // 16, dtype=I32)[None], np.zeros(2, I32)
    starts = np.array([0, 0, T], I32)
    tables = np.concatenate([table, table])
    return lens, lambda: ops.append_kvcache(key, key, *caches, tables, lens, cu_seqlens=starts), lambda _: caches[1][-1, -1, 0, 0] == 1


def an_attention(which: str):
    seqs, pages = T // 16, np.ones((4, 16, 1, 8), F32)
    q, tables, lens = np.ones((seqs, 1, 8), F32), np.zeros((seqs, 4), I32), np.full(seqs, 64, I32)
    options = {"key_starts": np.zeros(seqs, I32), "cu_seqlens_q": np.arange(seqs + 1, dtype=I32), "max_seqlen_q": 1}
    numbers = {"tables": tables.reshape(-1), "lens": lens} | options
    return numbers[which], lambda: ops.paged_attention_fwd(q, pages, pages, tables, lens, **options), lambda out: out[-1, 0, 0] == 1


def a_gather():
    table, ids = np.arange(100, dtype=F32)[:, None], np.full(T, 99, I32)
    return ids, lambda: ops.gather_rows(table, ids), lambda out: out[-1] == 99


def a_turn(which: str):
    qkv, caches = np.ones((T, 24), F32), [np.zeros(POOL, F32) for _ in range(2)]
    numbers = {"positions": np.zeros(T, I32), "slots": np.arange(T)}
    angles, weight = np.ones((1, 8), F32), np.ones(8, F32)
    call = lambda: ops.qk_norm_rope_store(qkv, weight, weight, angles, numbers["positions"], *caches, numbers["slots"])
    return numbers[which], call, lambda _: caches[1][-1, -1, 0, 0] == 1


def a_look_at_logprobs():
    logits, ids = np.zeros((T, 4), F32), np.full(T, 3, I32)
    return ids, lambda: ops.token_logprobs(logits, ids, 1), lambda out: out[0][-1, 0] == 3


def a_bias(which: str):
    logits, numbers = np.zeros((2, 8), F32), {"rows": np.ones(T, I32), "token_ids": np.full(T, 7, I32)}
    values = np.ones(T, F32)
    return numbers[which], lambda: ops.bias_logits(logits, **numbers, values=values), lambda _: logits[1, 7] >= T


def a_mask():
    logits, masks, rows = np.zeros((2, 8), F32), np.zeros((T, 1), I32), np.ones(T, I32)
    return rows, lambda: ops.mask_logits(logits, masks, rows), lambda _: logits[1, 7] == -np.inf


def a_count():
    counts, ids = np.zeros(8, I32), np.full(T, 7, I32)
    return ids, lambda: ops.count_tokens(ids[:5], ids, counts), lambda _: counts[7] == 2 * T + 1


def a_sample():
    logits, counts, slots = np.zeros((512, 64), F32), np.zeros((2, 64), I32), np.full(512, -1, I32)
    slots[-1] = 1
    zeros = np.zeros(512, F32), np.zeros(512, np.int64), np.zeros(512, I32)
    penalties = np.ones(512, F32)
    call = lambda: ops.sample(logits, *zeros, repetition_penalties=penalties, counts=counts, slots=slots)
    return slots, call, lambda _: counts[1, 0] > 0


def a_copy():
    caches, pairs = [np.ones((2 * T, 8), F32)], np.arange(2 * T).reshape(T, 2)
    return pairs.reshape(-1), lambda: ops.copy_blocks(caches, pairs), lambda _: True


RACES = {
    "store": a_store,
    "append": an_append,
    "append, lengths": lengths_of_an_append,
    **{f"attention, {which}": (lambda which=which: an_attention(which)) for which in ("tables", "lens", "key_starts", "cu_seqlens_q")},
    "gather": a_gather,
    **{f"turn, {which}": (lambda which=which: a_turn(which)) for which in ("positions", "slots")},
    "logprobs": a_look_at_logprobs,
    **{f"bias, {which}": (lambda which=which: a_bias(which)) for which in ("rows", "token_ids")},
    "mask": a_mask,
    "count": a_count,
    "sample": a_sample,
    "copy": a_copy,
}


@pytest.mark.parametrize("name", RACES)
def test_ids_and_lengths_that_another_thread_changes(name):
    """What is checked is what is used: a call raises, or does what the numbers said that it was given."""
    numbers, call, is_done = RACES[name]()
    good, is_over, outcomes = numbers[-1], threading.Event(), set()

    def write():
        while not is_over.is_set():
            for _ in range(200):
                numbers[-1] = 2**30
                numbers[-1] = good

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    end = time.monotonic() + 0.3
    while time.monotonic() < end or len(outcomes) == 0:
        try:
            assert is_done(call())
            outcomes.add("done")
        except ValueError as error:
            assert str(2**30) in str(error)
            outcomes.add("refused")
    is_over.set()
    thread.join()
    numbers[-1] = good
    assert is_done(call())


def test_torch_memory_that_goes_within_a_call(torch):
    """Code of another argument, or another thread, gives the tensor other memory: what was read stays."""
    num_seqs = 1 << 14  # enough work to let go of the GIL
    q, cache = torch.ones(num_seqs, 1, 64), torch.ones(4, 16, 1, 64)
    table, lens = torch.zeros(num_seqs, 1, dtype=torch.int32), torch.ones(num_seqs, dtype=torch.int32)

    class Frees:
        def __index__(self):
            q.data = torch.empty(0)
            return 1

    starts = torch.arange(num_seqs + 1, dtype=torch.int32)
    out = pagedkv.paged_attention_fwd(q, cache, cache, table, lens, cu_seqlens_q=starts, max_seqlen_q=Frees())
    assert q.shape == (0,) and torch.equal(out, torch.ones(num_seqs, 1, 64))

    x, weight, is_over = torch.ones(1024, 1024), torch.ones(1024), threading.Event()

    def normalise():
        while not is_over.is_set():
            ops.rms_norm(x, weight)

    thread = threading.Thread(target=normalise, daemon=True)
    thread.start()
    for _ in range(3000):
        x.data = torch.ones(1024, 1024)
    is_over.set()
    thread.join()


def test_an_iterators_own_error_is_not_hidden():
    class Interrupted:
        def __iter__(self):
            raise KeyboardInterrupt

    q, cache = np.zeros((1, 1, 8), np.float32), np.zeros((1, 4, 1, 8), np.float32)
    with pytest.raises(KeyboardInterrupt):
        pagedkv.paged_attention_fwd(q, cache, cache, np.zeros((1, 1), np.int32), np.ones(1, np.int32), window_size=Interrupted())


def test_a_propertys_own_error_is_not_hidden():
    class Interrupted:
        @property
        def cuda_stream(self):
            raise KeyboardInterrupt

    class Empty:
        pass

    x, weight = np.ones((1, 8), np.float32), np.ones(8, np.float32)
    with pytest.raises(KeyboardInterrupt):
        ops.rms_norm(x, weight, stream=Interrupted())
    with pytest.raises(TypeError, match="stream: must be None, an int"):
        ops.rms_norm(x, weight, stream=Empty())
