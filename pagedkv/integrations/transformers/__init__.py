"""Hugging Face transformers on pagedkv's attention: `generate` and continuous batching (`generate_batch`).

    from pagedkv.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="pagedkv")
    model.generate(**inputs)                # keys and values as transformers keeps them, dense, read in place
    model.generate_batch(prompts)           # pages of its PagedAttentionCache, prefill included, read in place

Written for transformers 5.17, 5.23 and 5.24. Float32, float16 and bfloat16 on the CPU and on CUDA; grouped-query
attention, sliding windows, softcap, sinks; padding on the left, and on the right if the outputs there do not matter;
dynamic and static caches; encoders. In continuous batching the layers with a sliding window keep the cache's own
update, which copies up to window - 1 past keys of each request: it overwrites a ring of keys, which must be read
before.

There are no gradients, no dropout and no attention weights, and no masks but causal and bidirectional ones, with or
without a window and padding. Whatever else is asked for raises NotImplementedError.
"""

try:
    import torch  # noqa: F401
    import transformers  # noqa: F401
except ModuleNotFoundError as error:
    if error.name not in ("torch", "transformers"):
        raise
    raise ImportError(f"pagedkv.integrations.transformers needs the package {error.name}, not installed") from error

from transformers import AttentionInterface, AttentionMaskInterface

from pagedkv.integrations.transformers import attention, batching, masks

__all__ = ["NAME", "register"]

NAME = "pagedkv"
"""The attn_implementation."""


def register() -> None:
    """Makes attn_implementation="pagedkv" known to transformers in this process. A second call changes nothing.

    Raises NotImplementedError if the installed transformers lacks the functions that continuous batching replaces.
    """
    batching.install(NAME)
    AttentionInterface.register(NAME, attention.attend)
    AttentionMaskInterface.register(NAME, masks.make_mask)
