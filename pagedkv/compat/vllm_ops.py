"""vLLM's two operators for attention, under their names, over pagedkv: for code that imports them.

    from pagedkv.compat.vllm_ops import flash_attn_varlen_func, reshape_and_cache_flash

Names, order of arguments, defaults and results are those of vLLM 0.33.0 (`vllm._custom_ops` and
`vllm.vllm_flash_attn`). They run on the CPU, too, take any size of page, and need PyTorch but not vLLM. A backend for
vLLM itself is in pagedkv.integrations.vllm.
"""

from __future__ import annotations

from typing import Any

from pagedkv import ops

try:
    import torch
except ModuleNotFoundError as error:
    raise ImportError("pagedkv.compat.vllm_ops needs PyTorch (package torch), which is not installed") from error

from pagedkv.compat._attention import dense, ragged_keys, refuse

__all__ = ["flash_attn_varlen_func", "reshape_and_cache_flash"]

UNSCALED = ("auto", "float16", "bfloat16")
FP8 = ("fp8", "fp8_e4m3")


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    """Stores new keys and values in their pages, in place.

    Args:
        key, value: [num_tokens or more, num_heads, head_size]; rows after those of slot_mapping are ignored.
        key_cache, value_cache: [num_blocks, block_size, num_heads, head_size] with any strides, the last one 1.
        slot_mapping: [num_tokens] int64 or int32, page * block_size + offset; a negative one stores nothing.
        kv_cache_dtype: "auto", "float16" or "bfloat16" for caches of key's dtype; "fp8" or "fp8_e4m3" for
            float8_e4m3fn or its bytes (uint8), which then hold key / k_scale and value / v_scale. "fp8_e5m2" raises
            NotImplementedError, other words RuntimeError.
        k_scale, v_scale: float32 of one element or of [num_heads]; ignored unless the caches are fp8.
    """
    num_tokens = slot_mapping.shape[0]
    scales = {}
    if kv_cache_dtype in FP8:
        key_cache, value_cache = (cache.view(torch.float8_e4m3fn) for cache in (key_cache, value_cache))
        scales = {"k_scale": k_scale.reshape(-1), "v_scale": v_scale.reshape(-1)}
    elif kv_cache_dtype == "fp8_e5m2":
        raise NotImplementedError("kv_cache_dtype is 'fp8_e5m2': of the fp8 types there is fp8_e4m3 only")
    elif kv_cache_dtype not in UNSCALED:
        raise RuntimeError(f"kv_cache_dtype is {kv_cache_dtype!r} but must be one of {', '.join(UNSCALED + FP8)}")
    ops.store_kvcache(key[:num_tokens], value[:num_tokens], key_cache, value_cache, slot_mapping, **scales)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: list[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    scheduler_metadata: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    output_scale: torch.Tensor | None = None,
    fa_version: int = 2,
    s_aux: torch.Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: torch.Tensor | None = None,
    mask_mod: Any = None,
    block_sparse_tensors: Any = None,
    aux_tensors: Any = None,
    aux_tensor_leading_dims: Any = None,
    dynamic_causal: torch.Tensor | None = None,
    gather_kv_indices: torch.Tensor | None = None,
    gather_kv_valid_length: torch.Tensor | None = None,
) -> Any:
    """Attention of ragged queries over pages, or over ragged keys and values.

    Args:
        q: [total_q, num_heads, head_dim] float32, float16 or bfloat16.
        k, v: with block_table, pages [num_blocks, block_size, num_kv_heads, head_dim]; without, [total_k, num_kv_heads,
            head_dim].
        max_seqlen_q: an upper bound. max_seqlen_k is ignored.
        cu_seqlens_q: int32 [batch + 1], where the queries of each sequence begin and end.
        cu_seqlens_k: int32 [batch + 1], without block_table: the same of its keys.
        seqused_k: int32 [batch], with block_table: the keys of each sequence. Without, they may cut the keys where
            fa_version is 4.
        block_table: int32 [batch, max_blocks].
        causal, window_size: the last query is aligned with the last key. (left, right) keys are seen beside a query's
            own; -1 is no bound.
        alibi_slopes: float32 [num_heads] or [batch, num_heads].
        s_aux: [num_heads], a logit that joins each softmax.
        k_descale, v_descale: float32 [batch, num_kv_heads] (or [1], [num_kv_heads]) of float8_e4m3fn keys and values.
        num_splits: 0 chooses; any other number fixes the order of additions whatever the batch.
        fa_version: 2, 3 and 4 compute the same, with all options; but the log-sum-exp of a query that sees no key is
            inf for 2 and -inf for the others.

    deterministic, return_attn_probs, scheduler_metadata, cp_rank, cp_tot_seqused_k and aux_tensor_leading_dims change
    nothing.

    Returns:
        out [total_q, num_heads, head_dim], or (out, lse) with lse float32 [num_heads, total_q].

    Raises:
        NotImplementedError: dropout_p, q_v, output_scale, cp_world_size, mask_mod, block_sparse_tensors, aux_tensors,
            dynamic_causal, gather_kv_indices and gather_kv_valid_length, and q in fp8.
        AssertionError: lengths are missing or given twice.
    """
    refuse(
        dropout_p=dropout_p, q_v=q_v, output_scale=output_scale, cp_world_size=cp_world_size - 1, mask_mod=mask_mod,
        block_sparse_tensors=block_sparse_tensors, aux_tensors=aux_tensors, dynamic_causal=dynamic_causal,
        gather_kv_indices=gather_kv_indices, gather_kv_valid_length=gather_kv_valid_length,
    )  # fmt: skip
    if q.dtype == torch.float8_e4m3fn:
        raise NotImplementedError("q, q_descale: fp8 is for keys and values only")
    if fa_version not in (2, 3, 4):
        raise ValueError(f"Unsupported FA version: {fa_version}")
    pages = find_keys(k, v, cu_seqlens_k, seqused_k, block_table, fa_version)
    assert window_size is None or len(window_size) == 2, f"window_size is {window_size} but must be a pair"
    is_fp8 = k.dtype == torch.float8_e4m3fn
    result = ops.paged_attention_fwd(
        dense(q), **pages, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=max_seqlen_q,
        softmax_scale=softmax_scale, causal=causal, window_size=(-1, -1) if window_size is None else window_size,
        softcap=softcap, alibi_slopes=alibi_slopes, sinks=None if s_aux is None else s_aux.float(),
        k_scale=k_descale.contiguous() if is_fp8 and k_descale is not None else None,
        v_scale=v_descale.contiguous() if is_fp8 and v_descale is not None else None,
        num_splits=num_splits, out=out, return_lse=return_softmax_lse,
    )  # fmt: skip
    if return_softmax_lse and fa_version == 2:
        result[1].masked_fill_(result[1].isneginf(), float("inf"))
    return result


def find_keys(
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_k: torch.Tensor | None,
    seqused_k: torch.Tensor | None,
    block_table: torch.Tensor | None,
    fa_version: int,
) -> dict[str, Any]:
    """Where the keys lie, as paged_attention_fwd takes it: ragged ones are in one page, the same for all sequences."""
    assert cu_seqlens_k is not None or seqused_k is not None, "cu_seqlens_k or seqused_k must be provided"
    assert fa_version == 4 or cu_seqlens_k is None or seqused_k is None, (
        "cu_seqlens_k and seqused_k cannot be provided at the same time"
    )
    assert block_table is None or seqused_k is not None, "seqused_k must be provided if block_table is provided"
    if block_table is not None:
        return dict(k_cache=k, v_cache=v, block_tables=block_table, context_lens=seqused_k)
    if cu_seqlens_k is None:
        raise NotImplementedError("seqused_k: without block_table needs cu_seqlens_k, too")
    return ragged_keys(k, v, cu_seqlens_k, seqused_k)
