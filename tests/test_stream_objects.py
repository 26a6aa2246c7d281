"""Stream and Event on a GPU; and what they, pinned memory and functions of a GPU alone say where there is none."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from busy_streams import busy, on_gpu

import pagedkv
from pagedkv import Event, Stream, ops

HAS_GPU = ops.build_info()["cuda_problem"] is None
OF_A_GPU = [ops.memory_info, ops.num_multiprocessors, ops.reload_context]


def open_ipc(device: str = "cuda"):
    return ops.open_ipc(bytes(64), 3, device)


OF_A_GPU.append(open_ipc)


# --- without a GPU


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
@pytest.mark.parametrize(
    "make",
    [Stream, Event, *OF_A_GPU, lambda: pagedkv.empty(3, pinned=True)],
    ids=["Stream", "Event", *(function.__name__ for function in OF_A_GPU), "pinned"],
)
def test_what_is_missing_is_said(make):
    expected = NotImplementedError if "CPU only" in ops.build_info()["cuda_problem"] else BufferError
    with pytest.raises(expected) as caught:
        make()
    assert str(caught.value) == ops.build_info()["cuda_problem"]


@pytest.mark.parametrize("what", [Stream, lambda d: Event(device=d), *OF_A_GPU])
def test_the_cpu_has_none(what):
    names = "|".join(["Stream", "Event", *(function.__name__ for function in OF_A_GPU)])
    with pytest.raises(NotImplementedError, match=f"({names}) is not available on cpu"):
        what("cpu")
    with pytest.raises(ValueError, match="device: 'tpu' is not a device"):
        what("tpu")


# --- streams


@pytest.mark.gpu
def test_stream_and_event(cuda):
    stream, other = Stream(), Stream("cuda:0")
    assert stream.device == cuda and stream.cuda_stream not in (0, 1, 2, other.cuda_stream)
    assert repr(stream) == f"Stream(device='cuda:0', cuda_stream={stream.cuda_stream:#x})"
    event = Event()
    assert event.query()
    event.synchronize()
    busy(stream)
    assert event.record(stream) is event and not event.query()
    other.wait(event)
    after = Event().record(other)
    assert not after.query()
    other.synchronize()
    assert event.query() and after.query()
    with pytest.raises(TypeError, match=r"event: must be a pagedkv\.Event, not 3"):
        stream.wait(3)


@pytest.mark.gpu
def test_timing(cuda):
    stream = Stream()
    start, end, plain = Event(timing=True), Event(True), Event()
    start.record(stream)
    busy(stream, 20)
    end.record(stream)
    plain.record(stream)
    end.synchronize()
    assert 5 < start.elapsed_ms(end) < 2000
    with pytest.raises(ValueError, match="both events must be made with timing=True"):
        start.elapsed_ms(plain)
    with pytest.raises(pagedkv.CudaError, match="cudaEventElapsedTime"):
        start.elapsed_ms(Event(True))


@pytest.mark.gpu
def test_which_stream_is_used(cuda):
    """An event on a stream is pending only while that stream has work."""
    stream, inner = Stream(), Stream()
    x = on_gpu(np.ones((4, 64), np.float32))
    ops.silu_and_mul(x)  # CUDA may wait for the device while it loads a kernel
    mark = Event()
    with stream:
        busy(inner, 20)
        mark.record()  # on this thread's stream, not on `inner`
        stream.synchronize()
        assert mark.query()
        with inner:
            assert not mark.record().query()
            with stream:
                stream.synchronize()
                mark.record()
                stream.synchronize()
                assert mark.query()
    inner.synchronize()
    with pytest.raises(RuntimeError, match="has not entered"):
        stream.__exit__(None, None, None)

    # An operation inside `with stream` is ordered behind the stream's work, and not behind another stream's.
    out, zeros = on_gpu(np.zeros((4, 32), np.float32)), np.zeros((4, 32), np.float32)
    with stream:
        busy(inner, 40)
        ops.silu_and_mul(x, out=out)
        stream.synchronize()
        assert not Event().record(inner).query()
    inner.synchronize()
    assert np.allclose(out.tolist(), 1 / (1 + np.exp(-1.0)))
    with stream:
        out.copy_(zeros)
        busy(inner, 40)
        ops.silu_and_mul(x, out=out, stream=inner)  # stream= wins
        assert not Event().record(inner).query()
        stream.synchronize()
        assert not Event().record(inner).query()
    inner.synchronize()
    assert out.tolist()[0][0] > 0.7


@pytest.mark.gpu
def test_torch_keeps_its_own_stream(cuda):
    torch = pytest.importorskip("torch")
    stream = Stream()
    x = torch.ones(4, 64, device="cuda")
    ops.silu_and_mul(x)
    torch.cuda.synchronize()
    busy(stream, 40)
    mark = Event().record(stream)
    with stream:
        out = ops.silu_and_mul(x)
        torch.cuda.current_stream().synchronize()
        assert not mark.query()
        assert torch.allclose(out, torch.full_like(out, 0.7310586))
        external = torch.cuda.ExternalStream(stream.cuda_stream)
        ops.silu_and_mul(x, out=out, stream=external)
    stream.synchronize()


@pytest.mark.gpu
def test_threads_have_streams_of_their_own(cuda):
    """Each thread's entered Stream is its own, and waiting releases the GIL."""
    stream = Stream()
    seen = {}

    def other() -> None:
        seen["idle"] = Event().record().query()  # the default stream here: idle
        seen["time"] = time.perf_counter()

    with stream:
        busy(stream, 100)
        thread = threading.Thread(target=other)
        thread.start()
        stream.synchronize()
        done = time.perf_counter()
        thread.join()
    assert seen["idle"] and seen["time"] < done


@pytest.mark.gpu
def test_a_tensor_made_on_a_stream_is_finished_for_its_consumer(cuda):
    torch = pytest.importorskip("torch")
    stream = Stream()
    x = on_gpu(np.full((4, 64), 2.0, np.float32))
    with stream:
        busy(stream, 40)
        out = ops.silu_and_mul(x)
    assert torch.from_dlpack(out).cpu().numpy() == pytest.approx(4 / (1 + np.exp(-2.0)))
