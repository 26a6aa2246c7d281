"""The workload of nano-vllm's bench.py, and the floor: the least time that a device needs for it.

256 requests at once: prompts of U(100, 1024) ids of 0..10000, U(100, 1024) new tokens each, drawn with Python's random,
seed 0: 142,827 prompt and 133,966 new tokens. Temperature 0.6, end-of-sequence ignored, pages of 256 tokens
(https://github.com/GeeeekExplorer/nano-vllm/blob/main/bench.py). Random weights do the same work as a model's own.
"""

from __future__ import annotations

import json
import math
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv import Tensor, ops
from pagedkv.engine.llm import LLM
from pagedkv.engine.outputs import RequestOutput
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.models import ITEM_BYTES

MAX_LEN = 1024  # of a prompt, and of its continuation
NUM_TIMES, NUM_CALLS = 5, 10  # of what is timed
BLOCK_SIZE = 256  # nano-vllm's own

QUANTISED_BYTES = {"fp8": 1, "int4": 0.5}  # of a weight, at least: without scales

# Shapes of published models, by their size: hidden, intermediate, layers, query heads, KV heads, tied embeddings.
SHAPES = {
    "0.6B": (1024, 3072, 28, 16, 8, True),
    "1.7B": (2048, 6144, 28, 16, 8, True),
    "4B": (2560, 9728, 36, 32, 8, True),
    "8B": (4096, 12288, 36, 32, 8, False),
    "14B": (5120, 17408, 40, 40, 8, False),
    "32B": (5120, 25600, 64, 64, 8, False),
}


def write_shape(size: str, folder: Path) -> Path:
    """A folder with the config.json of Qwen3 of this size, to be loaded with load_format="dummy"."""
    hidden, intermediate, layers, q_heads, kv_heads, is_tied = SHAPES[size]
    config = {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "num_hidden_layers": layers,
        "num_attention_heads": q_heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1e6,
        "tie_word_embeddings": is_tied,
        "torch_dtype": "bfloat16",
        "eos_token_id": 151645,
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@dataclass(frozen=True)
class Workload:
    prompts: list[list[int]]
    params: list[SamplingParams]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(map(len, self.prompts))

    @property
    def num_new_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def lengths(self) -> list[int]:
        """Of the answers, which have no other end."""
        return [one.max_tokens or 0 for one in self.params]


def make_workload(
    num_requests: int = 256, seed: int = 0, *, max_len: int | None = None, vocab_size: int = 1 << 31
) -> Workload:
    """Seed 0 and 256 requests are the workload for which others publish figures; other seeds give fresh prompts. A
    model that takes less gets shorter prompts and answers (max_len each), and tokens of its vocabulary."""
    rng, longest = random.Random(seed), max_len or MAX_LEN
    lengths, last = (min(100, longest), longest), min(10000, vocab_size - 1)
    prompts = [[rng.randint(0, last) for _ in range(rng.randint(*lengths))] for _ in range(num_requests)]
    params = [
        SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=rng.randint(*lengths), seed=i)
        for i in range(num_requests)
    ]
    return Workload(prompts, params)


# --- the floor


@dataclass(frozen=True)
class Ceiling:
    """What the device reaches at best, measured."""

    bytes_per_second: float
    flops: float  # per second, of matrix products


def measure_ceiling(device: str, dtype: str) -> Ceiling:
    """Bytes: the better of a large copy (read and write) and a product of one row (a read). FLOPs: a large product."""
    num_bytes, side = (2 << 30, 8192) if device != "cpu" else (128 << 20, 1024)
    columns = 4096
    weight = ops.empty((num_bytes // columns // ITEM_BYTES[dtype], columns), dtype, device)
    weight.copy_(_random(weight.shape, dtype))
    half = len(weight) // 2
    row, product = ops.empty((1, columns), dtype, device), ops.empty((1, len(weight)), dtype, device)
    row.copy_(_random(row.shape, dtype))
    seconds = min(
        _seconds(lambda: weight[:half].copy_(weight[half : 2 * half]), device),
        _seconds(lambda: ops.linear(row, weight, out=product), device),
    )
    square = weight.view(-1)[: side * side].view((side, side))
    out = ops.empty((side, side), dtype, device)
    flops = 2 * side**3 / _seconds(lambda: ops.linear(square, square, out=out), device)
    return Ceiling(weight.nbytes / seconds, flops)


def _random(shape: tuple[int, ...], dtype: str) -> Tensor:
    """Random values that repeat: zeros take less power than numbers, and so less time."""
    size = math.prod(shape)
    values = np.resize(np.random.default_rng(0).standard_normal(min(size, 1 << 22), np.float32), shape)
    return ops.asarray(values, dtype)


def _seconds(function: Callable[[], object], device: str) -> float:
    """Of one call: the median of several times, each of so many calls that launching them takes no extra time."""
    times = []
    for _ in range(NUM_TIMES + 1):  # the first warms up
        ops.synchronize(device)
        start = time.perf_counter()
        for _ in range(NUM_CALLS):
            function()
        ops.synchronize(device)
        times.append((time.perf_counter() - start) / NUM_CALLS)
    return statistics.median(times[1:])


def floor_seconds(llm: LLM, workload: Workload, ceiling: Ceiling) -> float:
    """The least time for this model and its dtypes, all requests at once: every decode step reads the weights (or
    multiplies with them, where that takes longer) and the keys and values of every sequence; prompts are products."""
    config: Any = llm.config
    itemsize = ITEM_BYTES[llm.dtype]
    q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
    attentions = config.num_layers * config.hidden_size * (2 * q_size + 2 * kv_size)
    layers, head = attentions + _mlp_numbers(config, None), config.vocab_size * config.hidden_size
    stores = config.quantization.stores if config.quantization else ()
    weight_size = min(map(QUANTISED_BYTES.__getitem__, stores), default=itemsize)
    prompts, ends = list(map(len, workload.prompts)), workload.lengths
    linear = 0.0
    for step in range(1, max(ends)):  # the first token of each is the prompt's
        rows = sum(end > step for end in ends)
        weight_bytes = (attentions + _mlp_numbers(config, rows)) * weight_size + head * itemsize
        linear += max(weight_bytes / ceiling.bytes_per_second, 2 * rows * (layers + head) / ceiling.flops)
    num_keys = sum(sum(range(n + 1, n + end)) for n, end in zip(prompts, ends, strict=True))
    attention = num_keys * config.num_layers * 2 * kv_size * ITEM_BYTES[llm.kv_cache_dtype] / ceiling.bytes_per_second
    pairs = sum(n * (n + 1) // 2 for n in prompts)
    prefill = 2 * (layers * sum(prompts) + head * len(prompts)) + 4 * q_size * config.num_layers * pairs
    seconds: float = linear + attention + prefill / ceiling.flops
    return seconds


def _mlp_numbers(config: Any, rows: int | None) -> float:
    """Of the weights of all layers' MLPs: those that a row is multiplied by (None), or that so many rows read. Of
    experts these are as many as rows have that choose at random, as random weights make them."""
    has_experts = getattr(config, "has_experts", (False,) * config.num_layers)
    dense: float = 3 * config.hidden_size * config.intermediate_size
    if not any(has_experts):
        return len(has_experts) * dense
    chosen, experts = config.num_chosen, config.num_experts
    used = chosen if rows is None else experts * (1 - (1 - chosen / experts) ** rows)
    sparse: float = config.hidden_size * (3 * config.expert_size * used + experts)  # and the router
    return sum(sparse if each else dense for each in has_experts)


# --- a run


def make_llm(folder: Path, workload: Workload, **options: Any) -> LLM:
    """An engine in which all requests run at once, as far as its pool reaches."""
    num_requests = len(workload.prompts)
    sizes = {
        "max_num_seqs": num_requests,
        "max_num_batched_tokens": max(16384, num_requests),
        "max_model_len": 2 * MAX_LEN,
        "block_size": BLOCK_SIZE,
    }
    return LLM(folder, **(sizes | options))


def warm_up(llm: LLM, workload: Workload) -> None:
    """Runs the workload with a few tokens each, so that what operations do at a shape's first use is done."""
    llm.generate(workload.prompts, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=4), use_tqdm=False)


def run(llm: LLM, workload: Workload, *, use_tqdm: bool = False) -> tuple[list[RequestOutput], float]:
    """The workload once, and the seconds from the first request's submission to the last token."""
    llm.manager.reset_prefix_cache()  # else an earlier run's prompts would cost nothing
    start = time.perf_counter()
    outputs = llm.generate(workload.prompts, workload.params, use_tqdm=use_tqdm)
    seconds = time.perf_counter() - start
    for output, params in zip(outputs, workload.params, strict=True):
        if output.error is not None:
            raise output.error
        assert len(output.token_ids) == params.max_tokens
    return outputs, seconds
