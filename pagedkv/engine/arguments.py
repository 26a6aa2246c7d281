"""Checks of what LLM and generate() are given. The error for a wrong value says what is right."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from operator import index
from typing import Any

from pagedkv import Stream, ops
from pagedkv._C import _pack_ids
from pagedkv.models.config import DTYPES, Qwen3Config

from .sampling_params import SamplingParams, check_int
from .tokenizer import Tokenizer

Prompt = str | SequenceOf[int]
KV_CACHE_DTYPES = {"auto": None, "fp8": "float8_e4m3fn"}


def check_options(
    *,
    dtype: str,
    load_format: str,
    kv_cache_dtype: str,
    eviction: str,
    gpu_memory_utilization: float,
    enable_prefix_caching: bool,
    enforce_eager: bool,
    num_blocks: int | None,
    kv_cache_memory: int | None,
) -> None:
    """The options of Engine that are more than an integer."""
    for name, value, allowed in (
        ("dtype", dtype, ("auto", *DTYPES)),
        ("load_format", load_format, ("auto", "dummy")),
        ("kv_cache_dtype", kv_cache_dtype, tuple(KV_CACHE_DTYPES)),
        ("eviction", eviction, ("reuse", "lru")),
    ):
        if value not in allowed:
            raise ValueError(f"{name} is {value!r} but must be {', '.join(allowed[:-1])} or {allowed[-1]}")
    for name, flag in (("enable_prefix_caching", enable_prefix_caching), ("enforce_eager", enforce_eager)):
        if not isinstance(flag, bool):
            raise TypeError(f"{name} is {flag!r} but must be True or False")
    if not 0 < gpu_memory_utilization <= 1:
        raise ValueError(f"gpu_memory_utilization is {gpu_memory_utilization} but must be above 0 and at most 1")
    if num_blocks is not None and kv_cache_memory is not None:
        raise ValueError("num_blocks and kv_cache_memory both say how large the pool is: give one of them")


def find_device(device: str) -> str:
    """The device's full name, "cpu" or "cuda:0", also of "auto". "cpu" does not look for GPUs, which takes a while."""
    if device == "auto":
        device = "cuda" if ops.build_info()["cuda_devices"] else "cpu"
    return "cpu" if device in ("cpu", "cpu:0") else Stream(device).device  # raises where there is no such GPU


def model_len(wanted: int | None, config: Qwen3Config) -> int:
    """The wanted max_model_len, or the model's own; at most the number of positions that the model was made for."""
    limit = config.max_position_embeddings
    if config.rope.type == "yarn":  # files of transformers 4 scale without raising max_position_embeddings
        limit = max(limit, int(config.rope.original_max_position_embeddings * config.rope.factor))
    if wanted is None:
        return config.max_position_embeddings
    check_int("max_model_len", wanted, 1)
    if wanted > limit:
        raise ValueError(f"max_model_len is {wanted} but the model was made for {limit} positions")
    return wanted


def list_of_prompts(prompts: str | SequenceOf[Prompt]) -> list[Prompt]:
    if isinstance(prompts, str):
        return [prompts]
    if not isinstance(prompts, Iterable):
        raise TypeError(f"prompts is {prompts!r} but must be a string or a list of prompts")
    return list(prompts)


def is_chat(prompt: Any) -> bool:
    """Whether the prompt is a list of messages, neither a text nor token ids."""
    return isinstance(prompt, SequenceOf) and len(prompt) > 0 and isinstance(prompt[0], Mapping)


def list_of_chats(messages: Any) -> list[Any]:
    """A list of chats. One chat is a list of messages."""
    if not isinstance(messages, SequenceOf) or isinstance(messages, (str, bytes)):
        raise TypeError(f"messages is {messages!r} but must be a list of messages, or a list of such lists")
    return [messages] if not messages or is_chat(messages) else list(messages)


def check_vocabulary(params: SamplingParams, vocab_size: int) -> None:
    """Raises ValueError where an option names a token that the model does not have."""
    for name in ("allowed_token_ids", "logit_bias", "stop_token_ids"):
        bad = [token for token in getattr(params, name) or () if token >= vocab_size]
        if bad:
            raise ValueError(f"{name} holds token id {bad[0]}, which is not in 0..{vocab_size - 1}")


def params_of_each(
    given: SamplingParams | SequenceOf[SamplingParams] | None, default: SamplingParams, count: int
) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or default] * count
    params = list(given)
    if len(params) != count:
        raise ValueError(f"{len(params)} sampling_params for {count} prompts")
    for one in params:
        if not isinstance(one, SamplingParams):
            raise TypeError(f"sampling_params holds {one!r}, which is no SamplingParams")
    return params


def encode(
    name: str, prompt: Prompt, tokenizer: Tokenizer, vocab_size: int
) -> tuple[array[int] | list[int], ValueError | None]:
    """The token ids of a prompt, and the error if they are wrong. A prompt of the wrong type raises TypeError, whose
    message calls it `name`. The first step waits for this: 144,000 ids take 1 ms, and 10 ms in a loop of Python."""
    if isinstance(prompt, str):
        try:
            prompt = tokenizer.encode(prompt)
        except UnicodeEncodeError as error:
            return [], error
    if isinstance(prompt, (int, bytes)) or not hasattr(prompt, "__len__"):
        raise TypeError(
            f"a prompt is a string or a list of token ids, not {prompt!r} (one prompt of token ids: [[1, 2, 3]])"
        )
    try:
        given = tuple(prompt)
        try:
            return array("i", _pack_ids(given, vocab_size)), None
        except (TypeError, ValueError):
            token_ids = list(map(index, given))
    except TypeError as error:
        raise TypeError(f"{name} holds no token ids: {error}") from None
    bad = next(token for token in token_ids if not 0 <= token < vocab_size)
    return token_ids, ValueError(f"token id {bad} is not in 0..{vocab_size - 1}")
