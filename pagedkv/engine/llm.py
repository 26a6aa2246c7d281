"""LLM: a model folder, a KV cache and a scheduler; generate() is all that a user needs."""

from __future__ import annotations

import gc
import itertools
import os
import random
import threading
import time
from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf
from pathlib import Path
from typing import TYPE_CHECKING

import pagedkv
from pagedkv import BlockManager, OutOfBlocks, Stream
from pagedkv.models.config import Qwen3Config
from pagedkv.models.dummy import DummyCheckpoint
from pagedkv.models.qwen3 import Qwen3
from pagedkv.models.weights import ITEM_BYTES, Checkpoint

from .arguments import KV_CACHE_DTYPES, Prompt, check_options, encode, list_of_prompts, model_len, params_of_each
from .model_runner import ModelRunner
from .outputs import EngineStats, RequestMetrics, RequestOutput
from .pipeline import Pipeline
from .sampling_params import SamplingParams, check_int
from .scheduler import Scheduler
from .sequence import Sequence
from .tokenizer import Tokenizer

if TYPE_CHECKING:
    from tqdm import tqdm

DEFAULT_KV_CACHE_MEMORY = 4 << 30

Request = tuple[Prompt, Iterable[int], Sequence]  # a prompt, its token ids, and what becomes of it


class LLM:
    """Continuous batching for a Qwen3 folder in the Hugging Face layout.

    model                   folder with config.json, safetensors and, for text, tokenizer.json
    device                  "cpu", "cuda", "cuda:1"
    load_format             "auto": the safetensors of the folder; "dummy": random weights, to measure speed
    dtype                   "auto" (what config.json says), "float32", "float16" or "bfloat16"; of weights, KV and sums
    kv_cache_dtype          "auto" (dtype) or "fp8" (float8_e4m3fn without scales): half the memory, and half the time
                            that a GPU's decode spends reading it
    block_size              tokens in a page, and the least that prompts share of their cache; a GPU reads pages of 256
                            0.5 to 1 % faster
    num_blocks              pages in the pool; None: as many as kv_cache_memory holds
    kv_cache_memory         bytes; None: on a GPU what gpu_memory_utilization leaves; on the CPU what max_num_seqs
                            sequences of max_model_len need, at most 4 GiB and a quarter of the machine's memory, at
                            least one sequence
    gpu_memory_utilization  share of a GPU's memory that is in use at the end, by the weights, the scratch memory of
                            operations, graphs, and the pool; what others use of it counts, too
    enforce_eager           no CUDA graphs: the same tokens, slower, with less to do at the start
    swap_space              bytes of host memory that the KV of preempted sequences moves to; what does not fit there is
                            computed again later. 0: all of it
    max_num_seqs            sequences that run (hold pages) at a time
    max_num_batched_tokens  tokens computed in a step: prompts are cut into chunks to fit
    max_model_len           prompt and new tokens of a request at most; None: the model's own limit
    enable_prefix_caching   compute a common beginning of prompts once
    seed                    of the seeds drawn for requests without one; None: from the operating system

    To look at: `config`, `stats` (EngineStats), `manager` (the BlockManager), `max_model_len`, `dtype`, `memory` (on a
    GPU, bytes by what they are for, as the driver counts them at the start; graphs of steps that filter, penalise or
    report tokens follow when they are needed, for which there is room).
    """

    def __init__(
        self,
        model: str | os.PathLike[str],
        *,
        device: str = "cpu",
        load_format: str = "auto",
        dtype: str = "auto",
        kv_cache_dtype: str = "auto",
        block_size: int = 16,
        num_blocks: int | None = None,
        kv_cache_memory: int | None = None,
        gpu_memory_utilization: float = 0.9,
        enforce_eager: bool = False,
        swap_space: int = 0,
        max_num_seqs: int = 64,
        max_num_batched_tokens: int = 2048,
        max_model_len: int | None = None,
        enable_prefix_caching: bool = True,
        seed: int | None = None,
    ) -> None:
        check_options(
            dtype=dtype,
            load_format=load_format,
            kv_cache_dtype=kv_cache_dtype,
            gpu_memory_utilization=gpu_memory_utilization,
            enable_prefix_caching=enable_prefix_caching,
            enforce_eager=enforce_eager,
        )
        if num_blocks is not None and kv_cache_memory is not None:
            raise ValueError("num_blocks and kv_cache_memory both say how large the pool is: give one of them")
        block_size = check_int("block_size", block_size, 1)
        max_num_seqs = check_int("max_num_seqs", max_num_seqs, 1)
        max_num_batched_tokens = check_int("max_num_batched_tokens", max_num_batched_tokens, 1)
        seed = None if seed is None else check_int("seed", seed, -(2**63))
        if max_num_batched_tokens < max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {max_num_batched_tokens} but must be at least max_num_seqs={max_num_seqs}: "
                "every sequence that runs may decode a token in a step"
            )
        self.device = "cpu" if device == "cpu" else Stream(device).device  # raises where there is no such GPU
        folder = Path(model)
        if not folder.is_dir():
            raise FileNotFoundError(f"{folder}: no such folder")
        self.config = Qwen3Config.from_folder(folder)
        self.dtype = self.config.dtype if dtype == "auto" else dtype
        self.max_model_len = model_len(max_model_len, self.config)
        self.kv_cache_dtype = KV_CACHE_DTYPES[kv_cache_dtype] or self.dtype
        self.tokenizer = Tokenizer(folder)
        self.stats = EngineStats()

        if num_blocks is not None:
            check_int("num_blocks", num_blocks, 1)
        elif kv_cache_memory is not None or self.device == "cpu":
            num_blocks = self._num_blocks(kv_cache_memory, block_size, max_num_seqs)
        page_bytes = self._page_bytes(block_size)
        num_host_blocks = check_int("swap_space", swap_space, 0) // page_bytes
        self.memory: dict[str, int] = {}
        gc.collect()  # an LLM that is dead but not collected yet has its pool until then
        used = self._used_memory()
        dummy = load_format == "dummy"
        checkpoint = DummyCheckpoint(self.dtype, self.device) if dummy else Checkpoint(folder, self.dtype, self.device)
        self._runner: ModelRunner | None = ModelRunner(
            self.config,
            Qwen3(self.config, checkpoint, self.max_model_len),
            dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype,
            device=self.device,
            block_size=block_size,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=self.max_model_len,
            enforce_eager=enforce_eager,
        )
        checkpoint.finish()
        if self.device != "cpu":
            used = self._count_memory("weights and buffers", used)
            self._runner.warm_up()
            used = self._count_memory("workspaces", used)
        if num_blocks is None:
            num_blocks = self._runner.affordable_bytes(gpu_memory_utilization) // page_bytes
            if num_blocks < 1:
                raise MemoryError(
                    f"gpu_memory_utilization={gpu_memory_utilization} leaves no room for a page of {page_bytes} bytes"
                )
        self.manager = BlockManager(
            num_blocks, block_size, enable_prefix_caching=enable_prefix_caching, num_host_blocks=num_host_blocks
        )
        self._runner.allocate(self.manager)
        if self.device != "cpu":
            used = self._count_memory("pool", used)
            self._runner.prepare_decodes()
            self._count_memory("graphs", used)
        self.scheduler = Scheduler(
            self.manager,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=self.max_model_len,
        )
        self._random = random.Random(seed)
        self._ids = itertools.count()
        self._lock = threading.Lock()

    def _used_memory(self) -> int:
        if self.device == "cpu":
            return 0
        free, total = pagedkv.memory_info(self.device)
        return total - free

    def _count_memory(self, name: str, before: int) -> int:
        used = self._used_memory()
        self.memory[name] = used - before
        return used

    def _page_bytes(self, block_size: int) -> int:
        config = self.config
        item_bytes = ITEM_BYTES[self.kv_cache_dtype]
        return 2 * config.num_layers * block_size * config.num_kv_heads * config.head_dim * item_bytes

    def _num_blocks(self, memory: int | None, block_size: int, max_num_seqs: int) -> int:
        page_bytes = self._page_bytes(block_size)
        if memory is not None:
            memory = check_int("kv_cache_memory", memory, 0)
            if memory < page_bytes:
                raise ValueError(f"kv_cache_memory is {memory} bytes but one page needs {page_bytes}")
            return memory // page_bytes
        pages_of_one = -(-self.max_model_len // block_size)
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        affordable = min(DEFAULT_KV_CACHE_MEMORY, machine // 4) // page_bytes
        return max(min(pages_of_one * max_num_seqs, affordable), pages_of_one)

    # --- generate

    def generate(
        self,
        prompts: str | SequenceOf[Prompt],
        sampling_params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
    ) -> list[RequestOutput]:
        """One output for every prompt, in order. A string is one prompt; token ids are a list inside the list.

        A request that cannot be served has finish_reason "error" and its exception in `error`; the others go on.
        Calls from several threads are served one after the other.
        """
        all_prompts = list_of_prompts(prompts)
        params = params_of_each(sampling_params, len(all_prompts))
        start_time = time.perf_counter()
        # Not under the lock: a prompt may run any code.
        vocab_size = self.config.vocab_size
        encoded = [encode(i, prompt, self.tokenizer, vocab_size) for i, prompt in enumerate(all_prompts)]
        with self._lock:
            runner = self._runner
            if runner is None:
                raise RuntimeError("this LLM is closed")
            requests: dict[int, Request] = {}
            try:
                for prompt, (ids, error), one in zip(all_prompts, encoded, params, strict=True):
                    seq = self._submit(ids, error, one, start_time)
                    requests[seq.id] = prompt, ids, seq
                outputs = self._run(runner, requests, use_tqdm)
            finally:  # after an error or an interrupt nothing keeps pages
                self.scheduler.abort([seq for _, _, seq in requests.values()])
        return [outputs.get(id) or self._output(*request) for id, request in requests.items()]

    def _submit(
        self, token_ids: Iterable[int], error: ValueError | None, params: SamplingParams, start_time: float
    ) -> Sequence:
        """Queues the request, or ends it at once: it wants no token, or it can never be served."""
        seed = self._random.getrandbits(63) if params.seed is None else params.seed
        known = [] if error else token_ids
        seq = Sequence(next(self._ids), known, params, seed, self.config.eos_token_ids, start_time)
        try:
            if error:
                raise error
            self.scheduler.check(seq)
        except (ValueError, OutOfBlocks) as error:
            seq.finish("error", time.perf_counter(), error)
            return seq
        if params.max_tokens == 0:
            seq.finish("length", time.perf_counter())
        else:
            self.scheduler.add(seq)
        return seq

    def _run(self, runner: ModelRunner, requests: dict[int, Request], use_tqdm: bool) -> dict[int, RequestOutput]:
        """Until all have ended. Outputs are made while the device computes, but those of the last ones."""
        pipeline, outputs = Pipeline(runner, self.scheduler, self.stats), dict[int, RequestOutput]()
        finished = [seq for _, _, seq in requests.values() if seq.finish_reason is not None]
        with _progress_bar(len(requests), use_tqdm) as bar:
            bar.update(len(finished))
            while pipeline.has_work:
                pipeline.launch()
                for seq in finished:
                    outputs[seq.id] = self._output(*requests[seq.id])
                finished = pipeline.take()
                bar.update(len(finished))
        return outputs

    def _output(self, prompt: Prompt, prompt_token_ids: Iterable[int], seq: Sequence) -> RequestOutput:
        assert seq.finish_reason is not None and seq.finish_time is not None
        token_ids, text = seq.new_tokens, None
        if self.tokenizer.exists:
            text = self.tokenizer.decode(token_ids[:-1] if seq.finish_reason == "stop" else token_ids)
        ttft = None if seq.first_token_time is None else seq.first_token_time - seq.start_time
        return RequestOutput(
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=list(prompt_token_ids),
            text=text,
            token_ids=token_ids,
            logprobs=seq.logprobs,
            finish_reason=seq.finish_reason,
            error=seq.error,
            num_cached_tokens=max(seq.num_cached, 0),
            metrics=RequestMetrics(ttft, seq.finish_time - seq.start_time, seq.num_preemptions),
        )

    def __repr__(self) -> str:
        config, manager, scheduler = self.config, self.manager, self.scheduler
        pages = f"{manager.num_blocks:,} pages of {manager.block_size} tokens"
        size = manager.num_blocks * self._page_bytes(manager.block_size) / 2**30
        beside = "".join(f", {name} {size / 2**30:.2f}" for name, size in self.memory.items() if name != "pool")
        return (
            f"<LLM on {self.device}: {config.num_layers} layers of {config.hidden_size:,}, {self.dtype}; {pages} "
            f"({size:.2f} GiB{beside}); {scheduler.max_num_seqs} sequences of up to {self.max_model_len:,} tokens>"
        )

    # --- the end

    def close(self) -> None:
        """Gives the weights' and the KV cache's memory back. Closing twice is fine; generate() raises then."""
        with self._lock:
            self._runner = None

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _progress_bar(total: int, use_tqdm: bool) -> tqdm:
    from tqdm import tqdm

    return tqdm(total=total, desc="requests", unit="req", disable=not use_tqdm, dynamic_ncols=True)
