"""The pages of an engine as a whole: resizing the pool, and saving and loading what it holds."""

from __future__ import annotations

import os
from typing import Any

from pagedkv import BlockManager
from pagedkv.checks import check_int
from pagedkv.models.weights import SafetensorsFile

from . import snapshot
from .kv_caches import KVCaches


class Pool:
    """The block manager's pages and their memory. Call resize(), save() and load() between two steps."""

    def __init__(self, manager: BlockManager, caches: KVCaches, stream: Any) -> None:
        self._manager, self._caches, self._stream = manager, caches, stream

    def wanted_blocks(self, num_blocks: int | None, kv_cache_memory: int | None) -> int:
        """num_blocks, or the number of pages that kv_cache_memory bytes hold. Exactly one of them is given."""
        caches = self._caches
        if num_blocks is None and kv_cache_memory is not None:
            num_blocks = pages_of_memory(kv_cache_memory, caches.page_bytes)
        elif num_blocks is None or kv_cache_memory is not None:
            raise ValueError("num_blocks or kv_cache_memory: give one of them")
        wanted = check_int("num_blocks", num_blocks, 1)
        if wanted > caches.max_blocks:
            raise MemoryError(f"num_blocks is {wanted} but this machine has room for {caches.max_blocks} at most")
        return wanted

    def resize(self, num_blocks: int) -> None:
        """At any time all pages of the manager have memory."""
        if num_blocks > self._manager.num_blocks:
            self._caches.resize(num_blocks)
            self._manager.resize(num_blocks)
        else:
            self._manager.resize(num_blocks)
            self._caches.resize(num_blocks)

    def save(self, path: str | os.PathLike[str], identity: dict[str, str]) -> int:
        with self._stream:
            return snapshot.save(path, identity, self._manager, self._caches)

    def load(self, file: SafetensorsFile) -> int:
        with self._stream:
            return snapshot.load(file, self._manager, self._caches)


DEFAULT_KV_CACHE_MEMORY = 4 << 30


def pages_of_memory(memory: int, bytes_per_page: int) -> int:
    """The number of pages that these bytes hold."""
    memory = check_int("kv_cache_memory", memory, 0)
    if memory < bytes_per_page:
        raise ValueError(f"kv_cache_memory is {memory} bytes but one page needs {bytes_per_page}")
    return memory // bytes_per_page


def pages_on_cpu(max_model_len: int, max_num_seqs: int, block_size: int, bytes_per_page: int) -> int:
    """The pages that max_num_seqs sequences of max_model_len need: at most 4 GiB and a quarter of the machine's memory,
    but at least one sequence's."""
    pages_of_one = -(-max_model_len // block_size)
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    affordable = min(DEFAULT_KV_CACHE_MEMORY, machine // 4) // bytes_per_page
    return max(min(pages_of_one * max_num_seqs, affordable), pages_of_one)


def pages_on_gpu(affordable_bytes: int, gpu_memory_utilization: float, bytes_per_page: int) -> int:
    """The number of pages that the affordable bytes hold. MemoryError where that is none."""
    num_blocks = affordable_bytes // bytes_per_page
    if num_blocks < 1:
        raise MemoryError(
            f"gpu_memory_utilization={gpu_memory_utilization} leaves no room for a page of {bytes_per_page} bytes"
        )
    return num_blocks
