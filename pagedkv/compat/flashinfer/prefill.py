"""FlashInfer's module prefill: the wrapper over a paged cache."""

from __future__ import annotations

import functools
from typing import Any

import torch

from pagedkv.compat._attention import refuse
from pagedkv.compat.flashinfer.arguments import Dtype, Pair, Scale, check_entries
from pagedkv.compat.flashinfer.wrapper import Wrapper


class BatchPrefillWithPagedKVCacheWrapper(Wrapper):
    """Attention of ragged queries, the last tokens of their sequences: plan once per step, run for every layer.

    kv_layout as in the decode wrapper. With use_cuda_graph, qo_indptr_buf and paged_kv_indptr_buf [batch_size + 1],
    paged_kv_indices_buf and paged_kv_last_page_len_buf [batch_size], int32 on the device, fix the batch size. Refused:
    custom_mask_buf, mask_indptr_buf, jit_args, jit_kwargs, variant_owns_mask."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        qo_indptr_buf: torch.Tensor | None = None,
        paged_kv_indptr_buf: torch.Tensor | None = None,
        paged_kv_indices_buf: torch.Tensor | None = None,
        paged_kv_last_page_len_buf: torch.Tensor | None = None,
        custom_mask_buf: torch.Tensor | None = None,
        mask_indptr_buf: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
        jit_kwargs: dict[str, Any] | None = None,
        variant_owns_mask: bool = False,
    ) -> None:
        refuse(
            custom_mask_buf=custom_mask_buf, mask_indptr_buf=mask_indptr_buf, jit_args=jit_args, jit_kwargs=jit_kwargs,
            variant_owns_mask=variant_owns_mask,
        )  # fmt: skip
        buffers = {
            "paged_kv_indptr_buf": paged_kv_indptr_buf,
            "paged_kv_indices_buf": paged_kv_indices_buf,
            "paged_kv_last_page_len_buf": paged_kv_last_page_len_buf,
        }
        super().__init__(float_workspace_buffer, kv_layout, buffers if use_cuda_graph else None)
        if use_cuda_graph:
            if not isinstance(qo_indptr_buf, torch.Tensor):
                raise ValueError("qo_indptr_buf should be a torch.Tensor in cudagraph mode")
            if len(qo_indptr_buf) != self._pages.batch_size + 1:
                raise ValueError("The size of qo_indptr_buf should be batch_size + 1")
        self._qo_indptr: Any = qo_indptr_buf

    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        head_dim_vo: int | None = None,
        custom_mask: torch.Tensor | None = None,
        packed_custom_mask: torch.Tensor | None = None,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        sm_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        q_data_type: Dtype = "float16",
        kv_data_type: Dtype | None = None,
        o_data_type: Dtype | None = None,
        non_blocking: bool = True,
        prefix_len_ptr: torch.Tensor | None = None,
        token_pos_in_items_ptr: torch.Tensor | None = None,
        token_pos_in_items_len: int = 0,
        max_item_len_ptr: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        seq_lens_q: torch.Tensor | None = None,
        block_tables: torch.Tensor | None = None,
        max_token_per_sequence: int | None = None,
        max_sequence_kv: int | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
    ) -> None:
        """What the next runs work on: sequence i has the queries qo_indptr[i] .. qo_indptr[i + 1] - 1 of q, and pages
        as in the decode wrapper's plan, whose options mean the same. All index tensors on the host or the device.

        causal: query r of n sees no key after its own, r + num_keys - n. max_token_per_sequence: the most queries of a
        sequence, for the launch; it is read from qo_indptr where that is on the host, and is all of q otherwise.
        Refused: head_dim_vo other than head_dim_qk, custom_mask, packed_custom_mask, prefix_len_ptr,
        token_pos_in_items_ptr, max_item_len_ptr."""
        refuse(
            custom_mask=custom_mask, packed_custom_mask=packed_custom_mask, prefix_len_ptr=prefix_len_ptr,
            token_pos_in_items_ptr=token_pos_in_items_ptr, max_item_len_ptr=max_item_len_ptr,
        )  # fmt: skip
        if head_dim_vo not in (None, head_dim_qk):
            raise NotImplementedError(f"head_dim_vo: is {head_dim_vo} but head_dim_qk is {head_dim_qk}")
        check_entries("qo_indptr", qo_indptr, len(paged_kv_last_page_len) + 1, "batch_size + 1")
        self._plan(
            (num_qo_heads, num_kv_heads, head_dim_qk, page_size), (q_data_type, kv_data_type, o_data_type), causal,
            (pos_encoding_mode, window_left, logits_soft_cap, sm_scale), fixed_split_size, disable_split_kv,
        )  # fmt: skip
        self._pages.plan(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size, seq_lens, non_blocking)
        self._num_rows: int | None = None
        if qo_indptr.device.type == "cpu":
            self._num_rows = int(qo_indptr[-1])
            if max_token_per_sequence is None and not self.is_cuda_graph_enabled:
                max_token_per_sequence = int(qo_indptr.diff().max()) if len(qo_indptr) > 1 else 0
        self._max_seqlen_q = max_token_per_sequence
        if self.is_cuda_graph_enabled:
            self._qo_indptr.copy_(qo_indptr, non_blocking=non_blocking)
        else:
            self._qo_indptr = qo_indptr.to(self.device, torch.int32, non_blocking=non_blocking).contiguous()

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pair,
        *args: Any,
        q_scale: Scale = None,
        k_scale: Scale = None,
        v_scale: Scale = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        kv_cache_sf: Pair | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        use_fp16_softmax: bool | None = None,
        uses_spcompress: bool | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of q [qo_indptr[-1], num_qo_heads, head_dim]; arguments, result and refusals are those of the
        decode wrapper's run. lse_base: "log2" or "ln". lse_layout: "NH", [num_tokens, num_qo_heads], or "HN",
        transposed. Rows of q after qo_indptr[-1] are an error where plan() had qo_indptr on the host; where it was on
        the device, their results are not written."""
        self._expect_plan()
        refuse(
            args=args, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            kv_cache_sf=kv_cache_sf,
        )  # fmt: skip
        if lse_base not in ("log2", "ln"):
            raise ValueError(f"lse_base must be one of ('log2', 'ln'), got {lse_base!r}")
        if lse_layout not in ("NH", "HN"):
            raise ValueError(f"lse_layout must be one of ('NH', 'HN'), got {lse_layout!r}")
        if self._num_rows is not None and len(q) != self._num_rows:
            raise ValueError(f"q.shape[0] ({len(q)}) does not match qo_indptr[-1] ({self._num_rows}).")
        return self._run(
            q, paged_kv_cache, (q_scale, k_scale, v_scale), out, lse, return_lse, window_left, sinks, lse_base,
            lse_layout, cu_seqlens_q=self._qo_indptr, max_seqlen_q=self._max_seqlen_q,
        )  # fmt: skip

    run_return_lse = functools.partialmethod(run, return_lse=True)
    """run with return_lse=True."""

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pair,
        causal: bool = False,
        pos_encoding_mode: str = "NONE",
        use_fp16_qk_reduction: bool = False,
        k_scale: float | None = None,
        v_scale: float | None = None,
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        *,
        _return_lse: bool = False,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """The older form of run: its options take the place of the plan's."""
        self._causal = causal
        self._set_options(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, k_scale=k_scale, v_scale=v_scale, return_lse=_return_lse)

    forward_return_lse = functools.partialmethod(forward, _return_lse=True)
    """forward, with lse."""
