"""Attention of one layer over keys and values as transformers keeps them: [batch, heads, keys, head_dim], dense."""

from __future__ import annotations

from typing import Any

import torch

import pagedkv.torch
from pagedkv import ops
from pagedkv.integrations.transformers import masks

REFUSED = {  # what some models pass to their attention, and must not be ignored
    "output_attentions": "has no attention weights to return",
    "position_bias": "adds no bias to the logits",
    "indices": "has no choice of keys for each query",
    "block_indices": "has no choice of keys for each query",
    "sinks": "takes sinks as s_aux only",
}


def check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float, options: dict[str, Any]) -> None:
    """Raises NotImplementedError with the name of an option that a layer asks for and pagedkv does not have."""
    if dropout > 0:
        raise NotImplementedError(f"dropout is {dropout}, but pagedkv has none: call model.eval()")
    if torch.is_grad_enabled() and (query.requires_grad or key.requires_grad or value.requires_grad):
        raise NotImplementedError("pagedkv computes no gradients: call the model under torch.no_grad()")
    for name, why in REFUSED.items():
        if (asked := options.get(name)) is not None and asked is not False:
            raise NotImplementedError(f"{name}: pagedkv {why}")
    if value.shape[-1] != key.shape[-1]:
        raise NotImplementedError(
            f"value: head_dim is {value.shape[-1]} but key has {key.shape[-1]}; pagedkv has one for both"
        )


def _mask_of_lengths(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, is_causal: bool | None, sliding_window: int | None
) -> masks.Mask:
    """The mask of a model that hands none to its layers, as in some encoders and in cross-attention."""
    is_causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    left = sliding_window - 1 if sliding_window else -1
    key_starts = torch.zeros(len(query), dtype=torch.int32, device=query.device)
    return masks.unpack(masks.pack(key_starts, key_starts + key.shape[2], (left, 0 if is_causal else left)))


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    s_aux: torch.Tensor | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function as transformers' AttentionInterface calls it (5.17 to 5.24).

    query: [batch, q_heads, queries, head_dim]; key, value: [batch, kv_heads, keys, head_dim], of any strides but the
    last. attention_mask: what `masks.make_mask` returned, or None. scaling: None is 1 / sqrt(head_dim). s_aux: the
    sinks, [q_heads]. Where there is an attention_mask, it says what is_causal and sliding_window do.

    Returns out [batch, queries, q_heads, head_dim], and None in place of the attention weights.
    """
    check(query, key, value, dropout, options)
    if options.get("cu_seq_lens_q") is not None:
        raise NotImplementedError("cu_seq_lens_q: pagedkv takes packed sequences in continuous batching only")
    batch, heads, length, head_dim = query.shape
    if attention_mask is None:
        mask = _mask_of_lengths(module, query, key, is_causal, sliding_window)
    else:
        mask = masks.unpack(attention_mask)
    operations = pagedkv.torch if torch.compiler.is_compiling() else ops  # the latter cost less
    out = operations.paged_attention_fwd(
        query.transpose(1, 2).reshape(-1, heads, head_dim),
        key.transpose(1, 2),  # a sequence is one page
        value.transpose(1, 2),
        mask.block_tables,
        mask.context_lens,
        key_starts=mask.key_starts,
        softmax_scale=scaling,
        causal=mask.window_size[1] == 0,
        window_size=mask.window_size,
        softcap=softcap or 0.0,
        sinks=None if s_aux is None else s_aux.float(),
    )
    return out.view(batch, length, heads, head_dim), None
