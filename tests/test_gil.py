"""Long calls let other threads run: none holds the GIL for longer than about a millisecond."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

from pagedkv import _C, BlockManager

NUM_TOKENS = 3_000_000
pytestmark = pytest.mark.skipif(not getattr(sys, "_is_gil_enabled", lambda: True)(), reason="no GIL here")


def longest_pause(call: Callable[[], object]) -> tuple[float, float]:
    """(seconds that the call took, longest time that another thread could not run meanwhile)."""
    is_done, worst = False, 0.0

    def tick() -> None:
        nonlocal worst
        last = time.perf_counter()
        while not is_done:
            time.sleep(0)
            now = time.perf_counter()
            worst = max(worst, now - last)
            last = now

    ticker = threading.Thread(target=tick)
    ticker.start()
    time.sleep(0.02)
    worst, start = 0.0, time.perf_counter()
    call()
    taken = time.perf_counter() - start
    is_done = True
    ticker.join()
    return taken, worst


def must_let_others_run(make: Callable[[], Callable[[], object]]) -> None:
    """`make` prepares a call anew. On a busy machine the other thread may wait for a processor: the best one counts."""
    seen = []
    for _ in range(20):
        taken, worst = longest_pause(make())
        seen.append((taken, worst))
        if taken > 4 * worst and worst < 0.010:
            return
        time.sleep(0.05)
    pytest.fail("seconds taken and longest pause: " + ", ".join(f"{a:.4f} {b:.4f}" for a, b in seen))


@pytest.fixture(scope="module")
def ids() -> np.ndarray:
    return np.random.default_rng(int.from_bytes(os.urandom(4), "little")).integers(0, 1000, NUM_TOKENS, np.int32)


def with_sequence(ids: np.ndarray) -> BlockManager:
    manager = BlockManager(NUM_TOKENS // 2, 4, num_host_blocks=8)
    manager.allocate(1, ids)
    return manager


CALLS: dict[str, Callable[[BlockManager, np.ndarray], object]] = {
    "allocate": lambda manager, ids: manager.allocate(2, ids[::-1]),
    "allocate_batch": lambda manager, ids: manager.allocate_batch([2, 3], [ids[: len(ids) // 2], ids[len(ids) // 2 :]]),
    "match": lambda manager, ids: manager.match(ids),
    "can_allocate": lambda manager, ids: manager.can_allocate(ids),
    "append": lambda manager, ids: manager.append(1, ids),
    "int64": lambda manager, ids: manager.match(ids.astype(np.int64)),
    "check": lambda manager, ids: manager.check(),
    "free": lambda manager, ids: (manager.commit(1, len(ids)), manager.free(1), manager.reset_prefix_cache()),
    "prepare": lambda manager, ids: manager.prepare([1], [0], [len(ids)]),
    "html": lambda manager, ids: [manager._repr_html_() for _ in range(4)],
}


@pytest.mark.parametrize("name", CALLS)
def test_long_calls(name, ids):
    def make() -> Callable[[], object]:
        manager = with_sequence(ids)
        return lambda: CALLS[name](manager, ids)

    must_let_others_run(make)


def test_a_big_pool_comes_and_goes():
    must_let_others_run(lambda: lambda: BlockManager(2**21, 16))


@pytest.mark.parametrize("kind", [list, tuple, range])
def test_many_ints(kind, ids):
    items = range(NUM_TOKENS) if kind is range else kind(ids.tolist())
    manager = BlockManager(4, 4)
    must_let_others_run(lambda: lambda: manager.match(items))
    must_let_others_run(lambda: lambda: _C._pack_ids(items, 2**31))


def test_many_lists():
    manager, prompts = BlockManager(1, 1), [[1]] * 400_000

    def refused() -> None:
        with pytest.raises(MemoryError):
            manager.allocate_batch(range(len(prompts)), prompts)

    must_let_others_run(lambda: refused)


@pytest.mark.parametrize("change", [lambda items: items.append(1), list.pop], ids=["grows", "shrinks"])
def test_a_list_that_changes_while_it_is_read(change):
    """Only a long one can: a short one is read at once."""
    items, is_done = [1] * 1_000_000, threading.Event()

    def spoil() -> None:
        while not is_done.is_set():
            change(items)
            time.sleep(0.0001)

    thread = threading.Thread(target=spoil)
    thread.start()
    try:
        with pytest.raises(RuntimeError, match=r"token_ids: its length was 1?\d+ and is \d+ now: it was changed"):
            for _ in range(100):
                BlockManager(4, 4).match(items)
    finally:
        is_done.set()
        thread.join()


def test_numbers_that_change_during_a_call(rng):
    """The core checks the numbers of a step and then uses them, without the GIL: it works on a copy."""
    num_seqs, is_done = 50_000, threading.Event()
    manager, seq_ids = BlockManager(num_seqs, 2), np.arange(num_seqs)
    manager.allocate_batch(seq_ids, [[1, 2]] * num_seqs)
    lens = np.ones(num_seqs, np.int64)

    def write() -> None:
        while not is_done.is_set():
            lens[:] = rng.integers(0, 3, num_seqs)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(30):
            step = manager.prepare(seq_ids, np.zeros(num_seqs, np.int64), lens)
            assert step.cu_seqlens_q[-1] == len(step.slot_mapping) == step.context_lens.sum()
    finally:
        is_done.set()
        thread.join()


# --- on a GPU: waits, copies, allocations, and whatever is loaded at its first use


GPU_CALLS = """
import gc
gc.disable()  # Python's collector looks through new lists without a pause
import numpy as np
import pagedkv
from test_gil import longest_pause

def report(name, call):
    taken, worst = longest_pause(call)
    print(name, taken, worst)

report("the driver", lambda: pagedkv.ops.memory_info())
report("a context", lambda: pagedkv.empty(3, device="cuda"))
host = np.ones((4096, 4096), np.float32)
kept = []
report("to the GPU", lambda: kept.append(pagedkv.asarray(host, device="cuda")))
x = kept[0]
report("a kernel", lambda: pagedkv.ops.silu_and_mul(x[:4]))
report("an allocation", lambda: kept.append(pagedkv.empty((1 << 30,), device="cuda")))
report("pinned memory", lambda: kept.append(pagedkv.empty((1 << 28,), pinned=True)))
small = pagedkv.empty((512, 4096), device="cuda")
report("cuBLASLt", lambda: pagedkv.ops.linear(x[:512], x, out=small))
out = pagedkv.empty((4096, 4096), device="cuda")
def work(times=300):
    for _ in range(times):
        pagedkv.ops.linear(x, x, out=out)
work(3)
work()
report("from the GPU", lambda: pagedkv.asarray(out, device="cpu"))
work()
stream = pagedkv.Stream()
pagedkv.ops.silu_and_mul(x, stream=stream)
work()
report("synchronize", lambda: pagedkv.ops.synchronize("cuda"))
work()
report("an event", lambda: pagedkv.Event().record().synchronize())
work()
report("free", kept.pop)
report("free pinned", kept.pop)
big = pagedkv.asarray(host, device="cuda")
work()
def drop():
    global big
    del big
report("free while the GPU works", drop)
report("numbers", lambda: kept.append(pagedkv.asarray(host[:512], device="cuda").tolist()))
"""


@pytest.mark.alone
@pytest.mark.gpu
def test_what_a_gpu_does_lets_others_run(cuda, environment):
    """In a fresh process, so that everything is a first use."""
    seen: dict[str, float] = {}
    for _ in range(3):  # another process may need the processor: the best one counts
        result = subprocess.run([sys.executable, "-c", GPU_CALLS], env=environment, capture_output=True, text=True, check=False)
        assert result.returncode == 0, result.stderr
        for line in result.stdout.splitlines():
            name, _, worst = line.rsplit(" ", 2)
            seen[name] = min(seen.get(name, 1e9), float(worst))
        print(result.stdout)
    assert len(seen) == 14
    assert max(seen.values()) < 0.005, seen
