"""Two GPUs in one process: calls that mix them are refused by name or work, and what belongs to a GPU is its own."""

from __future__ import annotations

import numpy as np
import pytest
from busy_streams import BUSY, is_close, silu_and_mul

import pagedkv
from pagedkv import Event, Graph, Stream, ops

pytestmark = pytest.mark.gpu


@pytest.fixture
def two(torch) -> tuple[str, str]:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU only")
    return "cuda:0", "cuda:1"


@pytest.fixture
def x(rng) -> np.ndarray:
    return rng.standard_normal((64, 512)).astype(np.float32)


def keep_busy(torch, stream, device: str) -> None:
    index = int(device[-1])
    with torch.cuda.device(index), torch.cuda.stream(torch.cuda.ExternalStream(stream.cuda_stream, device=index)):
        torch.cuda._sleep(BUSY)


@pytest.mark.parametrize("turn", [0, 1])
def test_a_copy_between_gpus_comes_after_the_write(torch, two, x, turn):
    here, there = two[turn], two[1 - turn]
    own, stream = pagedkv.asarray(x, device=here), Stream(here)
    written = pagedkv.asarray(np.full((64, 256), np.nan, np.float32), device=here)
    ops.silu_and_mul(own)
    target = pagedkv.asarray(np.full((64, 256), np.nan, np.float32), device=there)
    for device in two:
        ops.synchronize(device)
    keep_busy(torch, stream, here)
    ops.silu_and_mul(own, out=written, stream=stream)
    target.copy_(written)
    keep_busy(torch, stream, here)
    own.copy_(np.full(x.shape, np.nan, np.float32))  # after the read
    assert is_close(target.tolist(), silu_and_mul(x))
    again = pagedkv.asarray(target, device=here)
    assert is_close(torch.from_dlpack(again), silu_and_mul(x))
    rows = pagedkv.empty((64, 100), device=there).copy_(written[:, 100:200])
    assert is_close(rows.tolist(), silu_and_mul(x)[:, 100:200])


@pytest.mark.parametrize("owner", ["ours", "torch"])
@pytest.mark.parametrize("turn", [0, 1])
def test_swap_between_gpus(torch, two, rng, owner, turn):
    here, there = two[turn], two[1 - turn]
    source, target = (rng.standard_normal((9, 4, 2, 8)).astype(np.float32) for _ in range(2))
    pairs = np.stack([rng.permutation(9)[:5], rng.permutation(9)[:5]], 1)
    if owner == "ours":
        src, dst = pagedkv.asarray(source, device=here), pagedkv.asarray(target, device=there)
    else:
        src, dst = torch.from_numpy(source).to(here), torch.from_numpy(target).to(there)
    pagedkv.swap_blocks([src, src[:, :, :1].contiguous()] if owner == "torch" else src,
                        [dst, dst[:, :, :1].clone()] if owner == "torch" else dst, pairs)  # fmt: skip
    expected = target.copy()
    expected[pairs[:, 1]] = source[pairs[:, 0]]
    result = np.array(dst.tolist()) if owner == "ours" else (dst + 0).cpu().numpy()
    assert np.array_equal(result.astype(np.float32), expected)


def test_what_mixes_gpus_is_refused_by_name(torch, two, x):
    here, there = two
    own, foreign, stream = pagedkv.asarray(x, device=here), Stream(there), torch.cuda.Stream(device=1)
    out = pagedkv.empty((64, 256), device=there)
    with pytest.raises(BufferError, match="out: is on cuda:1 but x is on cuda:0"):
        ops.silu_and_mul(own, out=out)
    with pytest.raises(BufferError, match="stream: is of cuda:1 but the work is cuda:0's"):
        ops.silu_and_mul(own, stream=foreign)
    with pytest.raises(BufferError, match="stream: is of cuda:1 but the work is cuda:0's"):
        ops.silu_and_mul(own, stream=stream)
    with pytest.raises(BufferError, match="stream: is of cuda:1 but this is of cuda:0"):
        Event(device=here).record(foreign)
    with pytest.raises(BufferError, match=r"caches\[1\]: is on another device than the first cache"):
        pagedkv.copy_blocks([own, out], np.array([[0, 1]]))
    with Graph().capture(Stream(here)), pytest.raises(RuntimeError, match="and work of cuda:1 would be no part of it"):
        ops.silu_and_mul(pagedkv.empty((4, 8), device=there), out=pagedkv.empty((4, 4), device=there))
    with foreign:  # an entered Stream of another GPU is not meant
        assert is_close(ops.silu_and_mul(own).tolist(), silu_and_mul(x))


def test_each_gpu_has_its_own_current_stream(torch, two, x):
    """Torch's current stream of the tensors' GPU counts, whichever GPU is current."""
    side = torch.cuda.Stream(device=1)
    value = torch.full(x.shape, float("nan"), device="cuda:1")
    source = torch.from_numpy(x).to("cuda:1")
    ops.silu_and_mul(source)
    torch.cuda.synchronize(1)
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY)
        value.copy_(source)
    torch.cuda.set_device(0)
    with torch.cuda.device(1), torch.cuda.stream(side), torch.cuda.device(0):
        out = ops.silu_and_mul(value)
        assert torch.cuda.current_device() == 0
    side.synchronize()
    assert is_close(out, silu_and_mul(x))


def test_errors_scratch_and_events_are_of_one_gpu(two, rng):
    results, table = [], rng.standard_normal((7, 8)).astype(np.float32)
    for device in two:
        ids = pagedkv.asarray(np.array([1, 9], np.int32), device=device)
        ops.gather_rows(pagedkv.asarray(table, device=device), ids)
        logits = pagedkv.asarray(rng.standard_normal((3, 5000)).astype(np.float32), device=device)
        zeros = (pagedkv.asarray(np.zeros(3, dtype), device=device) for dtype in (np.float32, np.int64, np.int32))
        results.append(ops.sample(logits, *zeros))
    with pytest.raises(ValueError, match="id 9 .*cuda:1"):
        ops.check_errors("cuda:1")
    ops.check_errors("cuda:1")
    with pytest.raises(ValueError, match="id 9 .*cuda:0"):
        ops.check_errors("cuda:0")
    assert all(len(result.tolist()) == 3 for result in results)
    first, second = Stream(two[0]), Stream(two[1])
    second.wait(Event(device=two[0]).record(first))
    second.synchronize()
