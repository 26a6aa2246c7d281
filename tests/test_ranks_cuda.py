"""Engines of two, four and eight ranks with a GPU each, beside one with one: tokens, graphs, and the end."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import numpy as np
import pytest
from checkpoints import write_model
from rank_engine import FOR_EIGHT, OPTIONS, answers, children, generate, process_of, traffic

from pagedkv import LLM, ops
from pagedkv.engine import RankError

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module", params=[2, 4, 8])
def num_gpus(request):
    if ops.build_info()["cuda_devices"] < request.param:
        pytest.skip(f"fewer than {request.param} GPUs")
    return request.param


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("model"), **FOR_EIGHT)


def requests_of(seed: int, count: int) -> list:
    return traffic(np.random.default_rng(seed), count, FOR_EIGHT["vocab_size"])


def engine(folder, num_ranks, **options) -> LLM:
    return LLM(folder, tensor_parallel_size=num_ranks, **OPTIONS | {"device": "cuda", "num_blocks": 24} | options)


@pytest.mark.parametrize("enforce_eager", [False, True])
def test_tokens_of_one_gpu(folder, num_gpus, enforce_eager):
    """In float32, with swaps, forks and edits; twice, so that all graphs are replayed."""
    requests, found = requests_of(1, 27), []
    for num_ranks in (1, num_gpus):
        with engine(folder, num_ranks, enforce_eager=enforce_eager, swap_space=1 << 20) as llm:
            found += [answers(generate(llm, requests)) for _ in range(2)]
    assert found[0] == found[1] == found[2] == found[3]


def test_16_bits_are_the_same_every_time(folder, num_gpus):
    requests, found = requests_of(2, 18), []
    with engine(folder, num_gpus, dtype="bfloat16", num_blocks=200, enable_prefix_caching=False) as llm:
        for _ in range(3):
            found.append([answers(generate(llm, [request])) for request in requests])
    assert found[0] == found[1] == found[2]


@pytest.mark.alone
def test_the_pool_is_what_the_least_gpu_has_room_for(folder, num_gpus):
    """The last GPU has less, because some of its memory is in use."""
    total, last = min(ops.memory_info(f"cuda:{i}")[1] for i in range(num_gpus)), num_gpus - 1
    taken = ops.empty(total // 20, "uint8", f"cuda:{last}")
    with LLM(folder, tensor_parallel_size=num_gpus, device="cuda", gpu_memory_utilization=0.2, max_num_seqs=8) as llm:
        used = [total - free for free, total in (ops.memory_info(f"cuda:{i}") for i in range(num_gpus))]
        assert 0.19 * total < used[last] < 0.2 * total
        assert all(abs(used[last] - each - taken.nbytes) < 0.01 * total for each in used[:last])
        generate(llm, requests_of(3, 9))


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_is_gone(folder, num_gpus, number):
    with engine(folder, num_gpus, num_blocks=400) as llm:
        requests = requests_of(4, 60)
        os.kill(process_of(num_gpus - 1), number)
        start = time.monotonic()
        outputs = generate(llm, requests)
        assert time.monotonic() - start < 12 and all(isinstance(output.error, RankError) for output in outputs)
        assert str(outputs[0].error).startswith(f"rank {num_gpus - 1} ")
    assert not children()
    with contextlib.suppress(ValueError):  # sums that did not come are NaN, of which the first GPU may tell
        ops.check_errors()


def test_more_ranks_than_gpus(folder, num_gpus):
    count = ops.build_info()["cuda_devices"]
    with pytest.raises(ValueError, match=f"tensor_parallel_size is {count} but from cuda:1 on there are {count - 1} GPUs"):
        engine(folder, count, device="cuda:1")
