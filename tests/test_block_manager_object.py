"""BlockManager as a Python object: what it shows, threads, reentrance, memory."""

import inspect
import os
import re
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from block_model import serve
from threads import in_threads

from pagedkv import BlockManager

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
    for name in dir(BlockManager):
        method = getattr(BlockManager, name)
        if not name.startswith("_") and callable(method):
            assert method.__doc__ and inspect.signature(method), name
    assert list(inspect.signature(BlockManager.allocate).parameters) == ["self", "seq_id", "token_ids", "salt"]


# --- threads, memory


def test_calls_from_many_threads_are_atomic():
    manager = BlockManager(4096, 4)

    def work(first):
        for i in range(300):
            ids = [first + i, first + i + 100_000]
            manager.allocate_batch(ids, [range(i % 50), range(10)])
            manager.append_batch(ids, [1, 2])
            manager.prepare(ids, [0, 0], [1, 1])
            manager.fork(ids[0], -ids[0] - 1)
            manager.append(ids[0], [3] * 5)
            manager.commit(ids[1], 10)
            manager.free_batch([*ids, -ids[0] - 1])

    in_threads(work, range(0, 6000, 1000))
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


def test_every_call_has_pairs_of_its_own():
    """What a caller does to a result, its shape included, does not show in another."""
    manager = BlockManager(8, 4)
    manager.allocate(1, [1, 2, 3])
    pairs = manager.append(1, 4)
    assert pairs.shape == (0, 2) and pairs.dtype == np.int32
    pairs.shape = (2, 0)
    for later in (manager.append(1, 5), manager.reserve(1, 8), manager.append_batch([1], [6]), manager.reserve_batch([1], [8])):
        assert later.shape == (0, 2) and later is not pairs
    manager.fork(1, 2)
    copied = manager.append(1, 7)
    assert copied.shape == (1, 2) and copied.flags.writeable
    kept = copied.tolist()
    del manager
    assert copied.tolist() == kept
