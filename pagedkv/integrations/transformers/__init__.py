"""Hugging Face transformers on pagedkv's attention: `generate` and continuous batching (`generate_batch`).

    from pagedkv.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained(FOLDER, attn_implementation="pagedkv")
    model.generate(**inputs)                # keys and values as transformers keeps them, dense, read in place
    model.generate_batch(prompts)           # pages of its PagedAttentionCache, prefill included, read in place

Written for transformers 5.17 and 5.23. Float32, float16 and bfloat16 on the CPU and on CUDA; heads that share keys,
sliding windows, softcap, sinks; padding on the left, and on the right where queries there do not count; dynamic and
static caches; encoders. In continuous batching the layers with a sliding window keep the cache's own update, which
copies up to window - 1 past keys of each request: it overwrites them in a ring, so they must be read before.

There are no gradients, no dropout and no attention weights; a mask other than causal, bidirectional, a window of them
and padding is refused. All of these raise NotImplementedError.
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
    """Makes attn_implementation="pagedkv" known to transformers, in this process; again has no further effect.

    Raises NotImplementedError where the installed transformers lacks what continuous batching is hooked into.
    """
    batching.install(NAME)
    AttentionInterface.register(NAME, attention.attend)
    AttentionMaskInterface.register(NAME, masks.make_mask)
