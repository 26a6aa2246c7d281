"""Operations and the BlockManager from several threads, and in processes made by fork."""

import os
import random
import subprocess
import sys
import threading

import numpy as np
import pytest
from threads import in_threads

import pagedkv
from pagedkv import ops


def test_calls_at_once(rng):
    weight = rng.standard_normal((2048, 1024)).astype(np.float32)
    x = rng.standard_normal((64, 1024)).astype(np.float32)
    expected = ops.linear(x, weight)
    for result in in_threads(lambda _: ops.linear(x, weight), range(4)):
        np.testing.assert_array_equal(result, expected)


def test_number_of_threads_belongs_to_the_process():
    before = ops.get_num_threads()
    seen: list[int] = []
    try:
        ops.set_num_threads(before + 1)
        thread = threading.Thread(target=lambda: seen.append(ops.get_num_threads()))
        thread.start()
        thread.join()
        assert seen == [before + 1]
    finally:
        ops.set_num_threads(before)


def test_what_the_environment_was_at_import_counts():
    """Nobody looks there later: another thread may be setting a variable, which moves what getenv reads."""
    code = """if True:
        import os, pagedkv
        os.environ["PAGEDKV_CPU_ISA"] = "generic"
        print(pagedkv.ops.build_info()["isa"])
    """
    environment = {k: v for k, v in os.environ.items() if k != "PAGEDKV_CPU_ISA"}
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    own = subprocess.run([sys.executable, "-c", code.replace("os.environ", "{}")], env=environment, capture_output=True, text=True)
    assert said == own.stdout != ""


FORK = """
import os, sys, numpy as np, pagedkv
x = np.ones((64, 1024), np.float32)
if sys.argv[1] == "used":
    pagedkv.ops.linear(x, np.ones((512, 1024), np.float32))
child = os.fork()
if child == 0:
    pagedkv.ops.set_num_threads(2)
    out = pagedkv.ops.linear(x, np.ones((512, 1024), np.float32))
    pool = np.ones((8, 16, 2, 64), np.float32)
    pool[1:] = np.nan
    tables = np.zeros((8, 4), np.int32)
    q = np.ones((8, 2, 64), np.float32)
    assert np.allclose(pagedkv.paged_attention_fwd(q, pool, pool, tables, np.full(8, 64, np.int32)), 1)
    expected = 1 if sys.argv[1] == "used" else 2
    os._exit(0 if (out == 1024).all() and pagedkv.ops.get_num_threads() == expected else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("before", ["used", "unused"])
def test_a_forked_child_computes(before):
    """libgomp would wait for the parent's threads, which the child has not (multiprocessing's fork, gunicorn)."""
    environment = os.environ | {"OMP_NUM_THREADS": "2"}
    subprocess.run([sys.executable, "-c", FORK, before], check=True, timeout=60, env=environment)


FORKS = """
import os, signal, sys, threading, numpy as np, pagedkv
x = np.ones((64, 256), np.float32)
tokens = np.arange(200_000, dtype=np.int32)
manager, buffer = pagedkv.BlockManager(200_000, 4), pagedkv.ops.ElasticBuffer(1 << 26)
def linear():
    assert (pagedkv.ops.linear(x, x) == 256).all()
def allocate():
    seq_id = threading.get_ident()
    manager.allocate(seq_id, tokens)
    manager.free(seq_id)
def resize():
    for size in (1 << 26, 0):
        buffer.resize(size)
call, is_over = globals()[sys.argv[1]], False
def work():
    while not is_over:
        call()
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads:
    thread.start()
codes = []
for _ in range(int(sys.argv[2])):
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        manager.check()
        call()
        os._exit(0)
    codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
is_over = True
for thread in threads:
    thread.join()
sys.exit(any(codes))
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
@pytest.mark.parametrize("call, num_forks", [("linear", 40), ("allocate", 10), ("resize", 20)])
def test_a_fork_in_the_middle_of_a_call_of_another_thread(call, num_forks):
    """No lock that the other thread holds is held in the child for ever, and nothing is half changed there."""
    command = [sys.executable, "-W", "ignore", "-c", FORKS, call, str(num_forks)]
    subprocess.run(command, check=True, timeout=120, env=os.environ | {"OMP_NUM_THREADS": "2"})


def test_one_manager_for_several_threads(seed):
    manager = pagedkv.BlockManager(64, 4)

    def work(number: int) -> None:
        rng = random.Random(seed + number)
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

    in_threads(work, range(4))
    manager.check()
    assert len(manager) == 0 and manager.num_used_blocks == 0


def change(manager, prompt: np.ndarray, mine: dict[int, np.ndarray], rng: random.Random, seq_id: int) -> int:
    """A random call for a sequence of a thread's own, whose tokens are in `mine`. Returns how many were looked up."""
    count, num_looked_up = rng.choice((1, 7, 500, 20_000, 30_000)), 0
    if seq_id not in mine:
        mine[seq_id] = prompt[:count]
        num_looked_up = count
        manager.allocate(seq_id, prompt[:count])
    kind = rng.randrange(8)
    if kind == 0 and len(mine[seq_id]) < 60_000:  # all of them fit
        manager.append(seq_id, prompt[:count].tolist() if rng.random() < 0.5 else prompt[:count])
        mine[seq_id] = np.concatenate((mine[seq_id], prompt[:count]))
    elif kind == 1:
        manager.append(seq_id, 5)
        mine[seq_id] = np.append(mine[seq_id], 5)
    elif kind == 2:
        manager.commit(seq_id, len(mine[seq_id]))
    elif kind == 3:
        manager.truncate(seq_id, len(mine[seq_id]) // 2)
        mine[seq_id] = mine[seq_id][: len(mine[seq_id]) // 2]
    elif kind == 4:
        manager.free(seq_id)
        del mine[seq_id]
        assert seq_id not in manager
    elif kind == 5:
        child = seq_id + 10
        if child not in mine:
            manager.fork(seq_id, child)
            mine[child] = mine[seq_id]
    elif kind == 6:
        manager.swap_out(seq_id)
        manager.swap_in(seq_id)
    else:
        step = manager.prepare([seq_id], [0], [len(mine[seq_id])])
        assert len(step.positions) == len(mine[seq_id])
        assert len(manager.block_table(seq_id)) == -(-len(mine[seq_id]) // 4)
    if seq_id in mine:
        assert manager.num_tokens(seq_id) == len(mine[seq_id])
    return num_looked_up


def test_long_and_short_calls_of_several_threads(seed):
    """Long calls run without the GIL, short ones with it, all under the manager's own lock. Each thread changes its own
    sequences, so that what they hold at the end does not depend on the order; no update of what is shared may be lost."""
    manager = pagedkv.BlockManager(600_000, 4, num_host_blocks=100_000)
    prompt = np.random.default_rng(seed).integers(0, 3, 30_000, np.int32)  # of one start for all: shared pages

    def work(number: int) -> tuple[dict[int, np.ndarray], int]:
        rng, mine, num_looked_up = random.Random(seed + number), dict[int, np.ndarray](), 0
        for i in range(150):
            num_looked_up += change(manager, prompt, mine, rng, 100 * number + rng.randrange(3))
            if len(mine) > 5:
                manager.free_batch(list(mine))
                mine.clear()
            if i % 50 == 0:
                manager.check()
        return mine, num_looked_up

    found = in_threads(work, range(4))
    manager.check()
    sequences = {seq_id: tokens for mine, _ in found for seq_id, tokens in mine.items()}
    assert len(manager) == len(sequences)
    for seq_id, tokens in sequences.items():
        np.testing.assert_array_equal(manager.token_ids(seq_id), tokens)
    assert manager.stats()["lookup_tokens"] == sum(count for _, count in found)
    manager.free_batch(list(sequences))
    manager.check()
    assert manager.num_used_blocks == 0 and manager.num_free_host_blocks == 100_000
