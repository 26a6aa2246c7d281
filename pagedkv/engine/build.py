"""Makes an engine (model, KV cache, runner, scheduler) of a folder and options."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

from pagedkv import BlockManager, ops
from pagedkv.checks import check_int
from pagedkv.models import ITEM_BYTES
from pagedkv.models.dummy import DummyCheckpoint
from pagedkv.models.generation import read_generation
from pagedkv.models.lora import LoraSize
from pagedkv.models.registry import buffer_bytes, read_spec
from pagedkv.models.spec import Spec
from pagedkv.models.weights import Checkpoint

from .cache.pool import pages_of_memory, pages_on_cpu
from .core import EngineCore
from .options import EngineOptions
from .requests.adapters import AdapterStore
from .runner.make import make_runner, make_runners
from .runner.model_runner import ModelRunner
from .runner.plan import RunnerPlan, batch_sizes_of, devices_of_ranks
from .sampling_params import SamplingParams
from .scheduling.scheduler import Scheduler
from .speculation.draft_model import make_draft_model, plan_of_draft
from .speculation.speculation import Speculation
from .speculation.suffix import SuffixDrafter
from .text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)


def read_model(folder: Path, tokenizer: Tokenizer, quantization: str | None) -> Spec:
    """What the folder says of the model, with the tokenizer's end of a sequence among the model's, and its weights
    quantised as is wanted."""
    spec = read_spec(folder, quantization)
    ends = spec.eos_token_ids | tokenizer.eos_token_ids()
    return replace(spec, eos_token_ids=frozenset(i for i in ends if 0 <= i < spec.vocab_size))


def read_default_params(folder: Path) -> SamplingParams:
    """The SamplingParams of requests that bring none: see read_generation()."""
    try:
        return SamplingParams(**read_generation(folder))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{folder / 'generation_config.json'}: {error}") from None


def build(
    folder: Path,
    spec: Spec,
    options: EngineOptions,
    *,
    tokenizer: Tokenizer,
    device: str,
    dtype: str,
    kv_cache_dtype: str,
    owner: str,
) -> tuple[EngineCore, AdapterStore | None, dict[str, int], Callable[[], dict[str, str]]]:
    """The core of an engine, ready to serve; where its requests may have adapters, these; of a GPU, bytes by use; and
    what a saved cache must agree with, for which the first call reads all weights. `owner` is what messages call the
    engine."""
    bytes_per_page = spec.page_bytes(kv_cache_dtype, options.block_size)
    plan = _plan(folder, spec, options, device, dtype, kv_cache_dtype)
    num_blocks = _wanted_blocks(options, plan, bytes_per_page)
    num_host_blocks = pages_of_memory(options.swap_space, bytes_per_page, "swap_space") if options.swap_space else 0
    gc.collect()  # an engine that is garbage, but not collected yet, still has its pool
    memory = _MemoryCount(device)
    start = time.perf_counter()
    draft_plan = None if options.speculation is None else plan_of_draft(options.speculation, plan, tokenizer)
    runner, checkpoint = make_runners(plan)
    try:
        adapters = None if plan.lora is None else _adapter_store(spec, runner.model, plan.lora, dtype)
        logger.info("weights of %s were loaded in %.1f s", folder, time.perf_counter() - start)
        memory.count("weights and buffers")
        if draft_plan is not None:
            runner.draft = make_runner(draft_plan)[0]
            memory.count("draft model")
        if device != "cpu":
            for each in runner.with_draft:
                each.on_all("tune")  # which takes each rank as long as it takes
                each.on_all("warm_up")
                each.reserve_one_kernel()
            memory.count("workspaces")
        manager = _allocate_pool(runner, options, num_blocks, num_host_blocks, bytes_per_page)
        memory.count("pool")
        guesser = _guesser(runner, manager.num_blocks) if plan.max_guesses else None
        if runner.draft is not None:
            memory.count("pool of the draft model")
        if device != "cpu":
            for each in runner.with_draft:
                each.on_all("capture_decodes")
            memory.count("graphs")
    except BaseException:
        runner.close()
        raise
    scheduler = Scheduler(
        manager,
        max_num_seqs=plan.max_num_seqs,
        max_num_batched_tokens=plan.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        max_loras=0 if plan.lora is None else plan.lora.num_slots,
        max_num_rows=plan.max_num_rows,
    )

    identity = cache(partial(_identity, plan, checkpoint))
    return EngineCore(runner, scheduler, owner, guesser), adapters, memory.by_name, identity


def _plan(
    folder: Path, spec: Spec, options: EngineOptions, device: str, dtype: str, kv_cache_dtype: str
) -> RunnerPlan:
    num_ranks, speculation = options.tensor_parallel_size, options.speculation
    max_model_len = model_len(options.max_model_len, spec)
    gpu_bytes = None if device == "cpu" else ops.memory_info(device)[1]
    step = step_size(options.max_num_seqs, options.max_num_batched_tokens, spec, dtype, gpu_bytes)
    of_rank = spec if num_ranks == 1 else spec.shard(0, num_ranks)  # raises where it cannot be split
    return RunnerPlan(
        folder=folder, spec=spec, is_dummy=options.load_format == "dummy", dtype=dtype, kv_cache_dtype=kv_cache_dtype,
        devices=devices_of_ranks(device, num_ranks), block_size=options.block_size, max_num_seqs=step.max_num_seqs,
        max_num_batched_tokens=step.max_num_batched_tokens, max_model_len=max_model_len,
        batch_sizes=batch_sizes_of(device, step.max_num_seqs, of_rank), enforce_eager=options.enforce_eager,
        lora=LoraSize(options.max_loras or 1, options.max_lora_rank or 16) if options.enable_lora else None,
        batch_invariant=options.batch_invariant,
        max_guesses=0 if speculation is None else speculation.num_speculative_tokens,
    )  # fmt: skip


def _allocate_pool(
    runner: ModelRunner, options: EngineOptions, num_blocks: int | None, num_host_blocks: int, bytes_per_page: int
) -> BlockManager:
    """num_blocks: None: as many pages as there is room for."""
    if num_blocks is None:
        share = options.gpu_memory_utilization
        num_blocks = min(runner.on_all("affordable_blocks", share))
        if num_blocks < 1:
            raise MemoryError(f"gpu_memory_utilization={share} leaves no room for a page of {bytes_per_page} bytes")
    manager = BlockManager(
        num_blocks, options.block_size, enable_prefix_caching=options.enable_prefix_caching,
        eviction=options.eviction, num_host_blocks=num_host_blocks,
    )  # fmt: skip
    runner.allocate(manager)
    return manager


def _identity(plan: RunnerPlan, checkpoint: Checkpoint | DummyCheckpoint) -> dict[str, str]:
    return {
        "model": checkpoint.fingerprint(),
        "config": plan.spec.fingerprint(),
        "dtype": plan.dtype,
        "kv_cache_dtype": plan.kv_cache_dtype,
        "block_size": str(plan.block_size),
    } | ({"batch_invariant": "True"} if plan.batch_invariant else {})


def _guesser(runner: ModelRunner, num_blocks: int) -> Speculation:
    """By the draft model, whose pool it makes, or else by an index of texts."""
    drafter = SuffixDrafter() if runner.draft is None else make_draft_model(runner.draft, num_blocks)
    return Speculation(drafter, runner.plan.max_guesses, runner.plan.max_num_rows)


def _adapter_store(spec: Spec, model: Any, size: LoraSize, dtype: str) -> AdapterStore:
    shapes = getattr(model, "adapter_shapes", {})
    if not shapes:
        raise NotImplementedError(f"enable_lora is True but no projection of {spec.family} models takes adapters here")
    return AdapterStore(shapes, dtype, max_loras=size.num_slots, max_rank=size.max_rank)


def _wanted_blocks(options: EngineOptions, plan: RunnerPlan, bytes_per_page: int) -> int | None:
    """The number of pages; None: as many as the GPU has room for."""
    if options.num_blocks is not None:
        return options.num_blocks
    if options.kv_cache_memory is not None:
        return pages_of_memory(options.kv_cache_memory, bytes_per_page)
    if plan.devices[0] == "cpu":
        return pages_on_cpu(plan.max_model_len, plan.max_num_seqs, plan.block_size, bytes_per_page)
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


@dataclass(frozen=True)
class StepSize:
    max_num_seqs: int
    max_num_batched_tokens: int

    def num_bytes(self, spec: Spec, dtype: str) -> int:
        """Of the model's buffers and of the logits: nearly all of the memory that grows with a step."""
        buffers = self.max_num_batched_tokens * buffer_bytes(spec, dtype)
        return buffers + self.max_num_seqs * spec.vocab_size * ITEM_BYTES["float32"]


GPU = StepSize(256, 16384)
CPU = StepSize(64, 2048)
MOST_OF_GPU = 8  # a step's memory times this is at most a GPU's


def step_size(
    num_seqs: int | None, num_tokens: int | None, spec: Spec, dtype: str, gpu_bytes: int | None
) -> StepSize:
    """What is given, filled up from the defaults of a GPU with so many bytes, or of the CPU (None). A GPU for which its
    own are too large gets the CPU's."""
    size = _filled_up(num_seqs, num_tokens, CPU)
    if gpu_bytes is not None:
        large = _filled_up(num_seqs, num_tokens, GPU)
        if large.num_bytes(spec, dtype) * MOST_OF_GPU <= gpu_bytes:
            size = large
    return size


def _filled_up(num_seqs: int | None, num_tokens: int | None, default: StepSize) -> StepSize:
    """A default gives way to what is given: every sequence that runs may decode a token in a step."""
    if num_seqs is None:
        num_seqs = min(default.max_num_seqs, num_tokens or default.max_num_seqs)
    if num_tokens is None:
        num_tokens = max(default.max_num_batched_tokens, num_seqs)
    return StepSize(num_seqs, num_tokens)


def model_len(wanted: int | None, spec: Spec) -> int:
    """The wanted max_model_len, or the model's own; at most the number of positions that the model was made for."""
    if wanted is None:
        return spec.max_position_embeddings
    check_int("max_model_len", wanted, 1)
    if wanted > spec.max_positions:
        raise ValueError(f"max_model_len is {wanted} but the model was made for {spec.max_positions} positions")
    return wanted
