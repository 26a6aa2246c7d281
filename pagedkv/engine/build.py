"""The parts of an engine (model, KV cache, runner, scheduler), made from a folder and options."""

from __future__ import annotations

import gc
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from pagedkv import BlockManager, ops
from pagedkv.models.config import Qwen3Config
from pagedkv.models.dummy import DummyCheckpoint
from pagedkv.models.hub import model_folder
from pagedkv.models.qwen3 import Qwen3
from pagedkv.models.weights import Checkpoint

from .cache.pool_size import page_bytes, pages_of_memory, pages_on_cpu, pages_on_gpu
from .options import KV_CACHE_DTYPES, EngineOptions
from .requests.prompts import find_device, model_len
from .runner.model_runner import ModelRunner
from .sampling.default_params import read_default_params
from .sampling_params import SamplingParams
from .scheduling.scheduler import Scheduler
from .step_size import step_size
from .text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


@dataclass
class EngineParts:
    """Made by build_parts()."""

    folder: Path
    device: str
    config: Qwen3Config
    dtype: str
    kv_cache_dtype: str
    max_model_len: int
    tokenizer: Tokenizer
    default_params: SamplingParams
    runner: ModelRunner
    manager: BlockManager
    scheduler: Scheduler
    identity: Callable[[], dict[str, str]]  # what a saved cache must agree with: the first call reads all weights
    memory: dict[str, int] = field(default_factory=dict)  # of a GPU, in bytes, by use


def build_parts(model: str | os.PathLike[str], options: EngineOptions) -> EngineParts:
    device, folder = find_device(options.device), model_folder(model, options.revision)
    config, tokenizer, default_params = Qwen3Config.from_folder(folder), Tokenizer(folder), read_default_params(folder)
    ends = config.eos_token_ids | tokenizer.eos_token_ids()
    config = replace(config, eos_token_ids=frozenset(i for i in ends if 0 <= i < config.vocab_size))
    dtype = config.dtype if options.dtype == "auto" else options.dtype
    kv_cache_dtype = KV_CACHE_DTYPES[options.kv_cache_dtype] or dtype
    max_model_len = model_len(options.max_model_len, config)
    bytes_per_page = page_bytes(config, kv_cache_dtype, options.block_size)
    gpu_bytes = None if device == "cpu" else ops.memory_info(device)[1]
    step = step_size(options.max_num_seqs, options.max_num_batched_tokens, config, dtype, gpu_bytes)
    num_blocks = _wanted_blocks(options, device, max_model_len, step.max_num_seqs, bytes_per_page)
    gc.collect()  # an engine that is garbage, but not collected yet, still has its pool
    memory = _MemoryCount(device)
    start = time.perf_counter()
    is_dummy = options.load_format == "dummy"
    checkpoint = DummyCheckpoint(dtype, device) if is_dummy else Checkpoint(folder, dtype, device)
    runner = ModelRunner(
        config, Qwen3(config, checkpoint, max_model_len), dtype=dtype, kv_cache_dtype=kv_cache_dtype, device=device,
        block_size=options.block_size, max_num_seqs=step.max_num_seqs,
        max_num_batched_tokens=step.max_num_batched_tokens, max_model_len=max_model_len,
        enforce_eager=options.enforce_eager,
    )  # fmt: skip
    checkpoint.finish()
    logger.info("weights of %s were loaded in %.1f s", folder, time.perf_counter() - start)
    memory.count("weights and buffers")
    if device != "cpu":
        runner.warm_up()
        memory.count("workspaces")
    if num_blocks is None:
        affordable = runner.affordable_bytes(options.gpu_memory_utilization)
        num_blocks = pages_on_gpu(affordable, options.gpu_memory_utilization, bytes_per_page)
    manager = BlockManager(
        num_blocks,
        options.block_size,
        enable_prefix_caching=options.enable_prefix_caching,
        eviction=options.eviction,
        num_host_blocks=options.swap_space // bytes_per_page,
    )
    runner.allocate(manager)
    memory.count("pool")
    if device != "cpu":
        runner.capture_decodes()
        memory.count("graphs")
    scheduler = Scheduler(
        manager,
        max_num_seqs=step.max_num_seqs,
        max_num_batched_tokens=step.max_num_batched_tokens,
        max_model_len=max_model_len,
    )

    @cache
    def identity() -> dict[str, str]:
        return {
            "model": checkpoint.fingerprint(),
            "config": config.fingerprint(),
            "dtype": dtype,
            "kv_cache_dtype": kv_cache_dtype,
            "block_size": str(options.block_size),
        }

    return EngineParts(
        folder, device, config, dtype, kv_cache_dtype, max_model_len, tokenizer, default_params, runner,
        manager, scheduler, identity, memory.by_name,
    )  # fmt: skip


def _wanted_blocks(
    options: EngineOptions, device: str, max_model_len: int, max_num_seqs: int, bytes_per_page: int
) -> int | None:
    """The number of pages; None: as many as the GPU has room for."""
    if options.num_blocks is not None:
        return options.num_blocks
    if options.kv_cache_memory is not None:
        return pages_of_memory(options.kv_cache_memory, bytes_per_page)
    if device == "cpu":
        return pages_on_cpu(max_model_len, max_num_seqs, options.block_size, bytes_per_page)
    return None


class _MemoryCount:
    """Counts by how much a GPU's used memory has grown, as its driver says. Of the CPU it counts nothing."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.by_name: dict[str, int] = {}
        self._used = self._used_bytes()

    def count(self, name: str) -> None:
        if self._device != "cpu":
            before, self._used = self._used, self._used_bytes()
            self.by_name[name] = self._used - before

    def _used_bytes(self) -> int:
        if self._device == "cpu":
            return 0
        free, total = ops.memory_info(self._device)
        return total - free
