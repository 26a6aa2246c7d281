"""The options of an engine: one list for LLM, Engine and AsyncEngine, their documentation, and the command line."""

from __future__ import annotations

import inspect
import re
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from pagedkv import Stream, ops
from pagedkv.checks import check_float, check_int, check_names
from pagedkv.models import DTYPES

from .speculative_config import SpeculativeConfig

KV_CACHE_DTYPES = {"auto": None, "fp8": "float8_e4m3fn", "float8_e4m3fn": "float8_e4m3fn"}
CHOICES = {
    "load_format": ("auto", "dummy"),
    "dtype": ("auto", *DTYPES),
    "quantization": (None, "fp8"),
    "kv_cache_dtype": tuple(KV_CACHE_DTYPES),
    "eviction": ("reuse", "lru"),
}
LOWEST = {
    "max_loras": 1, "max_lora_rank": 1, "tensor_parallel_size": 1,
    "block_size": 1, "swap_space": 0, "num_blocks": 1, "max_num_seqs": 1, "max_num_batched_tokens": 1, "seed": -(2**63)
}  # fmt: skip
HIGHEST = {"max_num_seqs": 2**20, "tensor_parallel_size": 8}


@dataclass(kw_only=True)
class EngineOptions:
    """A wrong value raises at once.

    Args:
        revision: a branch, tag or commit of a model on the hub
        device: "auto": a GPU where there is one; "cpu", "cuda", "cuda:1", or a torch.device
        load_format: "auto": the safetensors of the folder; "dummy": random weights, to measure speed
        dtype: of weights, activations and KV: "auto" (what config.json says), "float32", "float16" or "bfloat16", or
            one of these as PyTorch or NumPy has it
        quantization: None: weights are as the checkpoint has them; "fp8": those of 16 bits become float8_e4m3fn with a
            scale for each block of 128 x 128 while they are loaded, but for those of the head and of routers
        kv_cache_dtype: "auto" (dtype) or "fp8" (float8_e4m3fn without scales): half the memory, and half the time that
            a GPU's decode spends reading it
        block_size: tokens per page; prompts share whole pages of their cache. With pages of 256 a GPU is 0.5 to 1 %
            faster
        num_blocks: pages in the pool; None: as many as kv_cache_memory holds
        kv_cache_memory: bytes of the pool; None: on a GPU what gpu_memory_utilization leaves; on the CPU what
            max_num_seqs sequences of max_model_len need, at most 4 GiB and a quarter of the machine's memory, but at
            least one sequence
        gpu_memory_utilization: the share of a GPU's memory that may be in use: by the weights, the scratch memory of
            operations, graphs and the pool, and by other processes
        enforce_eager: no CUDA graphs: the same tokens and a shorter start, but slower steps
        batch_invariant: the bits of a token depend on its request alone, whatever else runs, however its prompt is
            cut, and whether its prefix was cached, it was preempted, or its steps were graphs. Steps take longer: see
            docs/engine.md
        swap_space: bytes of host memory for the KV of preempted sequences; KV that does not fit there is computed
            again. 0: all KV is
        max_num_seqs: sequences that run (hold pages) at a time; None: 256 on a GPU, 64 on the CPU, and no more than a
            given max_num_batched_tokens
        max_num_batched_tokens: tokens computed in a step: prompts are cut into chunks to fit; None: 16,384 on a GPU,
            2,048 on the CPU, and no fewer than a given max_num_seqs. A GPU gets the CPU's numbers where the buffers and
            logits of such a step would take more than an eighth of its memory; `scheduler` has those in force
        max_model_len: the most tokens of a request, prompt and new ones; None: the model's own limit
        enable_prefix_caching: compute a common prefix of prompts once
        eviction: "reuse" keeps cached pages longer that were found again, "lru" does not: see BlockManager
        enable_lora: requests may have adapters of low rank (lora_request). The norms of all requests run as calls of
            their own then, two more a layer
        max_loras: how many adapters the requests that run may have at a time, and how many the device holds; None: 1
        max_lora_rank: the highest rank of an adapter; memory is allocated for max_loras of it. None: 16
        tensor_parallel_size: how many processes, at most 8, compute every step together, each with a GPU and a share of
            the weights and of the KV cache. This process is the first one: see docs/parallel.md
        logprobs_mode: "raw_logprobs": log probabilities are those before temperature, penalties, filters and masks
        speculative_config: who guesses the next tokens of requests, so that one step gives several of them; guesses
            that are wrong cost a little time, and none changes an answer. A dict, or JSON of one: "method": "suffix"
            (what followed the last tokens before: in the prompt, the answer or earlier requests) or "draft_model" (a
            smaller model of the same vocabulary); "model": that one's folder or name; "num_speculative_tokens": the
            most guesses of a request in a step, 7 by default. See docs/engine.md
        seed: starts the generator of seeds for requests without one; None: the operating system's randomness
    """

    revision: str | None = None
    device: Any = "auto"
    load_format: str = "auto"
    dtype: Any = "auto"
    quantization: Literal["fp8"] | None = None
    kv_cache_dtype: Any = "auto"
    block_size: int = 16
    num_blocks: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    batch_invariant: bool = False
    swap_space: int = 0
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    max_model_len: int | None = None
    enable_prefix_caching: bool = True
    eviction: Literal["reuse", "lru"] = "reuse"
    enable_lora: bool = False
    max_loras: int | None = None
    max_lora_rank: int | None = None
    tensor_parallel_size: int = 1
    logprobs_mode: Literal["raw_logprobs"] = "raw_logprobs"
    speculative_config: Mapping[str, Any] | str | None = None
    seed: int | None = None

    def __post_init__(self) -> None:
        for name in ("dtype", "kv_cache_dtype"):
            value = getattr(self, name)
            if not isinstance(value, str):
                try:
                    setattr(self, name, ops.empty(0, value).dtype)  # its name
                except TypeError:
                    raise TypeError(f"{name} is {value!r} but must be a dtype, or one's name") from None
        for name, allowed in CHOICES.items():
            if not isinstance(getattr(self, name), str | None) or getattr(self, name) not in allowed:
                right = f"{', '.join(map(str, allowed[:-1]))} or {allowed[-1]}"
                raise ValueError(f"{name} is {getattr(self, name)!r} but must be {right}")
        if self.logprobs_mode != "raw_logprobs":  # which vLLM has, too
            raise NotImplementedError(f"logprobs_mode is {self.logprobs_mode!r}; only 'raw_logprobs' is supported")
        for name in ("enable_prefix_caching", "enforce_eager", "batch_invariant", "enable_lora"):
            if not isinstance(getattr(self, name), bool):
                raise TypeError(f"{name} is {getattr(self, name)!r} but must be True or False")
        share = check_float("gpu_memory_utilization", self.gpu_memory_utilization, 0, 1, is_open=True)
        self.gpu_memory_utilization = share
        if self.num_blocks is not None and self.kv_cache_memory is not None:
            raise ValueError("num_blocks and kv_cache_memory both say how large the pool is: give one of them")
        for name, least in LOWEST.items():
            if getattr(self, name) is not None or getattr(EngineOptions, name) is not None:
                setattr(self, name, check_int(name, getattr(self, name), least, HIGHEST.get(name, 2**63 - 1)))
        for name in ("max_loras", "max_lora_rank"):
            if getattr(self, name) is not None and not self.enable_lora:
                raise ValueError(f"{name} is {getattr(self, name)} but enable_lora is False")
        if self.speculation is not None and self.speculation.model is not None and self.tensor_parallel_size > 1:
            raise NotImplementedError(
                "speculative_config has the method 'draft_model' and tensor_parallel_size is "
                f"{self.tensor_parallel_size}: a draft model has one GPU"
            )
        num_seqs, num_tokens = self.max_num_seqs, self.max_num_batched_tokens
        if num_seqs is not None and num_tokens is not None and num_tokens < num_seqs:
            raise ValueError(
                f"max_num_batched_tokens is {num_tokens} but must be at least max_num_seqs={num_seqs}: every sequence "
                "that runs may decode a token in a step"
            )

    @classmethod
    def of(cls, owner: str, options: Mapping[str, Any]) -> EngineOptions:
        """From keyword arguments. owner: the class that was given them, for the TypeError of one that is no option."""
        check_names(owner, options, [each.name for each in fields(cls)])
        return cls(**options)

    @property
    def speculation(self) -> SpeculativeConfig | None:
        return None if self.speculative_config is None else SpeculativeConfig.of(self.speculative_config)


def describe(cls: type, indent: int = 0) -> str:
    """The entries of Args in the docstring of a class."""
    section = re.search(r"^Args:\n(.*?)(\n\n|\Z)", inspect.getdoc(cls) or "", re.S | re.M)
    return textwrap.indent(textwrap.dedent(section[1]), " " * indent) if section else ""


def descriptions(cls: type) -> dict[str, str]:
    """The same by name, each in one line."""
    entries = re.split(r"^(\w+): ", describe(cls), flags=re.M)[1:]
    return {name: " ".join(text.split()) for name, text in zip(entries[::2], entries[1::2], strict=True)}


def find_device(device: Any) -> str:
    """The device's full name, "cpu" or "cuda:0", also of "auto". "cpu" does not look for GPUs, which takes a while."""
    if str(device) == "auto":
        device = "cuda" if ops.build_info()["cuda_devices"] else "cpu"
    return "cpu" if str(device) in ("cpu", "cpu:0") else Stream(device).device  # raises where there is no such GPU
