"""ElasticBuffer: memory that grows and shrinks in place, on both devices."""

from __future__ import annotations

import gc
import re
import resource
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from elastic_buffers import MIB, address, fill, to_numpy

import pagedkv
from pagedkv import ops
from pagedkv.ops import ElasticBuffer


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
