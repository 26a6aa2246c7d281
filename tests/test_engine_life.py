"""How an LLM begins and ends: what closing gives back, what is left of it, and several side by side."""

from __future__ import annotations

import gc
import logging
import subprocess
import sys
import threading

import numpy as np
import pytest
from checkpoints import write_model
from tiny_engine import GREEDY, folder, generate  # noqa: F401

from pagedkv import LLM


def test_the_package_imports_the_engine_lazily():
    code = "import sys, pagedkv; assert 'numpy' not in sys.modules and 'pagedkv.engine' not in sys.modules; pagedkv.LLM"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_closing(folder, device):  # noqa: F811
    llm = LLM(folder, device=device, num_blocks=50)
    generate(llm, "a", GREEDY)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="this LLM is closed"):
        generate(llm, "a", GREEDY)


def test_close_releases_the_memory(folder):  # noqa: F811
    def resident() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * 4096

    size = 256 << 20
    gc.collect()
    before = resident()
    llm = LLM(folder, device="cpu", kv_cache_memory=size)
    for pair in llm._runner.caches.layers:
        for whole in pair:
            cache = whole[: llm.manager.num_blocks]
            cache.copy_(np.zeros(cache.shape, np.float32))
    assert resident() - before > 0.9 * size
    del pair, cache, whole
    llm.close()
    assert resident() - before < 0.2 * size


def test_engines_leave_nothing_behind(folder, caplog):  # noqa: F811
    caplog.set_level(logging.ERROR, "pagedkv")  # pytest keeps each line

    def live_and_die() -> None:
        with LLM(folder, device="cpu", block_size=4, num_blocks=50) as llm:
            generate(llm, ["abc", [], [1] * 300], GREEDY)

    for _ in range(5):
        live_and_die()
    gc.collect()
    before = sys.getallocatedblocks()
    for _ in range(40):
        live_and_die()
    gc.collect()
    grown = sys.getallocatedblocks() - before
    assert grown < 400, f"{grown} blocks more after 40 engines"  # caches of Python still fill; an engine is thousands


def test_two_engines_side_by_side(folder, tmp_path, device):  # noqa: F811
    other, options = write_model(tmp_path, seed=1), {"device": device, "num_blocks": 50}
    with LLM(folder, **options) as a, LLM(other, **options) as b:
        alone = [generate(engine, ["abc"], GREEDY)[0].token_ids for engine in (a, b)]
        results = {}
        threads = [
            threading.Thread(target=lambda i=i, e=e: results.update({i: generate(e, ["abc"] * 5, GREEDY)}))
            for i, e in enumerate((a, b, a, b))
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert alone[0] != alone[1]
    for i in range(4):
        assert [output.token_ids for output in results[i]] == [alone[i % 2]] * 5
