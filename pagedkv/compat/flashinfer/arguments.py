"""Arguments that several of FlashInfer's calls take: caches in either layout, dtypes, memory for results."""

from __future__ import annotations

from typing import TypeAlias

import torch

from pagedkv import ops

Pair: TypeAlias = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
Dtype: TypeAlias = str | torch.dtype
Scale: TypeAlias = float | torch.Tensor | None


def dtype_of(name: Dtype) -> torch.dtype:
    if isinstance(name, torch.dtype):
        return name
    return getattr(torch, name if isinstance(name, str) else ops.empty(0, name).dtype)


def check_buffer(name: str, x: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, device: object) -> None:
    for what, given, expected in (
        ("shape", tuple(x.shape), shape),
        ("dtype", x.dtype, dtype),
        ("device", x.device, device),
    ):
        if given != expected:
            raise ValueError(f"{name}: {what} is {given} but must be {expected}")


def check_entries(name: str, x: torch.Tensor, number: int, wanted: str) -> None:
    """For what is copied into a buffer: one entry alone would fill it."""
    if x.numel() != number:
        raise ValueError(f"{name} has {x.numel()} entries but must have {number}, {wanted}")


def check_layout(kv_layout: str) -> None:
    if kv_layout not in ("NHD", "HND"):
        raise KeyError(f"Invalid kv_layout {kv_layout}")


def caches_in_nhd(paged_kv_cache: Pair, kv_layout: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K and V as [num_pages, page_size, num_kv_heads, head_dim]. paged_kv_cache is a tuple of them or one
    tensor [num_pages, 2, ...], in either layout; the dimension of page_size may be left out if it is 1."""
    check_layout(kv_layout)
    if isinstance(paged_kv_cache, torch.Tensor):
        if paged_kv_cache.ndim not in (4, 5):
            raise ValueError(f"paged_kv_cache: has {paged_kv_cache.ndim} dimensions but must have 4 or 5")
        k_cache, v_cache = paged_kv_cache.unbind(1)
    elif isinstance(paged_kv_cache, tuple):
        k_cache, v_cache = paged_kv_cache
    else:
        raise KeyError(f"paged_kv_cache: must be a tensor or a tuple of two, not {type(paged_kv_cache).__name__}")
    return _in_nhd("K", k_cache, kv_layout), _in_nhd("V", v_cache, kv_layout)


def _in_nhd(name: str, cache: torch.Tensor, kv_layout: str) -> torch.Tensor:
    if cache.ndim == 3:
        return cache.unsqueeze(1)
    if cache.ndim != 4:
        raise ValueError(f"paged_kv_cache: {name} has {cache.ndim} dimensions but must have 3 or 4")
    return cache if kv_layout == "NHD" else cache.transpose(1, 2)
