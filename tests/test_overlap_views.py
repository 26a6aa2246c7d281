"""Views of one buffer, of which NumPy says whether they share memory: what shares none must be accepted, all else refused."""

from functools import partial

import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import pagedkv

F32, I32, U8 = np.float32, np.int32, np.uint8
T, K, D, N, B = 4, 2, 16, 6, 4  # tokens, KV heads, head_dim, blocks, block_size

# --- memory that interleaves and does not overlap

INTERLEAVED = {
    "[N, 2, B, H, D]": ((N, 2, B, K, D), lambda m: (m[:, 0], m[:, 1])),
    "[2, N, B, H, D]": ((2, N, B, K, D), lambda m: (m[0], m[1])),
    "[N, B, H, 2 D]": ((N, B, K, 2 * D), lambda m: (m[..., :D], m[..., D:])),
    "[N, B, 2 H, D]": ((N, B, 2 * K, D), lambda m: (m[:, :, :K], m[:, :, K:])),
    "[N, H, B, 2 D]": ((N, K, B, 2 * D), lambda m: (m[..., :D].swapaxes(1, 2), m[..., D:].swapaxes(1, 2))),
    "K [N, B, H, D], V [N, H, B, D]": ((N, 2, B * K * D), lambda m: (
        m[:, 0].reshape(N, B, K, D), m[:, 1].reshape(N, K, B, D).swapaxes(1, 2))),
    "backwards": ((N, 2, B, K, D), lambda m: (m[::-1, 0], m[::-1, 1])),
    "every second page": ((2 * N, B, K, D), lambda m: (m[::2], m[1::2])),
}  # fmt: skip


@pytest.mark.parametrize("layout", INTERLEAVED)
def test_caches_of_one_allocation(rng, layout):
    shape, split = INTERLEAVED[layout]
    memory = np.full(shape, np.nan, F32)
    k_cache, v_cache = split(memory)
    assert np.shares_memory(k_cache, memory) and not np.shares_memory(k_cache, v_cache)
    key, value = rng.standard_normal((2, T, K, D)).astype(F32)
    slots = rng.permutation(N * B)[:T]
    pagedkv.store_kvcache(key, value, k_cache, v_cache, slots)
    np.testing.assert_array_equal(k_cache[slots // B, slots % B], key)
    np.testing.assert_array_equal(v_cache[slots // B, slots % B], value)
    assert np.isnan(memory).sum() == memory.size - 2 * key.size


def test_all_layers_of_one_allocation(rng):
    memory = rng.standard_normal((N, 20, 2, B * K * D)).astype(F32)
    expected = memory.copy()
    expected[4] = expected[1]
    caches = [memory[:, layer, i] for layer in range(20) for i in range(2)]
    pagedkv.copy_blocks(caches, np.array([[1, 4]]))
    np.testing.assert_array_equal(memory, expected)
    wrong = memory.reshape(N, -1)[:, 5 : 5 + B * K * D]
    with pytest.raises(BufferError, match=r"caches\[\d+\]: overlaps caches\[\d+\], which is written too"):
        pagedkv.copy_blocks([*caches, wrong], np.array([[1, 4]]))
    np.testing.assert_array_equal(memory, expected)


def random_view(rng, memory: np.ndarray, shape: tuple[int, ...], *, is_dense: bool) -> np.ndarray:
    """Of such a shape, anywhere in the memory, with any strides that keep it there."""
    while True:
        strides = [int(s) for s in rng.choice([-24, -9, -4, -2, -1, 1, 2, 3, 4, 6, 8, 12, 16, 24, 36], len(shape))]
        if is_dense:
            strides[-1] = 1
        steps = [(n - 1) * s for n, s in zip(shape, strides, strict=True)]
        low, high = -sum(s for s in steps if s < 0), sum(s for s in steps if s > 0)
        if low + high >= memory.size:
            continue
        first = int(rng.integers(low, memory.size - high))
        return as_strided(memory[first:], shape, [s * memory.itemsize for s in strides])


def has_distinct_elements(view: np.ndarray) -> bool:
    """By pagedkv's rule: each dimension steps over all of the smaller ones."""
    span = 1
    for stride, size in sorted((abs(s) // view.itemsize, n) for s, n in zip(view.strides, view.shape, strict=True) if n > 1):
        if stride < span:
            return False
        span += stride * (size - 1)
    return True


def test_random_views_of_one_shape_and_two_dtypes(rng):
    """copy_ takes any strides: it refuses exactly what shares memory, and copies the rest right."""
    outcomes = {True: 0, False: 0}
    while min(outcomes.values()) < 700:
        shape = tuple(int(n) for n in rng.integers(1, 5, rng.integers(1, 5)))
        memory = rng.standard_normal(200).astype(np.float16).view(U8)
        dtypes = rng.choice([F32, np.float16], 2)
        dst, src = (random_view(rng, memory.view(dtype), shape, is_dense=False) for dtype in dtypes)
        if not has_distinct_elements(dst):
            continue
        shares = np.shares_memory(dst, src)
        is_same = dst.dtype == src.dtype and dst.ctypes.data == src.ctypes.data and all(
            a == b for a, b, n in zip(dst.strides, src.strides, shape, strict=True) if n > 1)  # fmt: skip
        outcomes[bool(shares)] += 1
        values, before = src.astype(dst.dtype), memory.copy()
        if shares and not is_same:
            with pytest.raises(BufferError, match="src: overlaps the memory that would be written"):
                pagedkv.from_dlpack(dst).copy_(src)
            np.testing.assert_array_equal(memory, before)
        else:
            pagedkv.from_dlpack(dst).copy_(src)
            np.testing.assert_array_equal(dst, values)


def test_random_views_of_different_shapes(rng):
    """store_kvcache, which skips every token here: refused exactly where a cache shares memory with another argument."""
    outcomes = {True: 0, False: 0}
    memory = np.zeros(400, F32)
    while min(outcomes.values()) < 500:
        tokens, kv_heads, dim, blocks, size = (int(n) for n in rng.integers(1, 4, 5))
        names = {"key": (tokens, kv_heads, dim), "value": (tokens, kv_heads, dim),
                 "k_cache": (blocks, size, kv_heads, dim), "v_cache": (blocks, size, kv_heads, dim)}  # fmt: skip
        views = {name: random_view(rng, memory, shape, is_dense=True) for name, shape in names.items()}
        k_cache, v_cache = views["k_cache"], views["v_cache"]
        if not has_distinct_elements(k_cache) or not has_distinct_elements(v_cache):
            continue
        shares = np.shares_memory(k_cache, v_cache) or any(
            np.shares_memory(views[name], written) for name in ("key", "value") for written in (k_cache, v_cache))
        outcomes[shares] += 1
        slots = np.full(tokens, -1)
        if shares:
            with pytest.raises(BufferError, match="overlaps"):
                pagedkv.store_kvcache(**views, slot_mapping=slots)
        else:
            pagedkv.store_kvcache(**views, slot_mapping=slots)


def test_random_lists_of_pools(rng):
    """copy_blocks and swap_blocks without pairs: refused exactly where a written cache shares memory with another."""
    outcomes = {True: 0, False: 0}
    memory = np.zeros(4000, U8)
    no_pairs = np.zeros((0, 2), I32)
    while min(outcomes.values()) < 500:
        step, pools = int(rng.integers(1, 13)), []
        kinds = [(rng.choice([F32, np.float16, U8]), int(rng.integers(1, 7))) for _ in range(2)]
        for dtype, size in kinds * 2:
            view, blocks = memory.view(dtype), int(rng.integers(0, 12))
            stride = max(step * 8 // view.itemsize, size) if rng.random() < 0.8 else size + int(rng.integers(9))
            first = int(rng.integers(0, 160 // view.itemsize)) + int(rng.choice([0, 1000])) // view.itemsize
            pools.append(as_strided(view[first:], (blocks, size), [stride * view.itemsize, view.itemsize]))
        written, others = pools[:2], pools[2:] if rng.integers(2) else []
        if any(a.ctypes.data == b.ctypes.data for a, b in zip(others, written, strict=False)):
            continue  # may be one pool
        shares = np.shares_memory(*written) or any(np.shares_memory(a, b) for a in others for b in written)
        outcomes[shares] += 1
        call = partial(pagedkv.swap_blocks, others, written) if others else partial(pagedkv.copy_blocks, written)
        if shares:
            with pytest.raises(BufferError, match=r"\[\d\]: overlaps \w+\[\d\], which is "):
                call(no_pairs)
        else:
            call(no_pairs)
