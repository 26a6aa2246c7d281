"""Engines of two ranks with a GPU each, beside one with one: tokens, graphs, and the end."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import numpy as np
import pytest
from checkpoints import write_model
from rank_engine import OPTIONS, SIZES, answers, children, generate, traffic

from pagedkv import LLM, ops
from pagedkv.engine import RankError

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    if ops.build_info()["cuda_devices"] < 2:
        pytest.skip("fewer than two GPUs")
    return write_model(tmp_path_factory.mktemp("model"), **SIZES)


def engine(folder, num_ranks, **options) -> LLM:
    return LLM(folder, tensor_parallel_size=num_ranks, **OPTIONS | {"device": "cuda", "num_blocks": 24} | options)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_tokens_of_one_gpu(folder, enforce_eager):
    """In float32, with swaps, forks and edits; twice, so that all graphs are replayed."""
    requests, found = traffic(np.random.default_rng(1), 27), []
    for num_ranks in (1, 2):
        with engine(folder, num_ranks, enforce_eager=enforce_eager, swap_space=1 << 20) as llm:
            found += [answers(generate(llm, requests)) for _ in range(2)]
    assert found[0] == found[1] == found[2] == found[3]


def test_16_bits_are_the_same_every_time(folder):
    requests, found = traffic(np.random.default_rng(2), 18), []
    with engine(folder, 2, dtype="bfloat16", num_blocks=200, enable_prefix_caching=False) as llm:
        for _ in range(3):
            found.append([answers(generate(llm, [request])) for request in requests])
    assert found[0] == found[1] == found[2]


@pytest.mark.alone
def test_the_pool_is_what_the_least_gpu_has_room_for(folder):
    """The second GPU has less, because some of its memory is in use."""
    total = min(ops.memory_info(f"cuda:{i}")[1] for i in range(2))
    taken = ops.empty(total // 20, "uint8", "cuda:1")
    with LLM(folder, tensor_parallel_size=2, device="cuda", gpu_memory_utilization=0.2, max_num_seqs=8) as llm:
        first, second = (total - free for free, total in (ops.memory_info(f"cuda:{i}") for i in range(2)))
        assert 0.19 * total < second < 0.2 * total and abs(second - first - taken.nbytes) < 0.01 * total
        generate(llm, traffic(np.random.default_rng(3), 9))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone(folder, number):
    with engine(folder, 2, num_blocks=400) as llm:
        requests = traffic(np.random.default_rng(4), 60)
        (pid,) = children()
        os.kill(pid, number)
        start = time.monotonic()
        outputs = generate(llm, requests)
        assert time.monotonic() - start < 12 and all(isinstance(output.error, RankError) for output in outputs)
        assert str(outputs[0].error).startswith("rank 1 ")
    assert not children()
    with contextlib.suppress(ValueError):  # sums that did not come are NaN, of which the first GPU may tell
        ops.check_errors()


def test_more_ranks_than_gpus(folder):
    count = ops.build_info()["cuda_devices"]
    with pytest.raises(ValueError, match=f"tensor_parallel_size is {count} but from cuda:1 on there are {count - 1} GPUs"):
        engine(folder, count, device="cuda:1")
