"""The pages of an engine as a whole: resizing the pool, and saving and loading what it holds."""

from __future__ import annotations

import os

from pagedkv import BlockManager
from pagedkv.models.weights import SafetensorsFile

from ..runner.model_runner import ModelRunner
from ..sampling_params import check_int
from . import snapshot
from .pool_size import pages_of_memory


class Pool:
    """The block manager's pages and their memory. Call resize(), save() and load() between two steps."""

    def __init__(self, manager: BlockManager, runner: ModelRunner) -> None:
        self._manager, self._runner = manager, runner

    def wanted_blocks(self, num_blocks: int | None, kv_cache_memory: int | None) -> int:
        """num_blocks, or the number of pages that kv_cache_memory bytes hold. Exactly one of them is given."""
        caches = self._runner.caches
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
            self._runner.caches.resize(num_blocks)
            self._manager.resize(num_blocks)
        else:
            self._manager.resize(num_blocks)
            self._runner.caches.resize(num_blocks)

    def save(self, path: str | os.PathLike[str], identity: dict[str, str]) -> int:
        with self._runner.stream:
            return snapshot.save(path, identity, self._manager, self._runner.caches)

    def load(self, file: SafetensorsFile) -> int:
        with self._runner.stream:
            return snapshot.load(file, self._manager, self._runner.caches)
