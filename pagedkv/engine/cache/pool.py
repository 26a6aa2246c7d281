"""The pool: keys and values of all pages, two caches per layer, on the device and in host memory.

On the device a cache is a range of addresses for as many pages as there could ever be; the first of them have memory
(pagedkv.ops.ElasticBuffer). So the pool grows and shrinks in place: graphs that read it stay valid, and another process
can have the memory that it gives back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from pagedkv import BlockManager, Tensor, ops
from pagedkv.checks import check_int
from pagedkv.models.spec import Spec
from pagedkv.models.weight_memory import total_memory
from pagedkv.ops import ElasticBuffer
from pagedkv.parallel.ring import Kind

Layers = list[tuple[Tensor, Tensor]]  # keys and values, [num_blocks, block_size, num_kv_heads, head_dim] each
MAX_SLOTS = 2**31 - 1  # a slot is an int32
DEFAULT_KV_CACHE_MEMORY = 4 << 30


class KVCaches:
    def __init__(self, spec: Spec, dtype: str, block_size: int, device: str) -> None:
        self.dtype, self.device, self.block_size = dtype, device, block_size
        self.num_caches = 2 * len(spec.kv_layers)
        # In fp8 the rows of a head are adjacent in memory: 128 separate bytes in every 1,024 are read 2 to 3 % slower.
        self._is_heads_first = dtype == "float8_e4m3fn"
        ((num_kv_heads, head_dim),) = {layer[:2] for layer in spec.kv_layers}  # all keep the same so far
        page = (num_kv_heads, block_size) if self._is_heads_first else (block_size, num_kv_heads)
        self._page_shape = *page, head_dim
        self.page_bytes = spec.page_bytes(dtype, block_size)  # of a page in all caches, and ...
        self._page_bytes = self.page_bytes // self.num_caches  # ... in one
        self.layers: Layers = []
        self.host_layers: Layers = []
        self._buffers: list[ElasticBuffer] = []

    def allocate(self, num_blocks: int, num_host_blocks: int) -> None:
        """Makes the pages of the device, and those in host memory."""
        room = max(num_blocks, min(self._most_blocks(), MAX_SLOTS // self.block_size - num_host_blocks))
        self._buffers = [ElasticBuffer(room * self._page_bytes, self.device) for _ in range(self.num_caches)]
        shape = room, *self._page_shape
        self.layers = self._layers(each.tensor(shape, self.dtype, reserved=True) for each in self._buffers)
        self.resize(num_blocks)
        self.host_layers = self._empty(num_host_blocks, "cpu", is_pinned=self.device != "cpu")

    def allocate_one(self) -> None:
        """Makes one page, for steps that keep nothing."""
        self.layers = self._empty(1, self.device)

    @property
    def rounding_bytes(self) -> int:
        """The most bytes that all caches take beyond their pages: a device gives memory in larger pieces."""
        capacity = self._most_blocks() * self._page_bytes
        return self.num_caches * ElasticBuffer(capacity, self.device).granularity

    def _most_blocks(self) -> int:
        """How many pages the whole memory of the device would hold."""
        return total_memory(self.device) // self.page_bytes

    def _empty(self, num_blocks: int, device: str, *, is_pinned: bool = False) -> Layers:
        shape = num_blocks, *self._page_shape
        return self._layers(
            ops.empty(shape, self.dtype, device, pinned=is_pinned) for _ in range(self.num_caches)
        )

    def _layers(self, memory: Iterable[Tensor]) -> Layers:
        caches = [each.transpose(1, 2) if self._is_heads_first else each for each in memory]
        return list(zip(caches[::2], caches[1::2], strict=True))

    def resize(self, num_blocks: int) -> None:
        """Gives the caches memory for this many pages. MemoryError, and no change, where the device has too little."""
        before = [each.size for each in self._buffers]
        try:
            for each in self._buffers:
                each.resize(num_blocks * self._page_bytes)
        except BaseException:
            for each, size in zip(self._buffers, before, strict=True):
                each.resize(size)
            raise

    def try_to_resize(self, num_blocks: int) -> bool:
        """False, and no change: the device has too little memory."""
        try:
            self.resize(num_blocks)
        except MemoryError:
            return False
        return True

    @property
    def max_blocks(self) -> int:
        """The most pages that the addresses reach."""
        return self._buffers[0].capacity // self._page_bytes

    def move(self, kind: int, pairs: np.ndarray) -> None:
        """Copies pages, or swaps them between the device and host memory: pairs of source and destination."""
        caches, host = each_cache(self.layers), each_cache(self.host_layers)
        if kind == Kind.COPY:
            ops.copy_blocks(caches, pairs)
        elif kind == Kind.SWAP_OUT:
            ops.swap_blocks(caches, host, pairs)
        else:
            ops.swap_blocks(host, caches, pairs)

    # --- pages as bytes, a few at a time

    def read(self, pages: np.ndarray, at_once: int) -> Iterator[list[np.ndarray]]:
        """Yields the content of these pages, at most at_once of them at a time: uint8 [n, page_bytes] per cache."""
        for start in range(0, len(pages), at_once):
            some = pages[start : start + at_once]
            host = self._empty(len(some), "cpu")
            ops.swap_blocks(each_cache(self.layers), each_cache(host), _pairs(some, np.arange(len(some))))
            ops.synchronize(self.device)
            yield [self._bytes_of(cache) for cache in each_cache(host)]

    def write(self, pages: np.ndarray, contents: list[np.ndarray]) -> None:
        """Writes into as many pages what read() has yielded at a time."""
        host = self._empty(len(pages), "cpu")
        for cache, content in zip(each_cache(host), contents, strict=True):
            self._bytes_of(cache)[:] = content
        ops.swap_blocks(each_cache(host), each_cache(self.layers), _pairs(np.arange(len(pages)), pages))
        ops.synchronize(self.device)

    def _bytes_of(self, cache: Tensor) -> np.ndarray:
        memory = cache.transpose(1, 2) if self._is_heads_first else cache
        return memory.view(-1).view(-1, "uint8").numpy().reshape(len(cache), self._page_bytes)


def each_cache(layers: Layers) -> list[Tensor]:
    return [cache for pair in layers for cache in pair]


def _pairs(sources: np.ndarray, destinations: np.ndarray) -> np.ndarray:
    return np.stack((sources, destinations), axis=1).astype(np.int32)


# --- how many pages it has


def pages_of_memory(memory: int, bytes_per_page: int, name: str = "kv_cache_memory") -> int:
    """The number of pages that these bytes hold."""
    memory = check_int(name, memory, 0)
    if memory < bytes_per_page:
        raise ValueError(f"{name} is {memory} bytes but one page needs {bytes_per_page}")
    return memory // bytes_per_page


def pages_on_cpu(max_model_len: int, max_num_seqs: int, block_size: int, bytes_per_page: int) -> int:
    """The pages that max_num_seqs sequences of max_model_len need: at most 4 GiB and a quarter of the machine's memory,
    but at least one sequence's."""
    pages_of_one = -(-max_model_len // block_size)
    affordable = min(DEFAULT_KV_CACHE_MEMORY, total_memory("cpu") // 4) // bytes_per_page
    return max(min(pages_of_one * max_num_seqs, affordable), pages_of_one)


def num_blocks_of(num_blocks: int | None, kv_cache_memory: int | None, caches: KVCaches) -> int:
    """num_blocks, or the number of pages that kv_cache_memory bytes hold. Exactly one of them is given."""
    if num_blocks is None and kv_cache_memory is not None:
        num_blocks = pages_of_memory(kv_cache_memory, caches.page_bytes)
    elif num_blocks is None or kv_cache_memory is not None:
        raise ValueError("num_blocks or kv_cache_memory: give one of them")
    wanted = check_int("num_blocks", num_blocks, 1)
    if wanted > caches.max_blocks:
        raise MemoryError(f"num_blocks is {wanted} but this machine has room for {caches.max_blocks} at most")
    return wanted


def resize_pool(manager: BlockManager, resize: Callable[[int], None], num_blocks: int) -> None:
    """Between two steps; resize() is the caches'. At any time all pages of the manager have memory."""
    if num_blocks > manager.num_blocks:
        resize(num_blocks)
        manager.resize(num_blocks)
    else:
        manager.resize(num_blocks)
        resize(num_blocks)
