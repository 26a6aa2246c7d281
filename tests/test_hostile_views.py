"""Producers whose shapes, strides and addresses are nonsense: a typed error that names the argument, or a view that is
what was said, and never arithmetic that overflows (`make asan` watches). Nothing here touches the memory of such views."""

from math import prod

import numpy as np
import pytest
from producer import Producer

import pagedkv
from pagedkv import ops

F32, I32 = np.float32, np.int32
SMALLEST, LARGEST = -(2**63), 2**63 - 1
PAGE = 2**20  # an address that nobody reads
FAR = "its producer gave strides that reach beyond the address space"
NO_PAIRS = np.zeros((0, 2), np.int64)

# shape, strides, address, byte offset, what is said
TABLE = [
    ((4, 8), (2**62, 1), PAGE, 0, FAR),
    ((4, 8), (SMALLEST, 1), PAGE, 0, FAR),
    ((1, 8), (SMALLEST, 1), PAGE, 0, FAR),
    ((1, 8), (LARGEST, 1), PAGE, 0, FAR),
    ((0, 8), (SMALLEST, 1), PAGE, 0, FAR),
    ((4, 8), (2**57, 1), PAGE, 0, FAR),
    ((4, 8), (-PAGE, 1), PAGE, 0, FAR),  # below address 0
    ((4, 8), (8, 1), 2**64 - 64, 0, FAR),  # above the last
    ((2, 2, 2, 2, 2, 2, 2, 2), (2**55,) * 8, PAGE, 0, FAR),  # each step is fine
    ((2, 2), (2**56 + 2**55, -(2**56)), 2**63, 0, FAR),
    ((2**58,), (0,), PAGE, 0, FAR),
    ((2**30, 2**30), (0, 0), PAGE, 0, FAR),
    ((2**62, 2**62, 0), None, PAGE, 0, "its producer gave a shape of more than 2^63 bytes"),
    ((0, 2**62, 2**62), (1, 1, 1), PAGE, 0, "its producer gave a shape of more than 2^63 bytes"),
    ((2**62, 0, 2), (0, 0, 0), PAGE, 0, "its producer gave a shape of more than 2^63 bytes"),
    ((2**63 - 1,), (1,), PAGE, 0, "its producer gave a shape of more than 2^63 bytes"),
    ((2, -1), (1, 1), PAGE, 0, "its producer gave a negative size"),
    ((SMALLEST, 2), (1, 1), PAGE, 0, "its producer gave a negative size"),
    ((2, SMALLEST), None, PAGE, 0, "its producer gave a negative size"),
    ((4, 8), (8, 1), PAGE, 2**64 - 1, "its producer gave an offset that reaches beyond the address space"),
    ((4, 8), (8, 1), 0, 0, "its producer gave no address"),
    ((4, 8), (8, 1), 0, 64, "its producer gave no address"),
    ((4, 8), (8, 1), PAGE, 2, "its address 0x100002 is not aligned to its dtype float32"),
]


@pytest.mark.parametrize("row", range(len(TABLE)))
def test_nonsense_is_refused(row):
    shape, strides, address, byte_offset, message = TABLE[row]
    for call in (pagedkv.from_dlpack, lambda producer: pagedkv.copy_blocks([producer], NO_PAIRS)):
        with pytest.raises(BufferError, match="^(obj|caches.0.): ") as caught:
            call(Producer(address, shape, strides, "f4", byte_offset))
        assert str(caught.value).endswith(message)


def test_the_one_that_showed_it():
    x, out = np.ones((4, 8), F32), np.zeros((4, 8), F32)
    with pytest.raises(BufferError, match=f"^out: {FAR}$"):
        ops.rms_norm(x, np.ones(8, F32), out=Producer(out.ctypes.data, (4, 8), (2**62, 1), "f4"))
    assert (out == 0).all()


def reach(producer_shape, strides, address: int, itemsize: int) -> tuple[int, int]:
    """[low, high) in whole numbers, which do not overflow."""
    steps = [(n - 1) * s for n, s in zip(producer_shape, strides, strict=True)]
    low = address + itemsize * sum(s for s in steps if s < 0)
    return low, address + itemsize * (sum(s for s in steps if s > 0) + 1)


def random_number(rng, *, is_signed: bool) -> int:
    kind = rng.integers(6)
    if kind < 3:
        value = int(rng.integers(0, 5))
    else:
        value = int(rng.choice([1, 2, 3, 5])) << int(rng.integers(0, 63 if kind == 5 else 40))
        value = min(value + int(rng.integers(-1, 2)), LARGEST)
    if is_signed and rng.random() < 0.3:
        return SMALLEST if rng.random() < 0.05 else -value
    return max(value, -1)


def test_random_nonsense(rng):
    """Where the memory cannot be, it is refused; where all is small enough, it is taken as it is; between, either."""
    counts = {"refused": 0, "accepted": 0}
    for _ in range(6_000):
        ndim, dtype = int(rng.integers(0, 9)), rng.choice(["f4", "f2", "u1", "i8"])
        shape = tuple(random_number(rng, is_signed=False) for _ in range(ndim))
        strides = tuple(random_number(rng, is_signed=True) for _ in range(ndim))
        itemsize, address = np.dtype(dtype).itemsize, int(rng.integers(1, 2**60)) * 8
        producer = Producer(address, shape, strides, dtype)
        is_sane = min(shape, default=0) >= 0 and prod(max(n, 1) for n in shape) <= 2**57
        low, high = reach(shape, strides, address, itemsize)
        is_possible = is_sane and (0 in shape or (low >= 0 and high < 2**64))
        is_small = is_possible and prod(shape) <= 2**56 and all(abs(s) < 2**50 and n < 2**50 for n, s in zip(shape, strides, strict=True))
        is_small = is_small and high - low < 2**56 and 0 not in shape
        try:
            tensor = pagedkv.from_dlpack(producer)
        except BufferError as error:
            assert str(error).startswith("obj: its producer gave ") and not is_small, (shape, strides, address)
            counts["refused"] += 1
        else:
            assert is_possible or 0 in shape, (shape, strides, address)
            assert (tensor.shape, tensor.strides) == (shape, strides) and tensor.data_ptr() == address
            counts["accepted"] += 1
    assert min(counts.values()) > 300


def test_random_pools_at_any_address(rng):
    """Caches far apart or interleaved, with strides of up to 2^40: refused exactly where two heads share an element."""
    outcomes = {"overlaps": 0, "accepted": 0}
    key = np.empty((0, 2, 4), F32)
    while min(outcomes.values()) < 500:
        shape = (int(rng.integers(1, 6)), int(rng.integers(1, 6)), 2, 4)
        base, most, caches, heads = int(rng.integers(2**58, 2**59)) * 4, int(rng.integers(3, 40)), {}, {}
        common = [int(rng.integers(1, 2**most)) for _ in range(2)]
        for name in ("k_cache", "v_cache"):
            others = [int(rng.integers(1, 2**most)) for _ in range(2)]
            strides = [*(rng.choice([-4, 4]) * int(rng.choice([a, b])) for a, b in zip(common, others, strict=True)), 4, 1]
            address = base + 4 * int(rng.integers(0, 2 ** int(rng.integers(1, most + 2))))
            caches[name] = Producer(address, shape, [int(s) for s in strides], "f4")
            places = np.indices(shape[:3]).reshape(3, -1)
            heads[name] = address + 4 * (np.array(strides[:3], np.int64) @ places)
        overlap = (abs(heads["k_cache"][:, None] - heads["v_cache"]) < 16).any()
        try:
            pagedkv.store_kvcache(key, key, **caches, slot_mapping=np.zeros(0, I32))
        except BufferError as error:
            if str(error).endswith("its elements share memory (a stride is 0 or dimensions overlap)"):
                continue
            assert str(error) == "v_cache: overlaps k_cache, which is written too" and overlap
            outcomes["overlaps"] += 1
        else:
            assert not overlap
            outcomes["accepted"] += 1


def test_sizes_of_what_is_empty():
    """Products of sizes that only meet in one operation."""
    large = 2**56
    fake = PAGE
    with pytest.raises(ValueError, match="^qkv: dim 1 is 2 but must be"):
        ops.qk_norm_rope_store(
            np.empty((0, 2), F32), None, None, Producer(fake, (0, 2), (2, 1), "f4"), np.empty(0, I32),
            *(Producer(fake, (0, 1, large // 2, 2), (0, 0, 2, 1), "f4") for _ in range(2)), np.empty(0, I32),
            q_out=Producer(fake, (0, large // 2, 2), None, "f4"))  # fmt: skip
    ids = Producer(fake, (2**40,), (1,), "i4")
    with pytest.raises(MemoryError, match="^out: its shape reaches beyond the address space$"):
        ops.gather_rows(Producer(fake, (0, 2**40), (2**40, 1), "f4"), ids)
    out = pagedkv.merge_attention_states(np.empty((2, 0, 3, 8), F32), np.empty((2, 3, 0), F32))
    assert out.shape == (0, 3, 8)
    with pytest.raises(ValueError, match="^q: has 72057594037927935 heads"):
        pagedkv.paged_attention_fwd(
            Producer(fake, (0, large - 1, 1), None, "f4"), np.empty((0, 1, 2, 1), F32), np.empty((0, 1, 2, 1), F32),
            np.empty((0, 0), I32), np.empty(0, I32))  # fmt: skip
