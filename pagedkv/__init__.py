"""Paged KV cache, paged attention and a Qwen3 engine in plain C and CUDA C.

Three things that work alone, and an engine built on them: `BlockManager` (the page allocator), `store_kvcache`,
`paged_attention_fwd`, and `LLM`. Arrays come and go by DLPack: PyTorch, NumPy, CuPy and JAX objects are used in place.
"""

from importlib import import_module as _import_module
from typing import Any as _Any

from pagedkv._C import *  # noqa: F403  (the extension's public names, see _C.pyi)
from pagedkv._C import __version__  # noqa: F401

_LAZY = {"LLM": "pagedkv.engine", "SamplingParams": "pagedkv.engine"}  # they need NumPy and tokenizers, the rest does not


def __getattr__(name: str) -> _Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'pagedkv' has no attribute {name!r}")
    value = globals()[name] = getattr(_import_module(_LAZY[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
