"""FlashAttention 3's functions (flash_attn_interface of flash-attn-3) over pagedkv, forward only.

    from pagedkv.compat.flash_attn_3 import flash_attn_with_kvcache

Names, arguments, defaults and results are those of flash_attn_interface as of October 2026; so is the type of an error,
RuntimeError. pack_gqa, sm_margin and scheduler_metadata are hints and change nothing: get_scheduler_metadata returns
None, because a call needs no plan. float8_e4m3fn is taken where all of q, k and v have it; out is bfloat16 then.

Refused with NotImplementedError: qv, attention_chunk, values with another head_dim than keys, seqused_q, gradients, and
a head_dim that is no multiple of 8. Gradients do not flow through flash_attn_with_kvcache, as they do not through
FlashAttention 3's.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch

from pagedkv.compat._attention import (
    MAX_SPLITS,
    Window,
    attend,
    attend_with_kvcache,
    dense,
    dense_batch,
    ragged_keys,
    refuse,
    refuse_gradients,
    refuse_odd_heads,
    with_torchs_errors,
)

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache", "get_scheduler_metadata"]

Result: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]
FP8 = torch.float8_e4m3fn


def _widened(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """bfloat16 holds every float8_e4m3fn number; what is not a cache is small."""
    return tensor.to(torch.bfloat16) if tensor is not None and tensor.dtype == FP8 else tensor


def _refuse_shapes(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, qv: torch.Tensor | None, attention_chunk: int
) -> None:
    refuse(qv=qv, attention_chunk=attention_chunk)
    if v.shape[-1] != k.shape[-1]:
        raise NotImplementedError(
            f"v has a head_dim of {v.shape[-1]} and k of {k.shape[-1]}, which pagedkv does not compute"
        )
    refuse_odd_heads("k", k)
    if (k.dtype == FP8) != (q.dtype == FP8):
        raise RuntimeError(f"q is {q.dtype} but k is {k.dtype}: they must have the same dtype")


def _scales(
    k: torch.Tensor, q_descale: torch.Tensor | None, k_descale: torch.Tensor | None, v_descale: torch.Tensor | None
) -> dict[str, torch.Tensor]:
    """[batch, kv_heads] float32 of an fp8 cache. The factor of the queries may as well multiply their keys."""
    if k.dtype != FP8:
        return {}
    keys = [scale for scale in (q_descale, k_descale) if scale is not None]
    scales = {"k_scale": keys[0] if len(keys) == 1 else keys[0] * keys[1]} if keys else {}
    return scales if v_descale is None else scales | {"v_scale": v_descale}


def _results(out: torch.Tensor, lse: torch.Tensor | None) -> Result:
    """out, or with the lse two empty tensors, too: the partial results of splits, of which there are none."""
    return out if lse is None else (out, lse, lse.new_empty(0), lse.new_empty(0))


@with_torchs_errors
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """q [batch, seqlen_q, heads, head_dim], k and v [batch, seqlen_k, kv_heads, head_dim]: out in q's shape, or with
    return_attn_probs (out, lse [batch, heads, seqlen_q] float32). *_descale: [batch, kv_heads] float32, of fp8."""
    _refuse_shapes(q, k, v, qv, attention_chunk)
    refuse_gradients(q=q, k=k, v=v)
    out, lse = attend(
        _widened(q), dense(k), dense(v), *dense_batch(q, k), softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, num_splits=min(num_splits, MAX_SPLITS),
        return_lse=return_attn_probs, **_scales(k, q_descale, k_descale, v_descale),
    )  # fmt: skip
    return out if lse is None else (out, lse)


@with_torchs_errors
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: bool | None = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> Result:
    """q [total_q, heads, head_dim], k and v [total_k, kv_heads, head_dim], cu_seqlens_* [batch + 1] int32; seqused_k,
    [batch] int32, says how many of a sequence's keys count. Returns out in q's shape, or with return_attn_probs
    (out, lse [heads, total_q] float32)."""
    _refuse_shapes(q, k, v, qv, attention_chunk)
    refuse(seqused_q=seqused_q)
    refuse_gradients(q=q, k=k, v=v)
    out, lse = attend(
        _widened(q), **ragged_keys(k, v, cu_seqlens_k, seqused_k), cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, causal=causal, window_size=window_size,
        softcap=softcap, num_splits=min(num_splits, MAX_SPLITS), return_lse=return_attn_probs,
        **_scales(k, q_descale, k_descale, v_descale),
    )  # fmt: skip
    return out if lse is None else (out, lse)


@with_torchs_errors
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    qv: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    page_table: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k_new: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    rotary_seqlens: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    scheduler_metadata: Any = None,
    num_splits: int = 0,
    pack_gqa: bool | None = None,
    sm_margin: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """As pagedkv.compat.flash_attn.flash_attn_with_kvcache, with a page_table, and ragged: q [total_q, heads, head_dim]
    with cu_seqlens_q and max_seqlen_q, k and v [total_new, kv_heads, head_dim] with cu_seqlens_k_new. cache_batch_idx
    picks rows of a page_table, too; rotary_seqlens, int32 [batch], are positions instead of cache_seqlens. Returns out
    in q's shape, or (out, lse [batch, heads, seqlen_q] or [heads, total_q], and two empty tensors)."""
    _refuse_shapes(q, k_cache, v_cache, qv, attention_chunk)
    out, lse = attend_with_kvcache(
        _widened(q), k_cache, v_cache, _widened(k), _widened(v), cache_seqlens=cache_seqlens, tables=page_table,
        cache_batch_idx=cache_batch_idx, cache_leftpad=cache_leftpad,
        rotary_cos=_widened(rotary_cos), rotary_sin=_widened(rotary_sin),
        rotary_seqlens=rotary_seqlens, rotary_interleaved=rotary_interleaved, cu_seqlens_q=cu_seqlens_q,
        cu_seqlens_k_new=cu_seqlens_k_new, most_queries=q.shape[1] if max_seqlen_q is None else max_seqlen_q,
        max_seqlen_q=max_seqlen_q, softmax_scale=softmax_scale, causal=causal,
        window_size=window_size, softcap=softcap, num_splits=min(num_splits, MAX_SPLITS),
        return_lse=return_softmax_lse, **_scales(k_cache, q_descale, k_descale, v_descale),
    )  # fmt: skip
    return _results(out, lse)


def get_scheduler_metadata(*args: Any, **options: Any) -> None:
    """None: pagedkv divides the work on the device, in the call itself."""
