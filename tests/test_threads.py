"""Operations and the BlockManager from several threads, and in processes made by fork."""

import os
import random
import subprocess
import sys
import threading

import numpy as np
import pytest

import pagedkv


def test_releases_the_gil(rng):
    """Two calls at once: another Python thread runs while the CPU computes."""
    weight = rng.standard_normal((2048, 1024)).astype(np.float32)
    x = rng.standard_normal((64, 1024)).astype(np.float32)
    expected = pagedkv.linear(x, weight)
    results: list[np.ndarray] = []
    threads = [threading.Thread(target=lambda: results.append(pagedkv.linear(x, weight))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 4 and all(np.array_equal(r, expected) for r in results)


def test_number_of_threads_belongs_to_the_process():
    before = pagedkv.get_num_threads()
    seen: list[int] = []
    try:
        pagedkv.set_num_threads(before + 1)
        thread = threading.Thread(target=lambda: seen.append(pagedkv.get_num_threads()))
        thread.start()
        thread.join()
        assert seen == [before + 1]
    finally:
        pagedkv.set_num_threads(before)


FORK = """
import os, sys, numpy as np, pagedkv
x = np.ones((64, 1024), np.float32)
if sys.argv[1] == "used":
    pagedkv.linear(x, np.ones((512, 1024), np.float32))
child = os.fork()
if child == 0:
    pagedkv.set_num_threads(2)
    out = pagedkv.linear(x, np.ones((512, 1024), np.float32))
    pool = np.ones((8, 16, 2, 64), np.float32)
    pool[1:] = np.nan
    tables = np.zeros((8, 4), np.int32)
    q = np.ones((8, 2, 64), np.float32)
    assert np.allclose(pagedkv.paged_attention_fwd(q, pool, pool, tables, np.full(8, 64, np.int32)), 1)
    expected = 1 if sys.argv[1] == "used" else 2
    os._exit(0 if (out == 1024).all() and pagedkv.get_num_threads() == expected else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("before", ["used", "unused"])
def test_a_forked_child_computes(before):
    """libgomp would wait for the parent's threads, which the child has not (multiprocessing's fork, gunicorn)."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", FORK, before], check=True, timeout=60, env=environment)


def test_one_manager_for_several_threads(seed):
    manager = pagedkv.BlockManager(64, 4)
    failures: list[Exception] = []

    def work(number: int) -> None:
        rng = random.Random(seed + number)
        try:
            for seq_id in range(number * 1000, number * 1000 + 500):
                tokens = [rng.randrange(3) for _ in range(rng.randrange(1, 30))]
                try:
                    manager.allocate(seq_id, tokens)
                except pagedkv.OutOfBlocks:
                    continue
                step = manager.prepare([seq_id], [0], [len(tokens)])
                assert len(step.slot_mapping) == len(tokens)
                manager.commit(seq_id, len(tokens))
                assert manager.token_ids(seq_id).tolist() == tokens
                assert len(manager.block_table(seq_id)) == -(-len(tokens) // 4)
                manager.free(seq_id)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    manager.check()
    assert len(manager) == 0 and manager.num_used_blocks == 0
