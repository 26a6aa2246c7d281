"""Stream, Event, Graph, pinned memory, memory_info, reload_context: on a GPU, and what each says where there is none."""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
import time

import numpy as np
import pytest

import pagedkv
from pagedkv import Event, Graph, Stream, ops

HAS_GPU = ops.build_info()["cuda_problem"] is None


def on_gpu(array: np.ndarray) -> pagedkv.Tensor:
    return pagedkv.asarray(array, device="cuda:0")


@functools.cache
def large_matrices() -> tuple[pagedkv.Tensor, pagedkv.Tensor]:
    """Kept: freeing memory would wait for the GPU."""
    return pagedkv.empty((8192, 8192), "bfloat16", "cuda:0"), pagedkv.empty((8192, 8192), "bfloat16", "cuda:0")


def busy(stream: Stream, milliseconds: float = 20) -> None:
    """Keeps the stream at work for at least so long."""
    x, out = large_matrices()
    for _ in range(int(milliseconds / 1.2) + 1):  # 8192^3 takes 1.4 ms at 800 TFLOP/s
        ops.linear(x, x, out=out, stream=stream)


# --- without a GPU


@pytest.mark.skipif(HAS_GPU, reason="there is a GPU")
@pytest.mark.parametrize(
    "make",
    [Stream, Event, ops.memory_info, ops.reload_context, lambda: pagedkv.empty(3, pinned=True)],
    ids=["Stream", "Event", "memory_info", "reload_context", "pinned"],
)
def test_what_is_missing_is_said(make):
    expected = NotImplementedError if "CPU only" in ops.build_info()["cuda_problem"] else BufferError
    with pytest.raises(expected) as caught:
        make()
    assert str(caught.value) == ops.build_info()["cuda_problem"]


@pytest.mark.parametrize("what", [Stream, lambda d: Event(device=d), ops.memory_info, ops.reload_context])
def test_the_cpu_has_none(what):
    with pytest.raises(NotImplementedError, match="(Stream|Event|memory_info|reload_context) is not available on cpu"):
        what("cpu")
    with pytest.raises(ValueError, match="device: 'tpu' is not a device"):
        what("tpu")


def test_a_graph_that_is_not_captured():
    graph = Graph()
    assert repr(graph) == "Graph(not captured)" and graph.num_nodes == 0
    with pytest.raises(RuntimeError, match="not captured yet"):
        graph.replay()
    with pytest.raises(RuntimeError, match="entered once, by"):
        graph.__enter__()
    with pytest.raises(RuntimeError, match="not being captured"):
        graph.__exit__(None, None, None)
    with pytest.raises(TypeError, match=r"stream: must be a pagedkv\.Stream, not 7"):
        graph.capture(7)


def test_only_host_memory_is_pinned():
    assert not pagedkv.empty(3).is_pinned and not pagedkv.empty(3, pinned=False).is_pinned
    with pytest.raises(ValueError, match="only memory on the cpu can be pinned"):
        pagedkv.empty(3, device="cuda", pinned=True)


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


# --- pinned memory


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
def test_reload_context_changes_nothing(cuda, rng):
    x, out = on_gpu(rng.standard_normal((3, 8)).astype(np.float32)), pagedkv.empty((3, 4), device="cuda")
    expected = ops.silu_and_mul(x).tolist()
    stream, graph = Stream(), Graph()
    with graph.capture(stream):
        ops.silu_and_mul(x, out=out)
    lost = []
    for _ in range(3):
        before = ops.memory_info()[0]
        ops.reload_context("cuda:0")
        lost.append(before - ops.memory_info()[0])
    assert min(lost) <= 64 << 20  # what other processes take comes and goes
    graph.replay(stream)
    stream.synchronize()
    assert out.tolist() == expected == ops.silu_and_mul(x).tolist()


class EmptyKernel:
    """Launched by the driver's interface, as other libraries of the process would: pagedkv's own launches, which may
    start early, do not bring the slow state about."""

    PTX = b".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry nothing() { ret; }\n\0"

    def __init__(self) -> None:
        self.driver = ctypes.CDLL("libcuda.so.1")
        context, module, self.function = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        self.check(self.driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
        self.check(self.driver.cuCtxSetCurrent(context))
        self.check(self.driver.cuModuleLoadData(ctypes.byref(module), self.PTX))
        self.check(self.driver.cuModuleGetFunction(ctypes.byref(self.function), module, b"nothing"))

    def check(self, result: int) -> None:
        assert result == 0, f"CUresult {result}"

    def launch(self, stream: Stream) -> None:
        handle = ctypes.c_void_p(stream.cuda_stream)
        self.check(self.driver.cuLaunchKernel(self.function, 1, 1, 1, 32, 1, 1, 0, handle, None, None))


@pytest.mark.alone
@pytest.mark.gpu
def test_launches_become_fast_again(cuda):
    """Kernels of several streams in turn make launches slow; a look notices, and the next one finds them fast."""
    ops.reload_context("cuda:0")
    streams, kernel = [Stream() for _ in range(9)], EmptyKernel()
    graph, begin, end = Graph(), Event(timing=True), Event(timing=True)
    with graph.capture(streams[0]):
        for _ in range(100):
            kernel.launch(streams[0])

    def graph_ms() -> float:
        times = []
        for _ in range(5):
            graph.replay(streams[0])
            begin.record(streams[0])
            graph.replay(streams[0])
            end.record(streams[0]).synchronize()
            times.append(begin.elapsed_ms(end))
        return min(times)

    def look() -> bool:
        while (is_slow := streams[0].watch_launches()) is None:
            streams[0].synchronize()
        return is_slow

    looks = [look() for _ in range(8)]  # the first ones may find the clock low
    assert looks[-1] is False
    fast = graph_ms()
    for _ in range(4):
        for other in streams[1:] * 4:
            for stream in (other, streams[0]):
                kernel.launch(stream)
                stream.synchronize()
        slow = graph_ms()
        print(f"{fast * 1e3:.1f} us, after turns {slow * 1e3:.1f} us")
        if slow < 1.15 * fast:
            pytest.skip("this driver has no slow state")
        assert look() is True
        assert look() is False and graph_ms() < 1.1 * fast


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


# --- graphs


@pytest.mark.gpu
def test_a_graph_repeats_its_work_on_new_values(cuda, rng):
    stream = Stream()
    x, hidden, out = (pagedkv.empty((5, n), device="cuda") for n in (64, 32, 32))
    weight = rng.standard_normal(32).astype(np.float32)
    weight_there = on_gpu(weight)
    out.copy_(np.zeros((5, 32), np.float32))
    ops.synchronize("cuda")
    graph = Graph()
    with graph.capture(stream) as entered:
        assert entered is graph
        ops.silu_and_mul(x, out=hidden)
        ops.rms_norm(hidden, weight_there, out=out)
    assert graph.num_nodes == 2 and repr(graph) == "Graph(device='cuda:0', num_nodes=2)"
    stream.synchronize()
    assert not np.array(out.tolist()).any(), "a capture runs nothing"
    for replay_on in (None, stream, Stream()):
        values = rng.standard_normal((5, 64)).astype(np.float32)
        x.copy_(values, stream=replay_on or stream)
        graph.replay(replay_on)
        (replay_on or stream).synchronize()
        gate, up = values[:, :32].astype(np.float64), values[:, 32:]
        expected = gate / (1 + np.exp(-gate)) * up
        expected /= np.sqrt((expected**2).mean(axis=1, keepdims=True) + 1e-6)
        assert np.abs(np.array(out.tolist()) - expected * weight).max() < 1e-4
    with pytest.raises(RuntimeError, match="captured already"):
        graph.capture(stream)


@pytest.mark.gpu
def test_an_error_inside_a_capture_comes_out_as_it_is(cuda):
    stream = Stream()
    x = on_gpu(np.ones((4, 64), np.float32))
    out = on_gpu(np.ones((4, 32), np.float32))
    graph = Graph()
    with pytest.raises(ValueError, match="out: dim 1 is 64"), graph.capture(stream):
        ops.silu_and_mul(x, out=x)
    with pytest.raises(pagedkv.CudaError, match="cudaDeviceSynchronize: cudaErrorStreamCapture"), graph.capture(stream):
        ops.silu_and_mul(x, out=out)
        ops.synchronize("cuda")
    with pytest.raises(pagedkv.CudaError, match="cudaStreamEndCapture"), graph.capture(stream):  # swallowed inside
        try:
            stream.synchronize()
        except pagedkv.CudaError:
            pass
    assert graph.num_nodes == 0
    with graph.capture(stream):
        with pytest.raises(RuntimeError, match="captured already"):
            graph.capture(stream)
        ops.silu_and_mul(x, out=out)
    graph.replay()
    stream.synchronize()
    assert out.tolist()[3][31] == pytest.approx(0.7310586)
    with pytest.raises(RuntimeError, match="has not entered"):
        stream.__exit__(None, None, None)


@pytest.mark.alone
@pytest.mark.gpu
def test_graphs_give_their_memory_back(cuda):
    stream = Stream()
    x = on_gpu(np.ones((4, 64), np.float32))
    out = on_gpu(np.ones((4, 32), np.float32))

    def capture() -> Graph:
        graph = Graph()
        with graph.capture(stream):
            for _ in range(500):
                ops.silu_and_mul(x, out=out)
        graph.replay()
        return graph

    for _ in range(5):
        capture()
    stream.synchronize()
    before = ops.memory_info()[0]
    for _ in range(100):
        capture()
    stream.synchronize()
    assert before - ops.memory_info()[0] <= 32 << 20  # the driver keeps some


@pytest.mark.gpu
def test_a_graph_outlives_its_stream(cuda):
    graph, stream = Graph(), Stream()
    x = on_gpu(np.ones((16, 64), np.float32))
    out = on_gpu(np.zeros((16, 16), np.float32))
    with graph.capture(stream):
        ops.linear(x, x, out=out)  # has its workspace from the stream
    del stream
    gc.collect()
    graph.replay()
    ops.synchronize("cuda")
    assert out.tolist()[7][7] == 64


@pytest.mark.gpu
def test_what_a_capture_lets_go_of(cuda):
    x = on_gpu(np.ones((16, 64), np.float32))
    out = on_gpu(np.zeros((16, 16), np.float32))
    stream, graph, other = Stream(), Graph(), Graph()
    with other.capture(stream):
        ops.linear(x, x, out=out)
    with pytest.raises(ZeroDivisionError), Graph().capture(stream):
        raise ZeroDivisionError
    assert gc.isenabled()
    with graph.capture(stream):
        assert not gc.isenabled()
        del other  # destroying a graph, memory or a stream does not end the capture
        pagedkv.empty(1 << 20, "uint8", "cuda")
        Stream()
        ops.linear(x, x, out=out)
    assert gc.isenabled() and graph.num_nodes > 0
    graph.replay()
    ops.synchronize("cuda")
    assert out.tolist()[7][7] == 64
