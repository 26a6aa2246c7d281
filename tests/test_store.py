"""store_kvcache against the oracle: every dtype, layout and slot, and nothing else touched."""

import numpy as np
import oracle
import pytest
from cases import PAGE_SIZES
from pools import get, put, put_sliceable

import pagedkv

FLOATS = ["float32", "float16", "bfloat16"]
NUM_BLOCKS, BLOCK_SIZE = 5, 3


def draw(rng, num_tokens=7, num_kv_heads=2, head_dim=24, dtype="float32", size=1.0):
    """key, value, slots with some negative, and the poisoned caches before the store."""
    key, value = (oracle.rounded(size * rng.standard_normal((num_tokens, num_kv_heads, head_dim)), dtype) for _ in "kv")
    slots = rng.permutation(NUM_BLOCKS * BLOCK_SIZE)[:num_tokens]
    slots[rng.random(num_tokens) < 0.3] = -1
    return key, value, slots, np.full((NUM_BLOCKS, BLOCK_SIZE, num_kv_heads, head_dim), np.nan)


def check(device, key, value, slots, empty, dtype, cache_dtype=None, **scales):
    """What a call leaves in caches that were `empty`."""
    caches = [put(empty, device, cache_dtype or dtype) for _ in "kv"]
    given = [put(x, device, dtype) for x in (key, value)] + caches + [put(slots, device)]
    assert pagedkv.store_kvcache(*given, **{name: put(scale, device) for name, scale in scales.items()}) is None
    expected = oracle.store_kvcache(key, value, empty, empty, slots, cache_dtype=cache_dtype or dtype, **scales)
    for cache, stored in zip(caches, expected):
        np.testing.assert_array_equal(get(cache), stored)


@pytest.mark.parametrize("slot_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("cache_dtype", [None, "float8_e4m3fn"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_dtypes(dtype, cache_dtype, slot_dtype, device, rng):
    key, value, slots, empty = draw(rng, dtype=dtype)
    check(device, key, value, slots.astype(slot_dtype), empty, dtype, cache_dtype)


@pytest.mark.parametrize("shape", [None, (1,), (2,)], ids=["number", "one", "heads"])
@pytest.mark.parametrize("dtype", FLOATS)
def test_fp8_scales_round_to_even_and_saturate(dtype, shape, device, rng):
    key, value, slots, empty = draw(rng, num_tokens=12, dtype=dtype, size=200.0)
    key[0, 0, :4], key[1, 0, :3] = [np.inf, -np.inf, np.nan, 0.0], [1e4, -1e4, 2.0**-9]
    scales = [
        float(x) if shape is None else x for x in (rng.uniform(0.1, 1.5, shape or ()).astype(np.float32) for _ in "kv")
    ]
    check(device, key, value, slots, empty, dtype, "float8_e4m3fn", k_scale=scales[0], v_scale=scales[1])


def test_fp8_stores_every_float16_as_the_oracle_does(device):
    """All 65,536 numbers of float16, ties and subnormals among them."""
    every = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float64).reshape(256, 1, 256)
    cache = put(np.zeros((256, 1, 1, 256)), device, "float8_e4m3fn")
    unused = put(np.zeros((256, 1, 1, 256)), device, "float8_e4m3fn")
    key = put(every, device, "float16")
    pagedkv.store_kvcache(key, key, cache, unused, put(np.arange(256, dtype=np.int32), device))
    np.testing.assert_array_equal(get(cache).reshape(every.shape), oracle.rounded(every, "float8_e4m3fn"))


def test_views_of_a_fused_projection_into_strided_caches(device, rng):
    key, value, slots, empty = draw(rng)
    fused = put_sliceable(np.concatenate([np.full((7, 4, 24), np.nan), key, value], axis=1), device, "float32")
    heads_first = put_sliceable(empty.swapaxes(1, 2), device, "float32")  # K as [blocks, heads, slots, dim]
    apart = put_sliceable(np.full((NUM_BLOCKS, 2, BLOCK_SIZE, 3, 24), np.nan), device, "float32")
    k_cache, v_cache = heads_first.swapaxes(1, 2), apart[:, 1, :, :2]
    pagedkv.store_kvcache(fused[:, 4:6], fused[:, 6:], k_cache, v_cache, put(slots, device))
    expected = oracle.store_kvcache(key, value, empty, empty, slots, cache_dtype="float32")
    np.testing.assert_array_equal(get(k_cache), expected[0])
    np.testing.assert_array_equal(get(v_cache), expected[1])
    assert np.isnan(get(apart)[:, 0]).all() and np.isnan(get(apart)[:, 1, :, 2:]).all()


@pytest.mark.parametrize("num_tokens, num_kv_heads, head_dim", [(0, 2, 8), (1, 1, 1), (3, 5, 7), (15, 1, 300)])
def test_shapes(num_tokens, num_kv_heads, head_dim, device, rng):
    check(device, *draw(rng, num_tokens, num_kv_heads, head_dim), "float32")


@pytest.mark.parametrize("cache_dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("block_size", PAGE_SIZES)
def test_page_sizes(block_size, cache_dtype, device, rng):
    """The first and the last slot of every page among them."""
    key, value = (oracle.rounded(rng.standard_normal((40, 2, 16)), "bfloat16") for _ in "kv")
    empty = np.full((20 + -(-40 // block_size), block_size, 2, 16), np.nan)
    ends = {slot for page in range(6) for slot in (page * block_size, (page + 1) * block_size - 1)}
    others = set(range(len(empty) * block_size)) - ends
    slots = np.array([*ends, *rng.permutation(list(others))][:40], np.int32)
    slots[20] = -1
    check(device, key, value, slots, empty, "bfloat16", cache_dtype)


@pytest.mark.parametrize("dtype", FLOATS)
def test_many_tokens(dtype, device, rng):
    key = oracle.rounded(rng.standard_normal((3001, 4, 64)), dtype)
    empty = np.full((100, 32, 4, 64), np.nan)
    slots = rng.permutation(3200)[:3001]
    slots[rng.random(3001) < 0.1] = -1
    check(device, key, -key, slots, empty, dtype)


def test_a_slot_out_of_range_is_refused_before_anything_is_written(rng):
    key, value, slots, empty = draw(rng)
    slots[:] = range(7)
    slots[6] = 15
    cache = empty.astype(np.float32)
    with pytest.raises(ValueError, match=r"slot_mapping\[6\] is 15 but k_cache has 15 slots \(5 blocks of 3\)"):
        pagedkv.store_kvcache(key.astype(np.float32), value.astype(np.float32), cache, cache.copy(), slots)
    assert np.isnan(cache).all()


F32 = np.float32
BAD_CALLS = [
    (dict(value=np.zeros((7, 2, 16), F32)), ValueError, "value: dim 2 is 16 but key has D=24"),
    (dict(value=np.zeros((7, 2, 24), np.float16)), TypeError, "value: dtype is float16 but key has float32"),
    (dict(k_cache=np.zeros((5, 3, 4, 24), F32)), ValueError, "k_cache: dim 2 is 4 but key has H=2"),
    (dict(v_cache=np.zeros((6, 3, 2, 24), F32)), ValueError, "v_cache: dim 0 is 6 but k_cache has N=5"),
    (dict(k_cache=np.zeros((5, 0, 2, 24), F32), v_cache=np.zeros((5, 0, 2, 24), F32)), ValueError, "block_size"),
    (dict(v_cache=np.zeros((5, 3, 2, 24), np.float16)), TypeError, "v_cache: dtype is float16"),
    (dict(slot_mapping=np.zeros(6, np.int32)), ValueError, "slot_mapping: dim 0 is 6 but key has T=7"),
    (dict(slot_mapping=np.zeros(7, F32)), TypeError, "slot_mapping: dtype is float32 but must be one of int32, int64"),
    (dict(key=np.zeros((7, 2, 48), F32)[:, :, ::2]), BufferError, "key: the last dimension must be dense"),
    (dict(k_cache=np.broadcast_to(np.zeros((1, 3, 2, 24), F32), (5, 3, 2, 24))), BufferError, "k_cache"),
    (dict(k_scale=2.0), ValueError, "k_scale: is given but the caches are float32"),
    (dict(k_scale=np.ones(1, F32)), ValueError, "k_scale: is given but the caches are float32"),
]


@pytest.mark.parametrize("changes, error, message", BAD_CALLS, ids=[m for _, _, m in BAD_CALLS])
def test_bad_calls(changes, error, message):
    shapes = dict(key=(7, 2, 24), value=(7, 2, 24), k_cache=(5, 3, 2, 24), v_cache=(5, 3, 2, 24))
    arguments = {name: np.zeros(shape, F32) for name, shape in shapes.items()}
    arguments |= dict(slot_mapping=np.arange(7, dtype=np.int32)) | changes
    with pytest.raises(error, match=message):
        pagedkv.store_kvcache(**arguments)


@pytest.mark.parametrize("scale, message", [(0.0, "k_scale is 0"), (-1.0, "k_scale is -1"), (float("nan"), "k_scale is nan"),
                                            (np.ones(3, F32), "k_scale: dim 0 is 3 but key has H=2"),
                                            (np.ones((7, 2), F32), "k_scale: has 2 dimensions")])
def test_bad_scales(scale, message):
    key = np.zeros((7, 2, 24), F32)
    caches = [pagedkv.empty((5, 3, 2, 24), "float8_e4m3fn") for _ in "kv"]
    with pytest.raises(ValueError, match=message):
        pagedkv.store_kvcache(key, key, *caches, np.arange(7, dtype=np.int32), k_scale=scale)
