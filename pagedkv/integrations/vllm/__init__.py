"""The attention backend PAGEDKV of vLLM: the model's attention runs on pagedkv's kernels, in an unmodified vLLM.

    vllm serve Qwen/Qwen3-8B --attention-backend PAGEDKV
    vllm.LLM("Qwen/Qwen3-8B", attention_backend="PAGEDKV")

If pagedkv is installed in the same environment, each process of vLLM finds `register` by the entry point group
`vllm.general_plugins`. Written for vLLM 0.33.0; v0_26.py has what differs in 0.26.0.

Decoder attention in float16, bfloat16 and float32, with a KV cache of the same type or of fp8 (e4m3, with scales for
the tensor or for each head), sliding windows, logits_soft_cap, ALiBi and sinks; chunked prefill, prefix caching and all
modes of CUDA graphs. With VLLM_BATCH_INVARIANT=1 a sequence's sums have one order, whatever the batch. When it starts,
vLLM refuses what a method supports_... here denies: encoders, MLA, context parallelism, PrefixLM and fp8 e5m2. A
quantised output, and a `causal` that differs within a batch, raise NotImplementedError.
"""

from __future__ import annotations

try:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
except ModuleNotFoundError as error:
    raise ImportError(f"pagedkv.integrations.vllm needs vLLM (package vllm): {error}") from error

from .backend import NAME, PagedKVBackend

__all__ = ["NAME", "PagedKVBackend", "register", "registered"]


def register() -> None:
    """Makes the name PAGEDKV known to vLLM, which calls this once or more in each process."""
    if NAME in AttentionBackendEnum.__members__:
        return
    if hasattr(AttentionBackendEnum, "register"):
        register_backend(NAME, f"{PagedKVBackend.__module__}.{PagedKVBackend.__name__}")
        # A process that vLLM spawns unpickles its configuration, with this name in it, before it loads plugins.
        AttentionBackendEnum[NAME].__reduce_ex__ = lambda protocol: (registered, ())
    else:
        from . import v0_26  # which that release alone has the names for

        v0_26.register()


def registered() -> AttentionBackendEnum:
    """vLLM's enum member PAGEDKV, whether or not `register` was called in this process before."""
    register()
    return AttentionBackendEnum[NAME]
