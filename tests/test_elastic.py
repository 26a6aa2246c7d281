"""ElasticBuffer: memory that grows and shrinks in place, on both devices."""

from __future__ import annotations

import gc
import os
import re
import resource
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import pagedkv
from pagedkv import Graph, Stream, Tensor, ops
from pagedkv.ops import ElasticBuffer

MIB = 1 << 20


def to_numpy(tensor: Tensor) -> np.ndarray:
    return pagedkv.asarray(tensor, device="cpu").numpy()


def fill(tensor: Tensor, array: np.ndarray) -> None:
    tensor.copy_(pagedkv.asarray(array))


def address(buffer: ElasticBuffer) -> int:
    return buffer.tensor(0).data_ptr()


def resident_bytes(low: int, high: int) -> int:
    """Of the addresses from low to high, by the kernel: what else the process frees meanwhile does not count."""
    resident, is_inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if mapping := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            is_inside = low <= int(mapping[1], 16) and int(mapping[2], 16) <= high
        elif is_inside and line.startswith("Rss:"):
            resident += 1024 * int(line.split()[1])
    return resident


def bytes_in_use(device: str, start: int, capacity: int) -> int:
    if device == "cpu":
        return resident_bytes(start, start + capacity)
    free, total = ops.memory_info(device)
    return total - free


# --- one buffer


def test_a_new_buffer_is_empty(device: str) -> None:
    buffer = ElasticBuffer(1, device)
    assert (buffer.size, buffer.capacity, buffer.device) == (0, buffer.granularity, device)
    assert buffer.granularity & (buffer.granularity - 1) == 0
    assert repr(buffer) == f"ElasticBuffer(size=0, capacity={buffer.capacity}, device='{device}')"
    assert buffer.tensor((0, 3), "int64").shape == (0, 3)
    buffer.resize(0)
    assert buffer.size == 0


@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_sizes_are_rounded_up(device: str, extra: int) -> None:
    buffer = ElasticBuffer(40 * MIB, device)
    wanted = 3 * buffer.granularity + extra
    buffer.resize(wanted)
    assert buffer.size == -(-wanted // buffer.granularity) * buffer.granularity
    buffer.resize(wanted - buffer.granularity)
    assert buffer.size == -(-wanted // buffer.granularity) * buffer.granularity - buffer.granularity


def test_all_of_the_capacity(device: str) -> None:
    buffer = ElasticBuffer(10 * MIB + 1, device)
    buffer.resize(buffer.capacity)
    fill(buffer.tensor(buffer.size, "uint8")[-4:], np.arange(4, dtype=np.uint8))
    assert to_numpy(buffer.tensor(buffer.size, "uint8")[-4:]).tolist() == [0, 1, 2, 3]


def test_content_stays_and_so_does_the_address(device: str, rng: np.random.Generator) -> None:
    buffer = ElasticBuffer(64 * MIB, device)
    buffer.resize(3 * MIB)
    start, size = address(buffer), buffer.size
    expected = rng.integers(0, 256, size, dtype=np.uint8)
    before = buffer.tensor(size, "uint8")
    fill(before, expected)
    buffer.resize(50 * MIB)
    after = buffer.tensor((2, size), "uint8")
    fill(after[1], expected[::-1].copy())
    assert address(buffer) == start == before.data_ptr()
    np.testing.assert_array_equal(to_numpy(before), expected)
    np.testing.assert_array_equal(to_numpy(after), np.stack([expected, expected[::-1]]))


def test_random_resizes(device: str, rng: np.random.Generator) -> None:
    """The oracle is one array in NumPy, in which what a resize has taken away is unknown."""
    capacity = 96 * MIB
    buffer = ElasticBuffer(capacity, device)
    start, expected, known = address(buffer), np.zeros(capacity, np.uint8), np.zeros(capacity, bool)
    for _ in range(40):
        limit = int(rng.choice([0, 1, 4097, MIB, 2 * MIB, 9 * MIB, capacity]))
        wanted = int(rng.integers(0, limit + 1))
        buffer.resize(wanted)
        assert wanted <= buffer.size < wanted + buffer.granularity
        known[buffer.size :] = False
        if buffer.size:
            low = int(rng.integers(0, buffer.size))
            high = min(buffer.size, low + int(rng.integers(1, MIB)))
            expected[low:high] = rng.integers(0, 256, high - low, dtype=np.uint8)
            known[low:high] = True
            fill(buffer.tensor(buffer.size, "uint8")[low:high], expected[low:high])
        is_right = to_numpy(buffer.tensor(buffer.size, "uint8")) == expected[: buffer.size]
        assert is_right[known[: buffer.size]].all()
        assert address(buffer) == start


@pytest.mark.alone
def test_memory_comes_back(device: str) -> None:
    def used() -> int:
        return bytes_in_use(device, start, capacity) - before

    gc.collect()
    ops.synchronize(device)
    buffer = ElasticBuffer(1 << 40, device)
    start, capacity = address(buffer), buffer.capacity
    before = bytes_in_use(device, start, capacity)
    for _ in range(3):
        buffer.resize(256 * MIB)
        fill(buffer.tensor(256 * MIB, "uint8"), np.ones(256 * MIB, np.uint8))
        assert used() > 240 * MIB
        buffer.resize(64 * MIB)
        assert 48 * MIB < used() < 96 * MIB
    del buffer
    assert used() < 32 * MIB


# --- errors


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: ElasticBuffer(0), ValueError, "capacity: is 0 but must be at least 1"),
        (lambda: ElasticBuffer(-5), ValueError, "capacity: is -5 but must be at least 1"),
        (lambda: ElasticBuffer(2**63), ValueError, "capacity: 9223372036854775808 does not fit in 64 bits"),
        (lambda: ElasticBuffer(2**63 - 1), MemoryError, "mmap: cannot reserve 9223372036854775808 bytes of addresses"),
        (lambda: ElasticBuffer(1.5), TypeError, "capacity: must be an int, not 'float'"),
        (lambda: ElasticBuffer(), TypeError, "missing 1 required positional argument: 'capacity'"),
        (lambda: ElasticBuffer(1, "tpu"), ValueError, "device: 'tpu' is not a device"),
        (lambda: ElasticBuffer(8192).resize(-1), ValueError, "num_bytes: is -1 but must be in [0, 8192]"),
        (lambda: ElasticBuffer(8192).resize(8193), ValueError, "num_bytes: is 8193 but must be in [0, 8192]"),
        (lambda: ElasticBuffer(8192).resize(2**70), ValueError, "does not fit in 64 bits"),
        (lambda: ElasticBuffer(8192).resize("1"), TypeError, "num_bytes: must be an int, not 'str'"),
        (lambda: ElasticBuffer(8192).tensor(1), ValueError, "shape: 1 of float32 takes more than the size of 0 bytes"),
        (
            lambda: ElasticBuffer(8192).tensor((2049,), reserved=True),
            ValueError,
            "shape: (2049,) of float32 takes more than the capacity of 8192 bytes",
        ),
        (lambda: ElasticBuffer(8192).tensor((2**40, 2**40), reserved=True), ValueError, "takes more than the capacity"),
        (lambda: ElasticBuffer(8192).tensor((0, 2**62, 8)), ValueError, "takes more than the size"),
        (lambda: ElasticBuffer(8192).tensor(-1), ValueError, "shape: a size is -1 but must be at least 0"),
        (lambda: ElasticBuffer(8192).tensor(0, "int7"), TypeError, "dtype: 'int7' is not a dtype"),
    ],
)
def test_bad_values(call, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        call()


@pytest.mark.skipif(ops.build_info()["cuda_problem"] is None, reason="there is a GPU")
def test_without_a_gpu_the_error_is_that_of_other_functions() -> None:
    with pytest.raises((BufferError, NotImplementedError)) as expected:
        pagedkv.empty(1, device="cuda")
    with pytest.raises(expected.type, match=f"^{re.escape(str(expected.value))}$"):
        ElasticBuffer(1, "cuda")


def test_more_than_the_host_has_changes_nothing(rng: np.random.Generator) -> None:
    """A limit of this process stands for a host that has no more."""
    buffer = ElasticBuffer(1 << 36)
    buffer.resize(MIB)
    expected = rng.integers(0, 256, MIB, dtype=np.uint8)
    fill(buffer.tensor(MIB, "uint8"), expected)
    limits = resource.getrlimit(resource.RLIMIT_DATA)  # private memory that can be written
    now = 1024 * int(re.search(r"VmData:\s+(\d+) kB", Path("/proc/self/status").read_text())[1])
    resource.setrlimit(resource.RLIMIT_DATA, (now + (1 << 35), limits[1]))
    try:
        with pytest.raises(MemoryError, match=f"the host cannot give {2**36 - MIB} bytes more"):
            buffer.resize(1 << 36)
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, limits)
    assert buffer.size == MIB
    np.testing.assert_array_equal(to_numpy(buffer.tensor(MIB, "uint8")), expected)


@pytest.mark.alone
@pytest.mark.gpu
def test_more_than_the_gpu_has_changes_nothing(cuda: str, rng: np.random.Generator) -> None:
    total = ops.memory_info(cuda)[1]
    buffer = ElasticBuffer(2 * total, cuda)
    buffer.resize(8 * MIB)
    expected = rng.integers(0, 256, 8 * MIB, dtype=np.uint8)
    fill(buffer.tensor(8 * MIB, "uint8"), expected)
    free = ops.memory_info(cuda)[0]
    with pytest.raises(
        MemoryError, match=rf"cuda:0 cannot give {buffer.capacity - buffer.size} bytes more \({free} of"
    ):
        buffer.resize(buffer.capacity)
    assert buffer.size == 8 * MIB
    assert abs(ops.memory_info(cuda)[0] - free) < 64 * MIB
    np.testing.assert_array_equal(to_numpy(buffer.tensor(8 * MIB, "uint8")), expected)
    buffer.resize(64 * MIB)


# --- tensors of a buffer


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
    failures: list[BaseException] = []

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

    def run(action, number: int) -> None:
        rng = np.random.default_rng([seed, number])
        try:
            for _ in range(60):
                action(rng)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=run, args=(action, i)) for i, action in enumerate([resize, use] * 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
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


@pytest.mark.alone
@pytest.mark.gpu
def test_many_gigabytes_take_no_seconds(cuda: str) -> None:
    """All the GPU can spare up to 100 GB, in 72 buffers as the caches of a model."""
    each = min(100 << 30, int(ops.memory_info(cuda)[0] * 0.8)) // 72
    buffers = [ElasticBuffer(each, cuda) for _ in range(72)]
    start = time.perf_counter()
    for buffer in buffers:
        buffer.resize(each)
    grown = time.perf_counter()
    for buffer in buffers:
        buffer.resize(0)
    shrunk = time.perf_counter()
    print(f"{72 * each >> 30} GiB: {grown - start:.3f} s to grow, {shrunk - grown:.3f} s to shrink", file=sys.stderr)
    assert shrunk - start < 10
