"""FlashInfer's module decode: the wrappers over a paged cache."""

from __future__ import annotations

import functools
from typing import Any

import torch

from pagedkv.compat._attention import refuse
from pagedkv.compat.flashinfer.arguments import Dtype, Pair
from pagedkv.compat.flashinfer.wrapper import Wrapper


class BatchDecodeWithPagedKVCacheWrapper(Wrapper):
    """Decode attention of a batch: plan once per step, run for every layer.

    kv_layout: "NHD", pages of [page_size, num_kv_heads, head_dim], or "HND", [num_kv_heads, page_size, head_dim].
    With use_cuda_graph, paged_kv_indptr_buffer [batch_size + 1], paged_kv_indices_buffer (as many pages as there will
    ever be) and paged_kv_last_page_len_buffer [batch_size], all int32 on the device, fix the batch size. jit_args is
    refused."""

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_cuda_graph: bool = False,
        use_tensor_cores: bool = False,
        paged_kv_indptr_buffer: torch.Tensor | None = None,
        paged_kv_indices_buffer: torch.Tensor | None = None,
        paged_kv_last_page_len_buffer: torch.Tensor | None = None,
        backend: str = "auto",
        jit_args: list[Any] | None = None,
    ) -> None:
        refuse(jit_args=jit_args)
        buffers = {
            "paged_kv_indptr_buffer": paged_kv_indptr_buffer,
            "paged_kv_indices_buffer": paged_kv_indices_buffer,
            "paged_kv_last_page_len_buffer": paged_kv_last_page_len_buffer,
        }
        super().__init__(float_workspace_buffer, kv_layout, buffers if use_cuda_graph else None)
        self.use_tensor_cores = use_tensor_cores

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        pos_encoding_mode: str = "NONE",
        window_left: int = -1,
        logits_soft_cap: float | None = None,
        q_data_type: Dtype | None = "float16",
        kv_data_type: Dtype | None = None,
        o_data_type: Dtype | None = None,
        data_type: Dtype | None = None,
        sm_scale: float | None = None,
        rope_scale: float | None = None,
        rope_theta: float | None = None,
        non_blocking: bool = True,
        block_tables: torch.Tensor | None = None,
        seq_lens: torch.Tensor | None = None,
        fixed_split_size: int | None = None,
        disable_split_kv: bool = False,
        q_len_per_req: int = 1,
        *,
        window_right: int = 0,
        is_causal: bool | None = None,
    ) -> None:
        """What the next runs work on: sequence i has the pages indices[indptr[i]:indptr[i + 1]], the last of them with
        last_page_len[i] keys; or seq_lens [batch_size] keys. indptr [batch_size + 1], indices and last_page_len are
        int32, on the host or the device.

        pos_encoding_mode: NONE, or ALIBI with neither soft cap nor lse. window_left: keys seen before the query's own,
        -1 all. logits_soft_cap: 0 or None for none. sm_scale: None is 1 / sqrt(head_dim). q_data_type: float16,
        bfloat16 or float32; kv_data_type: the same or float8_e4m3fn. q_len_per_req: queries of each sequence, its last
        tokens.
        fixed_split_size, disable_split_kv: the order of additions does not follow the batch. Refused: window_right
        other than 0, is_causal other than q_len_per_req > 1, o_data_type other than q_data_type, ROPE_LLAMA."""
        if window_right != 0:
            raise NotImplementedError(f"window_right: is {window_right} but must be 0")
        if q_len_per_req < 1:
            raise ValueError(f"q_len_per_req must be >= 1, got {q_len_per_req}")
        if is_causal is not None and is_causal != (q_len_per_req > 1):
            raise NotImplementedError("is_causal: follows from q_len_per_req > 1")
        q_data_type = data_type if q_data_type is None else q_data_type
        kv_data_type = data_type if kv_data_type is None else kv_data_type
        if q_data_type is None:
            raise TypeError("q_data_type: must be given, or data_type")
        self._plan(
            (num_qo_heads, num_kv_heads, head_dim, page_size), (q_data_type, kv_data_type, o_data_type), True,
            (pos_encoding_mode, window_left, logits_soft_cap, sm_scale), fixed_split_size, disable_split_kv,
        )  # fmt: skip
        self._q_len_per_req = q_len_per_req
        self._pages.plan(indptr, indices, last_page_len, page_size, seq_lens, non_blocking)

    begin_forward = plan

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pair,
        *args: Any,
        q_scale: float | None = None,
        k_scale: float | None = None,
        v_scale: float | None = None,
        out: torch.Tensor | None = None,
        lse: torch.Tensor | None = None,
        return_lse: bool = False,
        enable_pdl: bool | None = None,
        window_left: int | None = None,
        sinks: torch.Tensor | None = None,
        q_len_per_req: int | None = None,
        skip_softmax_threshold_scale_factor: float | None = None,
        kv_cache_sf: Pair | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        """Attention of q [batch_size * q_len_per_req, num_qo_heads, head_dim] over paged_kv_cache: a tuple of K and V,
        or one tensor [num_pages, 2, ...], in kv_layout.

        q_scale, k_scale: factors of the logits, v_scale: of the values. With a float8_e4m3fn cache k_scale and v_scale
        may be float32 tensors, [1] or [num_kv_heads]. out like q, lse [num_tokens, num_qo_heads] float32: memory for
        the results. window_left: another than the plan's. sinks: [num_qo_heads] float32, natural logits that have no
        value. Refused: args, skip_softmax_threshold_scale_factor, kv_cache_sf.

        Returns out, or (out, lse) with lse in base 2."""
        self._expect_plan()
        refuse(
            args=args, skip_softmax_threshold_scale_factor=skip_softmax_threshold_scale_factor,
            kv_cache_sf=kv_cache_sf,
        )  # fmt: skip
        expected = self._pages.batch_size * (self._q_len_per_req if q_len_per_req is None else q_len_per_req)
        if len(q) != expected or q_len_per_req not in (None, self._q_len_per_req):
            raise ValueError(
                f"q has {len(q)} rows but plan() was given {self._pages.batch_size} sequences with "
                f"{self._q_len_per_req} each"
            )
        return self._run(q, paged_kv_cache, (q_scale, k_scale, v_scale), out, lse, return_lse, window_left, sinks)

    run_return_lse = functools.partialmethod(run, return_lse=True)
    """run with return_lse=True."""

    def forward(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pair,
        pos_encoding_mode: str = "NONE",
        q_scale: float | None = None,
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
        self._set_options(pos_encoding_mode, window_left, logits_soft_cap, sm_scale)
        return self.run(q, paged_kv_cache, q_scale=q_scale, k_scale=k_scale, v_scale=v_scale, return_lse=_return_lse)

    forward_return_lse = functools.partialmethod(forward, _return_lse=True)
    """forward, with lse."""


class CUDAGraphBatchDecodeWithPagedKVCacheWrapper(BatchDecodeWithPagedKVCacheWrapper):
    """The decode wrapper with use_cuda_graph=True."""

    def __init__(
        self,
        workspace_buffer: torch.Tensor,
        indptr_buffer: torch.Tensor,
        indices_buffer: torch.Tensor,
        last_page_len_buffer: torch.Tensor,
        kv_layout: str = "NHD",
        use_tensor_cores: bool = False,
    ) -> None:
        super().__init__(
            workspace_buffer, kv_layout, True, use_tensor_cores, indptr_buffer, indices_buffer, last_page_len_buffer
        )
