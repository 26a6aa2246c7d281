"""How large a page is, and how many pages a KV cache has."""

from __future__ import annotations

import os

from pagedkv.models.config import Qwen3Config
from pagedkv.models.weights import ITEM_BYTES

from ..sampling_params import check_int

DEFAULT_KV_CACHE_MEMORY = 4 << 30


def page_bytes(config: Qwen3Config, kv_cache_dtype: str, block_size: int) -> int:
    """The bytes of a page: keys and values of all layers."""
    item_bytes = ITEM_BYTES[kv_cache_dtype]
    return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * item_bytes


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
