"""FlashAttention 2's functions (flash-attn 2.8.4) over pagedkv, forward only.

    from pagedkv.compat.flash_attn import flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache

Names, arguments, defaults and results are those of flash-attn; so is the type of an error, RuntimeError. Beyond it,
pages may have any size, cache_leftpad goes with pages too, dtypes are float32, float16 and bfloat16, tensors may lie on
the CPU, and nothing waits for a GPU: a length that does not fit the block table is masked there and recorded for
pagedkv.ops.check_errors().

Refused with NotImplementedError: dropout_p > 0, gradients, and a cache whose head_dim is no multiple of 8. Gradients
do not flow through flash_attn_with_kvcache, as they do not through flash-attn's.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from pagedkv.compat._attention import (
    MAX_SPLITS,
    Window,
    attend,
    attend_with_kvcache,
    dense_batch,
    padded,
    ragged_keys,
    refuse,
    refuse_gradients,
    refuse_odd_heads,
    with_torchs_errors,
)

__all__ = ["flash_attn_func", "flash_attn_varlen_func", "flash_attn_with_kvcache"]

Result: TypeAlias = torch.Tensor | tuple[torch.Tensor, ...]


def _with_infinities(lse: torch.Tensor) -> torch.Tensor:
    """A row that sees no key has the log-sum-exp +inf here, not -inf."""
    return lse.masked_fill(lse == -torch.inf, torch.inf)


def _scale(softmax_scale: float | None, q: torch.Tensor) -> float:
    return q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale


def _results(out: torch.Tensor, lse: torch.Tensor | None, head_dim: int) -> Result:
    """out, or with the lse an empty matrix of probabilities, too: it would show dropout, of which there is none."""
    out = out[..., :head_dim]
    return out if lse is None else (out, _with_infinities(lse), out.new_empty(0))


def _check_head_dims(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Before they are padded, which would make them equal."""
    for name, tensor in (("k", k), ("v", v)):
        if tensor.shape[-1] != q.shape[-1]:
            raise ValueError(f"{name} has a head_dim of {tensor.shape[-1]} but q of {q.shape[-1]}")


@with_torchs_errors
def flash_attn_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Result:
    """q [batch, seqlen_q, heads, head_dim], k and v [batch, seqlen_k, kv_heads, head_dim]: out in q's shape, or with
    return_attn_probs (out, lse [batch, heads, seqlen_q] float32, an empty tensor). Masks align at the keys' end."""
    refuse(dropout_p=dropout_p)
    refuse_gradients(q=q, k=k, v=v)
    _check_head_dims(q, k, v)
    out, lse = attend(
        padded(q), padded(k), padded(v), *dense_batch(q, k),
        softmax_scale=_scale(softmax_scale, q), causal=causal, window_size=window_size, softcap=softcap,
        alibi_slopes=alibi_slopes, return_lse=return_attn_probs,
    )  # fmt: skip
    return _results(out, lse, q.shape[-1])


@with_torchs_errors
def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Result:
    """q [total_q, heads, head_dim], k and v [total_k, kv_heads, head_dim], or pages [num_blocks, page, kv_heads,
    head_dim] where a block_table [batch, max_blocks] int32 is given; cu_seqlens_* [batch + 1] int32. Returns out in q's
    shape, or with return_attn_probs (out, lse [heads, total_q] float32, an empty tensor)."""
    refuse(dropout_p=dropout_p)
    refuse_gradients(q=q, k=k, v=v)
    _check_head_dims(q, k, v)
    head_dim, scale = q.shape[-1], _scale(softmax_scale, q)
    if block_table is None:
        q, keys = padded(q), ragged_keys(padded(k), padded(v), cu_seqlens_k)
    else:
        refuse_odd_heads("k", k)
        keys = dict(k_cache=k, v_cache=v, block_tables=block_table, context_lens=cu_seqlens_k.diff())
    out, lse = attend(
        q, **keys, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q, softmax_scale=scale, causal=causal,
        window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes, return_lse=return_attn_probs,
    )  # fmt: skip
    return _results(out, lse, head_dim)


@with_torchs_errors
def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Window = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Result:
    """q [batch, seqlen_q, heads, head_dim] over k_cache and v_cache [batch_cache, seqlen_cache, kv_heads, head_dim], or
    pages [num_blocks, page, kv_heads, head_dim] with a block_table [batch, max_blocks] int32.

    k and v [batch, seqlen_new, kv_heads, head_dim] are first written, in place, after the cache_seqlens (an int or
    int32 [batch]; None: the whole cache) of each sequence; rotary_cos and rotary_sin [positions, rotary_dim / 2] turn
    them and q: from cache_seqlens on or, without a causal mask or a window, all queries at cache_seqlens.
    cache_batch_idx, int32 [batch], picks rows of the cache; cache_leftpad, int32 [batch], is where each row's keys
    begin. Returns out in q's shape, or (out, lse [batch, heads, seqlen_q] float32).
    """
    refuse_odd_heads("k_cache", k_cache)
    out, lse = attend_with_kvcache(
        q, k_cache, v_cache, k, v, cache_seqlens=cache_seqlens, tables=block_table, cache_batch_idx=cache_batch_idx,
        cache_leftpad=cache_leftpad, rotary_cos=rotary_cos, rotary_sin=rotary_sin,
        rotary_seqlens=None, rotary_interleaved=rotary_interleaved, softmax_scale=_scale(softmax_scale, q),
        causal=causal, window_size=window_size, softcap=softcap, alibi_slopes=alibi_slopes,
        num_splits=min(num_splits, MAX_SPLITS), return_lse=return_softmax_lse,
    )  # fmt: skip
    return out if lse is None else (out, _with_infinities(lse))
