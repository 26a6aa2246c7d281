"""Tensors of an ElasticBuffer keep its memory: here, in other libraries, threads, a forked child and graphs."""

from __future__ import annotations

import gc
import os

import numpy as np
import pytest
from elastic_buffers import MIB, address, fill, to_numpy
from threads import in_threads

import pagedkv
from pagedkv import Graph, Stream, ops
from pagedkv.ops import ElasticBuffer


def test_living_tensors_keep_their_memory(device: str) -> None:
    buffer = ElasticBuffer(64 * MIB, device)
    buffer.resize(32 * MIB)
    large, small = buffer.tensor(16 * MIB, "uint8"), buffer.tensor(MIB, "uint8")
    buffer.resize(16 * MIB)
    with pytest.raises(BufferError, match=f"shrink to {8 * MIB} bytes while it has tensors that need {16 * MIB}"):
        buffer.resize(8 * MIB)
    part = large[:1]
    del large
    with pytest.raises(BufferError, match=f"need {16 * MIB}"):
        buffer.resize(8 * MIB)
    del part
    with pytest.raises(BufferError, match=f"need {16 * MIB}"):  # the largest since there was none
        buffer.resize(8 * MIB)
    del small
    buffer.resize(0)
    assert buffer.size == 0


def test_a_reserved_tensor_lets_the_buffer_shrink(device: str) -> None:
    buffer = ElasticBuffer(64 * MIB, device)
    pages = buffer.tensor((64, MIB), "uint8", reserved=True)
    buffer.resize(48 * MIB)
    fill(pages[40], np.full(MIB, 7, np.uint8))
    fill(pages[3], np.full(MIB, 5, np.uint8))
    buffer.resize(8 * MIB)
    assert (to_numpy(pages[3]) == 5).all()
    buffer.resize(64 * MIB)
    fill(pages[63], np.full(MIB, 9, np.uint8))
    assert (to_numpy(pages[3]) == 5).all() and (to_numpy(pages[63]) == 9).all()


def test_a_tensor_outlives_the_buffer(device: str, rng: np.random.Generator) -> None:
    expected = rng.standard_normal((3, 1000)).astype(np.float32)
    buffer = ElasticBuffer(MIB, device)
    buffer.resize(MIB)
    part = buffer.tensor((4, 1000))[1:]
    fill(part, expected)
    del buffer
    gc.collect()
    np.testing.assert_array_equal(to_numpy(part), expected)


def test_numpy_keeps_the_memory() -> None:
    buffer = ElasticBuffer(MIB)
    buffer.resize(MIB)
    array = buffer.tensor((16, 16), "int32").numpy()
    array[:] = 3
    with pytest.raises(BufferError, match=f"need {16 * 16 * 4}"):
        buffer.resize(0)
    assert buffer.tensor(256, "int32").tolist() == [3] * 256
    del array
    buffer.resize(0)


def test_torch_keeps_the_memory(device: str) -> None:
    torch = pytest.importorskip("torch")
    buffer = ElasticBuffer(MIB, device)
    buffer.resize(MIB)
    tensor = torch.from_dlpack(buffer.tensor((8, 8), "bfloat16"))
    assert (str(tensor.device), tensor.dtype, tensor.data_ptr()) == (device, torch.bfloat16, address(buffer))
    tensor.fill_(2.5)
    with pytest.raises(BufferError, match="need 128"):
        buffer.resize(0)
    assert (to_numpy(pagedkv.asarray(buffer.tensor((8, 8), "bfloat16"), dtype="float32")) == 2.5).all()
    del tensor
    buffer.resize(0)


def test_operations_work_in_it(device: str, rng: np.random.Generator) -> None:
    buffer = ElasticBuffer(64 * MIB, device)
    caches = buffer.tensor((2, 1000, 16, 2, 64), reserved=True)
    buffer.resize(2 * 1000 * 16 * 2 * 64 * 4)
    key = rng.standard_normal((5, 2, 64)).astype(np.float32)
    value = rng.standard_normal((5, 2, 64)).astype(np.float32)
    slots = np.array([3, 15999, -1, 17, 8000], np.int32)
    pagedkv.store_kvcache(*(pagedkv.asarray(x, device=device) for x in (key, value)), caches[0], caches[1],
                          pagedkv.asarray(slots, device=device))  # fmt: skip
    for cache, new in zip(to_numpy(caches).reshape(2, 16000, 2, 64), (key, value), strict=True):
        np.testing.assert_array_equal(cache[slots[slots >= 0]], new[slots >= 0])


# --- threads, fork, graphs


def test_threads_take_turns(device: str, seed: int) -> None:
    """Some resize; others make tensors, which a shrink refuses to cut."""
    buffer = ElasticBuffer(64 * MIB, device)

    def resize(rng: np.random.Generator) -> None:
        try:
            buffer.resize(int(rng.integers(0, 64 * MIB)))
        except BufferError:
            pass  # another thread's tensor

    def use(rng: np.random.Generator) -> None:
        try:
            tensor = buffer.tensor(int(rng.integers(1, 64 * MIB)), "uint8")
        except ValueError:
            return  # smaller than that now
        number = int(rng.integers(0, 256))
        fill(tensor[-1:], np.array([number], np.uint8))
        assert tensor[-1:].shape == (1,)

    def work(number: int) -> None:
        rng = np.random.default_rng([seed, number])
        for _ in range(60):
            (use if number % 2 else resize)(rng)

    in_threads(work, range(6))
    buffer.resize(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_a_forked_child_has_a_copy() -> None:
    buffer = ElasticBuffer(16 * MIB)
    buffer.resize(4 * MIB)
    array = buffer.tensor(4 * MIB, "uint8", reserved=True).numpy()
    array[:] = 1
    child = os.fork()
    if child == 0:
        array[:] = 2
        buffer.resize(MIB)
        buffer.resize(16 * MIB)
        is_right = (array[:MIB] == 2).all() and (array[MIB:] == 0).all()
        os._exit(0 if is_right else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (array == 1).all()


@pytest.mark.gpu
def test_a_graph_outlasts_growing_and_shrinking(cuda: str, rng: np.random.Generator) -> None:
    buffer = ElasticBuffer(256 * MIB, cuda)
    pages = buffer.tensor((256, MIB // 4), reserved=True)
    buffer.resize(16 * MIB)
    source = pagedkv.asarray(rng.standard_normal(MIB // 4).astype(np.float32), device=cuda)
    stream, graph = Stream(cuda), Graph()
    with graph.capture(stream):
        pages[2].copy_(source)
        pages[5].copy_(pages[2])
    for size in (16, 200, 64, 8, 256, 6):
        buffer.resize(size * MIB)
        expected = rng.standard_normal(MIB // 4).astype(np.float32)
        fill(source, expected)
        graph.replay()
        np.testing.assert_array_equal(to_numpy(pages[5]), expected)


@pytest.mark.gpu
def test_shrinking_waits_for_the_gpu(cuda: str) -> None:
    """Without the wait the last kernels would find no memory, which every later call would report."""
    buffer = ElasticBuffer(512 * MIB, cuda)
    pages = buffer.tensor((2, 256 * MIB), "uint8", reserved=True)
    buffer.resize(512 * MIB)
    stream = Stream(cuda)
    with stream:
        for i in range(200):
            pages[i % 2].copy_(pages[1 - i % 2])
    buffer.resize(0)
    ops.synchronize(cuda)


@pytest.mark.gpu
def test_no_shrinking_in_a_capture(cuda: str) -> None:
    buffer = ElasticBuffer(64 * MIB, cuda)
    buffer.resize(32 * MIB)
    tensor = buffer.tensor(4 * MIB, "uint8")
    graph, stream = Graph(), Stream(cuda)
    with graph.capture(stream):
        buffer.resize(64 * MIB)
        tensor[:MIB].copy_(tensor[MIB : 2 * MIB])
        with pytest.raises(RuntimeError, match="cannot shrink while a Graph is being captured"):
            buffer.resize(32 * MIB)
    graph.replay()
    ops.synchronize(cuda)
    with pytest.raises(BufferError, match="tensors that need"):  # the graph's
        del tensor
        buffer.resize(0)
    del graph
    buffer.resize(0)
