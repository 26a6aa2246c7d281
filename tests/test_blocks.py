"""copy_blocks and swap_blocks: whole pages, all caches, and only those."""

import numpy as np
import pytest
from cases import PAGE_SIZES
from pools import get, put, put_sliceable

import pagedkv
from pagedkv import ops

DTYPES = ["float32", "float16", "bfloat16", "float8_e4m3fn"]


def draw(rng, num_blocks=9, shape=(4, 2, 8)):
    """Small whole numbers, which every dtype holds."""
    return rng.integers(-8, 9, (num_blocks, *shape)).astype(np.float64)


@pytest.mark.parametrize("pair_dtype", [np.int32, np.int64])
@pytest.mark.parametrize("dtype", DTYPES)
def test_copy(dtype, pair_dtype, device, rng):
    before = [draw(rng), draw(rng, 12, (3, 8))]
    caches = [put(x, device, dtype) for x in before]
    pairs = np.array([[0, 3], [0, 4], [8, 1]], pair_dtype)
    assert pagedkv.copy_blocks(caches, pairs) is None
    for cache, expected in zip(caches, before):
        expected[pairs[:, 1]] = expected[pairs[:, 0]]
        np.testing.assert_array_equal(get(cache), expected)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("block_size", PAGE_SIZES)
def test_page_sizes(block_size, dtype, device, rng):
    """Copied, swapped out and back, each time to other places; all else stays."""
    pool, host = draw(rng, 7, (block_size, 2, 8)), draw(rng, 4, (block_size, 2, 8))
    cache, on_host = put(pool, device, dtype), put(host, "cpu", dtype)
    copies, out, back = (np.array(pairs, np.int32) for pairs in ([[6, 0], [3, 5]], [[0, 3], [5, 1]], [[3, 2], [1, 4]]))
    pagedkv.copy_blocks([cache], copies)
    pagedkv.swap_blocks([cache], [on_host], out)
    ops.synchronize(device)
    pagedkv.swap_blocks([on_host], [cache], back)
    ops.synchronize(device)
    pool[copies[:, 1]] = pool[copies[:, 0]]
    host[out[:, 1]] = pool[out[:, 0]]
    pool[back[:, 1]] = host[back[:, 0]]
    np.testing.assert_array_equal(get(cache), pool)
    np.testing.assert_array_equal(get(on_host), host)


def test_copy_of_one_cache_and_of_no_pairs(device, rng):
    before = draw(rng)
    cache = put(before, device, "float32")
    pagedkv.copy_blocks(cache, np.zeros((0, 2), np.int32))
    np.testing.assert_array_equal(get(cache), before)
    pagedkv.copy_blocks(cache, np.array([[2, 5]]))
    before[5] = before[2]
    np.testing.assert_array_equal(get(cache), before)


def test_copy_within_strided_pools(device, rng):
    """HND pages, and K and V of a page side by side: a page's memory is gapless, the pages lie apart."""
    both, heads_first = draw(rng, 9, (2, 4, 2, 8)), draw(rng, 9, (2, 4, 8))
    pool, other = put_sliceable(both, device, "float32"), put_sliceable(heads_first, device, "float32")
    pagedkv.copy_blocks([pool[:, 1], other.swapaxes(1, 2)], np.array([[1, 7], [0, 2]], np.int32))
    both[[7, 2], 1], heads_first[[7, 2]] = both[[1, 0], 1], heads_first[[1, 0]]
    np.testing.assert_array_equal(get(pool), both)
    np.testing.assert_array_equal(get(other), heads_first)


@pytest.mark.parametrize("pinned", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_swap_out_and_in(dtype, pinned, device, rng):
    if pinned and device == "cpu":
        pytest.skip("memory is pinned for a GPU")
    num_caches = 37  # more than one launch takes
    pools, hosts = [draw(rng) for _ in range(num_caches)], [np.zeros((6, 4, 2, 8)) for _ in range(num_caches)]
    on_device, on_host = [put(x, device, dtype) for x in pools], [put(x, "cpu", dtype) for x in hosts]
    if pinned:
        on_host = [pagedkv.empty(x.shape, dtype, pinned=True).copy_(x) for x in on_host]
    out, back = np.array([[8, 0], [3, 5]], np.int32), np.array([[5, 1], [0, 2]], np.int64)
    pagedkv.swap_blocks(on_device, on_host, out)
    ops.synchronize(device)
    for host, pool, expected in zip(on_host, pools, hosts):
        expected[out[:, 1]] = pool[out[:, 0]]
        np.testing.assert_array_equal(get(host), expected)
    pagedkv.swap_blocks(on_host, on_device, back)
    ops.synchronize(device)
    for cache, pool, host in zip(on_device, pools, hosts):
        pool[back[:, 1]] = host[back[:, 0]]
        np.testing.assert_array_equal(get(cache), pool)


@pytest.mark.gpu
def test_swap_with_pinned_memory_waits_for_nothing(rng):
    """The call is back while the stream is still busy with what came before, and it can be captured."""
    torch = pytest.importorskip("torch", reason="pinned memory and streams are torch's")
    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    dtypes = (torch.bfloat16, torch.float32, torch.uint8)  # blocks of three sizes in one launch
    caches = [torch.from_numpy(draw(rng, 300)).to("cuda", dtype) for dtype in dtypes]
    hosts = [torch.zeros(280, *cache.shape[1:], dtype=cache.dtype).pin_memory() for cache in caches]
    pages, places = rng.permutation(300)[:270], rng.permutation(280)[:270]
    busy = torch.cuda.Event()
    for cycles in (1, 200_000_000):  # kernels are loaded at their first use, and that waits
        torch.cuda.synchronize()
        for host in hosts:
            host.zero_()
        torch.cuda._sleep(cycles)
        for cache in caches:
            cache += 1
        pagedkv.swap_blocks(caches, hosts, np.stack([pages, places], 1))
        busy.record()
    assert not busy.query() and not any(host.any() for host in hosts)
    torch.cuda.synchronize()
    for cache, host in zip(caches, hosts, strict=True):
        assert torch.equal(host[places], cache.cpu()[pages])
        cache.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        pagedkv.swap_blocks(hosts, caches, np.stack([places, pages], 1))
    assert not any(cache.any() for cache in caches)
    graph.replay()
    torch.cuda.synchronize()
    for cache, host in zip(caches, hosts, strict=True):
        assert torch.equal(host[places], cache.cpu()[pages])


def test_many_pages_over_threads(rng):
    cache = rng.standard_normal((600, 16, 4, 32)).astype(np.float32)
    before, order = cache.copy(), rng.permutation(600)
    pairs = np.stack([order[:300], order[300:]], axis=1)
    pagedkv.copy_blocks(cache, pairs)
    before[pairs[:, 1]] = before[pairs[:, 0]]
    assert np.array_equal(cache, before)


BAD_COPIES = [
    ([[0, 1], [2, 1]], ValueError, "src_dst_pairs: block 1 is a destination twice"),
    ([[0, 1], [1, 2]], ValueError, "src_dst_pairs: block 1 is both a source and a destination"),
    ([[3, 3]], ValueError, "src_dst_pairs: block 3 is both a source and a destination"),
    ([[0, 9]], ValueError, r"src_dst_pairs\[0, 1\] is 9 but caches\[0\] has 9 blocks"),
    ([[0, 1], [-1, 2]], ValueError, r"src_dst_pairs\[1, 0\] is -1 but caches\[0\] has 9 blocks"),
    ([[0, 1, 2]], ValueError, "src_dst_pairs: dim 1 is 3 but must be 2"),
    ([0, 1], ValueError, "src_dst_pairs: has 1 dimensions"),
]


@pytest.mark.parametrize("pairs, error, message", BAD_COPIES, ids=[m for _, _, m in BAD_COPIES])
def test_bad_copies_change_nothing(pairs, error, message, rng):
    cache = draw(rng).astype(np.float32)
    before = cache.copy()
    with pytest.raises(error, match=message):
        pagedkv.copy_blocks(cache, np.array(pairs, np.int32))
    assert np.array_equal(cache, before)


def test_bad_caches(rng):
    pairs, cache = np.array([[0, 1]], np.int32), draw(rng).astype(np.float32)
    with pytest.raises(TypeError, match="src_dst_pairs: dtype is float32"):
        pagedkv.copy_blocks(cache, pairs.astype(np.float32))
    with pytest.raises(ValueError, match=r"src_dst_pairs\[0, 1\] is 1 but caches\[1\] has 1 blocks"):
        pagedkv.copy_blocks([cache, cache[:1]], pairs)
    with pytest.raises(BufferError, match=r"caches\[0\]: a block's memory has gaps"):
        pagedkv.copy_blocks(cache[:, :3, :1], pairs)
    with pytest.raises(BufferError):
        cache.flags.writeable = False
        pagedkv.copy_blocks(cache, pairs)


def test_bad_swaps(rng):
    pairs, cache = np.array([[0, 1]], np.int32), draw(rng).astype(np.float32)
    with pytest.raises(TypeError, match=r"dst\[0\]: dtype is float16 but src\[0\] has float32"):
        pagedkv.swap_blocks(cache, cache.astype(np.float16), pairs)
    with pytest.raises(ValueError, match=r"dst\[0\]: dim 3 is 4 but src\[0\] has 8"):
        pagedkv.swap_blocks(cache, cache[..., :4].copy(), pairs)
    with pytest.raises(BufferError, match=r"dst\[0\]: stride 1 is 8 but src\[0\] has 16"):
        pagedkv.swap_blocks(cache, cache.swapaxes(1, 2).copy().swapaxes(1, 2), pairs)
    with pytest.raises(ValueError, match="block 1 is both a source and a destination"):
        pagedkv.swap_blocks(cache, cache, np.array([[0, 1], [1, 2]], np.int32))
    with pytest.raises(ValueError, match=r"pairs\[0, 1\] is 1 but dst\[0\] has 1 blocks"):
        pagedkv.swap_blocks(cache, cache[:1].copy(), pairs)


def test_pools_without_elements_are_alike():
    """Strides say nothing there, and NumPy's are zeros where others count on."""
    shape = (2, 3, 0, 1)
    pairs = np.array([[0, 1]])
    pagedkv.swap_blocks(np.zeros(shape, np.float32), pagedkv.empty(shape), pairs)
    pagedkv.swap_blocks(np.zeros((2, 3, 5), np.float32)[:0], np.zeros((2, 5, 3), np.float32).transpose(0, 2, 1), pairs[:0])
