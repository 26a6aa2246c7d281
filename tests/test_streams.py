"""What runs after what on a GPU: the one stream rule, the last writer of a Tensor, and that the host waits for nothing but
itself.

A side stream is kept busy for tens of milliseconds and then writes. Whoever reads too early reads NaN.
"""

from __future__ import annotations

import gc
import time

import numpy as np
import pytest
from busy_streams import BUSY, is_close, keep_busy, late, own, poisoned, side, silu_and_mul, x  # noqa: F401

import pagedkv
from pagedkv import Event, Stream, ops

pytestmark = pytest.mark.gpu


# --- handing a Tensor out


@pytest.mark.parametrize("kind", ["object", "int", "current", "ours"])
def test_torch_reads_after_the_write(torch, side, own, x, poisoned, kind):  # noqa: F811
    stream = Stream() if kind == "ours" else side
    external = torch.cuda.ExternalStream(stream.cuda_stream)
    keep_busy(torch, external)
    if kind == "current":
        mine = torch.from_numpy(x).cuda()
        torch.cuda.current_stream().synchronize()
        with torch.cuda.stream(side):
            ops.silu_and_mul(mine, out=poisoned)
    else:
        ops.silu_and_mul(own, out=poisoned, stream=stream.cuda_stream if kind == "int" else stream)
    start = time.perf_counter()
    result = torch.from_dlpack(poisoned) + 0
    seconds = time.perf_counter() - start
    assert not external.query(), "the host waited for the stream"
    assert is_close(result, silu_and_mul(x)) and seconds < 0.02


def test_the_consumer_says_its_stream(torch, side, own, x, poisoned):  # noqa: F811
    """To a consumer on another stream; -1 asks for no order, 0 names no stream."""
    third = torch.cuda.Stream()
    keep_busy(torch, side)
    ops.silu_and_mul(own, out=poisoned, stream=side)
    with torch.cuda.stream(third):
        result = torch.from_dlpack(poisoned) + 0
        third.synchronize()
    assert is_close(result, silu_and_mul(x))
    poisoned.__dlpack__(stream=-1)
    with pytest.raises(ValueError, match="stream: is 0 but must be None, -1, 1"):
        poisoned.__dlpack__(stream=0)
    copied = torch.utils.dlpack.from_dlpack(poisoned.__dlpack__(stream=side.cuda_stream, copy=True))
    side.synchronize()
    assert copied.data_ptr() != poisoned.data_ptr() and is_close(copied, silu_and_mul(x))


@pytest.mark.parametrize("how", ["tolist", "asarray", "copy_", "float16"])
def test_the_host_reads_after_the_write(torch, side, own, x, poisoned, how):  # noqa: F811
    keep_busy(torch, side)
    ops.silu_and_mul(own, out=poisoned, stream=side)
    if how == "tolist":
        result = poisoned.tolist()
    elif how == "asarray":
        result = pagedkv.asarray(poisoned, device="cpu").numpy()
    elif how == "float16":
        half = pagedkv.asarray(poisoned, "float16")
        result = pagedkv.asarray(half, "float32", "cpu").numpy()
        assert np.allclose(result, silu_and_mul(x), rtol=2e-3, atol=2e-3)
        return
    else:
        result = pagedkv.empty(poisoned.shape).copy_(poisoned).numpy()
    assert is_close(result, silu_and_mul(x))


@pytest.mark.parametrize("how", ["numpy", "tolist", "memoryview", "dlpack", "asarray", "operation"])
def test_pinned_memory_is_read_after_the_copy(torch, side, own, x, how):  # noqa: F811
    keep_busy(torch, side)
    pinned = pagedkv.empty(x.shape, pinned=True)
    pinned.numpy()[:] = np.nan
    pinned.copy_(own, stream=side)
    assert not side.query()
    read = {
        "numpy": lambda: pinned.numpy(),
        "tolist": lambda: np.array(pinned.tolist()),
        "memoryview": lambda: np.asarray(memoryview(pinned)),
        "dlpack": lambda: np.from_dlpack(pinned),
        "asarray": lambda: np.asarray(pagedkv.asarray(pinned, "float16").tolist()),
        "operation": lambda: ops.scale_columns(pinned, np.ones(512, np.float32)).numpy(),
    }
    assert np.allclose(read[how](), x, rtol=1e-3, atol=1e-3)


def test_only_the_write_is_waited_for(torch, side, own, x):  # noqa: F811
    """An Event that has been waited for says that the write before it is done, whatever is queued after it."""
    stream, pinned = Stream(), pagedkv.empty(x.shape, pinned=True)
    pinned.copy_(own)
    ops.synchronize("cuda")
    with stream:
        pinned.copy_(own)
        done = Event().record()
        keep_busy(torch, torch.cuda.ExternalStream(stream.cuda_stream))
        done.synchronize()
        assert pinned.tolist() == x.tolist()
        assert not Event().record().query(), "what was queued later was waited for, too"
    stream.synchronize()


# --- taking what is still being computed


@pytest.mark.parametrize("how", ["asarray", "float16", "from_dlpack", "tolist", "copy_"])
def test_a_value_of_torch_that_is_being_computed(torch, side, x, how):  # noqa: F811
    value = late(torch, x, side)
    with torch.cuda.stream(side):
        if how == "asarray":
            result = pagedkv.asarray(value, device="cpu")
        elif how == "float16":
            result = pagedkv.asarray(pagedkv.asarray(value, "float16"), "float32", "cpu")
        elif how == "copy_":
            result = pagedkv.asarray(pagedkv.empty(x.shape, device="cuda").copy_(value), device="cpu")
        else:
            shared = pagedkv.from_dlpack(value)
    if how == "from_dlpack":  # used where another stream is current
        result = ops.scale_columns(shared, pagedkv.asarray(np.ones(512, np.float32), device="cuda"))
    elif how == "tolist":
        result = np.array(shared.tolist())
    assert np.allclose(np.array(result.tolist()), x, rtol=1e-3, atol=1e-3)


def test_what_torch_writes_later_into_shared_memory(torch, side, x):  # noqa: F811
    """The host waits for the GPU where another library may have written."""
    value = torch.full(x.shape, float("nan"), device="cuda")
    source, shared = torch.from_numpy(x).cuda(), pagedkv.from_dlpack(value)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(BUSY)
        value.copy_(source)
    assert shared.tolist() == x.tolist()


# --- calls


def test_a_given_stream_comes_after_torchs(torch, side, x):  # noqa: F811
    """What torch has queued on its current stream is there for a call on another one."""
    with torch.cuda.stream(side):
        value = late(torch, x, side)
        other = torch.cuda.Stream()
        out = ops.silu_and_mul(value, stream=other)
        assert not other.query()
    other.synchronize()
    assert is_close(out, silu_and_mul(x))


def test_a_call_comes_after_the_write_of_its_tensors(torch, side, own, x, poisoned):  # noqa: F811
    keep_busy(torch, side)
    ops.silu_and_mul(own, out=poisoned, stream=side)
    ones = pagedkv.asarray(np.ones(256, np.float32), device="cuda")
    with Stream() as stream:
        copied = ops.scale_columns(poisoned, ones)  # on `stream`, after `side`
        stream.synchronize()
    assert is_close(copied.tolist(), silu_and_mul(x))


def test_a_write_comes_after_the_reads(torch, side, own, x, poisoned):  # noqa: F811
    """Several streams read what another one overwrites then."""
    streams = [torch.cuda.Stream() for _ in range(5)]
    source = pagedkv.asarray(silu_and_mul(x).astype(np.float32), device="cuda")
    nan = pagedkv.asarray(np.full((64, 256), np.nan, np.float32), device="cuda")
    copies = [pagedkv.empty((64, 256), device="cuda") for _ in streams]
    ops.synchronize("cuda")
    for stream, copy in zip(streams, copies, strict=True):
        keep_busy(torch, stream)
        copy.copy_(source, stream=stream)
    source.copy_(nan, stream=side)
    for copy in copies:
        assert is_close(copy.tolist(), silu_and_mul(x))
    assert np.isnan(source.tolist()).all()


@pytest.mark.parametrize("torch_first", [True, False])
def test_cupy_beside_torch(torch, side, x, torch_first):  # noqa: F811
    cupy = pytest.importorskip("cupy")
    weight = (np.arange(512) / 100).astype(np.float32)
    given_x = torch.from_numpy(x).cuda() if torch_first else cupy.asarray(x)
    cupy.cuda.Device().synchronize()
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        weights = late(torch, weight, side) if not torch_first else cupy.asarray(weight)
        cupy.cuda.Device().synchronize() if torch_first else None
        out = ops.scale_columns(given_x, weights)
        assert is_close(torch.from_dlpack(out), x * weight)


def test_cupy_writes_on_its_own_stream(torch, x):  # noqa: F811
    cupy = pytest.importorskip("cupy")
    stream = cupy.cuda.Stream(non_blocking=True)
    ones = torch.ones(512, device="cuda")
    with stream:
        value = cupy.full(x.shape, cupy.nan, dtype=cupy.float32)
        source = cupy.asarray(x)
        stream.synchronize()
        keep_busy(torch, torch.cuda.ExternalStream(stream.ptr))
        value[:] = source
        out = ops.scale_columns(value, ones)  # CuPy orders torch's stream after its own
    assert is_close(torch.from_dlpack(out), x)


def test_cupy_reads_what_was_written_for_it(torch, side, x):  # noqa: F811
    """Its array is written on torch's stream; CuPy goes on on the default one."""
    cupy = pytest.importorskip("cupy")
    out = cupy.full((64, 256), cupy.nan, dtype=cupy.float32)
    (ops.silu_and_mul(cupy.asarray(x), out=out) + 0).get()  # the kernels are loaded, which takes long
    out[:] = cupy.nan
    value = late(torch, x, side)
    with torch.cuda.stream(side):
        ops.silu_and_mul(value, out=out)
        assert not side.query()
    assert is_close((out + 0).get(), silu_and_mul(x))


def test_streams_that_are_gone(torch, own, x, poisoned):  # noqa: F811
    """Nobody touches a destroyed stream, whose address the next one has."""
    cupy = pytest.importorskip("cupy")
    expected = silu_and_mul(x)
    nan = pagedkv.asarray(np.full((64, 256), np.nan, np.float32), device="cuda")
    for _ in range(6):
        stream = cupy.cuda.Stream(non_blocking=True)
        keep_busy(torch, torch.cuda.ExternalStream(stream.ptr))
        ops.silu_and_mul(own, out=poisoned, stream=stream.ptr)
        del stream
        stream = cupy.cuda.Stream(non_blocking=True)
        copied = pagedkv.empty((64, 256), device="cuda").copy_(poisoned, stream=stream.ptr)
        stream.synchronize()
        assert is_close(copied.tolist(), expected)
        poisoned.copy_(nan)
    with Stream() as ours:
        ops.silu_and_mul(own, out=poisoned)
    del ours
    gc.collect()
    assert is_close(torch.from_dlpack(poisoned), expected)


def test_torchs_memory_is_not_given_away_early(torch, side, x):  # noqa: F811
    """An output of torch's on a given stream: dropped at once, its memory is not used again before the work is done."""
    value = torch.from_numpy(x).cuda()
    ops.silu_and_mul(value, stream=side)
    torch.cuda.synchronize()
    for _ in range(20):
        keep_busy(torch, side)
        out = ops.silu_and_mul(value, stream=side)
        del out
        later = torch.zeros(64, 256, device="cuda")
        side.synchronize()
        assert not later.any(), "memory was given away while a stream still wrote there"


def test_the_order_of_the_rule(torch, side, own, x, poisoned):  # noqa: F811
    """Given > captured > torch's > entered > legacy, by which stream the work waits in."""
    mine, entered = torch.from_numpy(x).cuda(), Stream()
    given = torch.cuda.Stream()
    torch.cuda.synchronize()

    def runs_on(stream, call) -> bool:
        torch.cuda.synchronize()
        keep_busy(torch, torch.cuda.ExternalStream(stream.cuda_stream))
        call()
        others = [s for s in (side, entered, given) if s.cuda_stream != stream.cuda_stream]
        for other in others:
            torch.cuda.ExternalStream(other.cuda_stream).synchronize()
        torch.cuda.default_stream().synchronize()
        was_late = np.isnan(peek(torch, poisoned)).any()
        torch.cuda.synchronize()
        poisoned.copy_(np.full((64, 256), np.nan, np.float32))
        torch.cuda.synchronize()
        return bool(was_late)

    with entered, torch.cuda.stream(side):
        assert runs_on(given, lambda: ops.silu_and_mul(own, out=poisoned, stream=given))
        assert runs_on(side, lambda: ops.silu_and_mul(mine, out=poisoned))
        assert runs_on(entered, lambda: ops.silu_and_mul(own, out=poisoned))
        with pytest.raises(TypeError, match="stream: must be None, an int"):
            ops.silu_and_mul(own, out=poisoned, stream=True)


def peek(torch, tensor: pagedkv.Tensor) -> np.ndarray:
    """Its bytes now, by a stream that waits for nobody."""
    host = torch.empty(tensor.shape, pin_memory=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        view = torch.utils.dlpack.from_dlpack(tensor.__dlpack__(stream=-1))
        host.copy_(view, non_blocking=True)
        stream.synchronize()
    return host.numpy().copy()
