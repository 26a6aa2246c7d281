"""Pinned memory, memory_info, and the workspaces that a Stream gives back."""

from __future__ import annotations

import gc

import numpy as np
import pytest
from busy_streams import busy, on_gpu

import pagedkv
from pagedkv import Event, Stream, ops


def test_only_host_memory_is_pinned():
    assert not pagedkv.empty(3).is_pinned and not pagedkv.empty(3, pinned=False).is_pinned
    with pytest.raises(ValueError, match="only memory on the cpu can be pinned"):
        pagedkv.empty(3, device="cuda", pinned=True)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [2, 64])  # by a kernel, by a copy engine
def test_pinned_copies_are_not_waited_for(cuda, rng, num_rows):
    stream, shape = Stream(), (num_rows, 33)
    values = rng.standard_normal(shape).astype(np.float32)
    pinned = pagedkv.empty(shape, pinned=True)
    assert pinned.is_pinned and pinned.device == "cpu" and pinned[3:].is_pinned and pinned.view(-1).is_pinned
    assert repr(pinned) == f"Tensor(shape={shape}, dtype='float32', device='cpu', pinned=True)"
    pinned.copy_(values)
    device = pagedkv.empty(shape, device="cuda")
    back = pagedkv.empty(shape, pinned=True)
    device.copy_(np.zeros(shape, np.float32))
    back.copy_(device)  # a kernel's first use loads it, which may wait
    seen = back.numpy()  # later this would wait for the copy
    with stream:
        busy(stream, 30)
        device.copy_(pinned)
        back.copy_(device)
        done = Event().record()
        assert not done.query(), "a copy to pinned memory was waited for"
        assert not seen.any()
        plain = np.zeros(shape, np.float32)
        pagedkv.from_dlpack(plain).copy_(device)  # pageable: done when the call is back
        assert done.query()
    assert (plain == values).all() and (back.numpy() == values).all()


@pytest.mark.gpu
def test_pageable_memory_may_change_at_once(cuda, rng):
    stream = Stream()
    values = rng.standard_normal((1 << 20,)).astype(np.float32)
    expected, device = values.copy(), pagedkv.empty(1 << 20, device="cuda")
    with stream:
        device.copy_(values)
        values[:] = np.nan
        assert (np.array(device.tolist(), np.float32) == expected).all()


@pytest.mark.gpu
def test_pinned_memory_is_given_back(cuda):
    def locked() -> int:
        return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])

    before = locked()
    for _ in range(8):
        pagedkv.empty(256 << 20, "uint8", pinned=True)
    assert locked() - before < 300 << 10  # KiB
    pagedkv.empty(0, pinned=True)


@pytest.mark.gpu
def test_num_multiprocessors(cuda):
    torch = pytest.importorskip("torch")
    expected = torch.cuda.get_device_properties(0).multi_processor_count
    assert ops.num_multiprocessors() == ops.num_multiprocessors("cuda:0") == expected


@pytest.mark.alone
@pytest.mark.gpu
def test_memory_info(cuda):
    def is_exact() -> bool:
        free, total = ops.memory_info()
        assert 0 < free <= total
        block = pagedkv.empty(1 << 30, "uint8", "cuda")
        with_block = ops.memory_info("cuda:0")
        del block
        return with_block == (free - (1 << 30), total) and ops.memory_info() == (free, total)

    gc.collect()
    assert any(is_exact() for _ in range(50))  # other processes may take and give back memory between two looks


@pytest.mark.alone
@pytest.mark.gpu
def test_a_stream_gives_its_workspaces_back(cuda):
    def use() -> None:
        x = on_gpu(np.ones((16, 2048), np.float32))
        with Stream():
            ops.sample(
                pagedkv.asarray(np.ones((2, 200_000), np.float32), device="cuda"),
                *(on_gpu(a) for a in (np.ones(2, np.float32), np.arange(2), np.arange(2, dtype=np.int32))),
            )
            ops.linear(x, x)

    use()
    gc.collect()
    before = ops.memory_info()[0]
    for _ in range(600):  # more streams than have room in the table of workspaces
        use()
    gc.collect()
    assert before - ops.memory_info()[0] < 1 << 30  # 600 workspaces are 20 GiB; other processes may take a little
