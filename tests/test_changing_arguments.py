"""Arguments that change while a call reads them: by code of another argument, or by another thread."""

from __future__ import annotations

import threading

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
    for _ in range(300):
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
