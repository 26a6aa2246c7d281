"""What the wrappers for decode and prefill share: the pages of a plan, its settings, and the call of the kernels."""

from __future__ import annotations

import functools
import math
from typing import Any

import torch

from pagedkv.compat._attention import operations
from pagedkv.compat.flashinfer.arguments import (
    Dtype,
    Pair,
    Scale,
    caches_in_nhd,
    check_buffer,
    check_entries,
    check_layout,
    dtype_of,
)

LOG2_E = math.log2(math.e)
FIXED_SPLITS = 16  # parts of a sequence, by its length alone, if the order of additions must not depend on the batch
QUERY_DTYPES = torch.float16, torch.bfloat16, torch.float32


@functools.lru_cache
def _alibi_slopes(num_heads: int, device: object) -> torch.Tensor:
    """2^(-8 i / n) for n the largest power of 2 up to num_heads; heads after those take odd steps of half the size."""
    n = 2 ** int(math.log2(num_heads))
    slopes = [2.0 ** (-8 * i / n) for i in range(1, n + 1)]
    slopes += [2.0 ** (-4 * i / n) for i in range(1, 2 * (num_heads - n), 2)]
    return torch.tensor(slopes, dtype=torch.float32, device=device)


class Pages:
    """The pages of a batch's sequences, as paged_attention_fwd reads them.

    tables: [batch_size, num_pages] int32, in every row all pages of the batch: a view without memory of its own.
    starts: [batch_size] int32, how many of those pages precede a sequence's own: a view of indptr.
    lens: [batch_size] int32, the number of a sequence's keys.
    buffers: memory for indptr, indices and last_page_len, by the names of FlashInfer's arguments: a captured CUDA graph
    reads what the last plan has written there. None: each plan makes new tensors."""

    def __init__(self, device: torch.device, buffers: dict[str, Any] | None) -> None:
        self.device, self.is_fixed = device, buffers is not None
        if buffers is None:
            return
        for name, buffer in buffers.items():
            if not isinstance(buffer, torch.Tensor):
                raise ValueError(f"{name} should be a torch.Tensor in cudagraph mode")
        (name, self.indptr), (_, self.indices), (_, self.last_page_len) = buffers.items()
        self.batch_size = len(self.last_page_len)
        if len(self.indptr) != self.batch_size + 1:
            raise ValueError(f"The size of {name} should be batch_size + 1")
        self.lens = torch.zeros(self.batch_size, dtype=torch.int32, device=device)
        self.tables, self.starts = self.indices.expand(self.batch_size, -1), self.indptr[:-1]

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        page_size: int,
        seq_lens: torch.Tensor | None,
        non_blocking: bool,
    ) -> None:
        check_entries("indptr of the pages", indptr, len(last_page_len) + 1, "batch_size + 1")
        if seq_lens is not None:
            check_entries("seq_lens", seq_lens, len(last_page_len), "batch_size")
        if self.is_fixed:
            if len(last_page_len) != self.batch_size:
                raise ValueError(
                    f"The batch size should be fixed in cudagraph mode: it is {len(last_page_len)} but was "
                    f"{self.batch_size} at initialization"
                )
            if len(indices) > len(self.indices):
                raise ValueError(f"indices has {len(indices)} pages but its buffer holds {len(self.indices)}")
            self.indptr.copy_(indptr, non_blocking=non_blocking)
            self.indices[: len(indices)].copy_(indices, non_blocking=non_blocking)
            self.last_page_len.copy_(last_page_len, non_blocking=non_blocking)
        else:
            self.batch_size = len(last_page_len)
            self.indptr, self.indices, self.last_page_len = (
                each.to(self.device, torch.int32, non_blocking=non_blocking).contiguous()
                for each in (indptr, indices, last_page_len)
            )
            self.tables, self.starts = self.indices.expand(self.batch_size, -1), self.indptr[:-1]
            self.lens = torch.empty_like(self.last_page_len)
        if seq_lens is None:
            torch.add(self.last_page_len - page_size, self.indptr.diff(), alpha=page_size, out=self.lens)
            self.lens.clamp_(min=0)  # without a page there is no key, whatever last_page_len says
        else:
            self.lens.copy_(seq_lens.flatten(), non_blocking=non_blocking)


class Wrapper:
    """The pages and settings of the last plan, and the call of the kernels."""

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, buffers: dict[str, Any] | None) -> None:
        check_layout(kv_layout)
        self.device = float_workspace_buffer.device
        self._kv_layout, self._pages = kv_layout, Pages(self.device, buffers)
        self._q_dtype: torch.dtype | None = None  # there was no plan

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._pages.is_fixed

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Has no effect: there is no workspace."""

    def end_forward(self) -> None:
        """Has no effect; 0.6.14 still has it."""

    def _plan(
        self,
        shape: tuple[int, int, int, int],
        dtypes: tuple[Dtype, Dtype | None, Dtype | None],
        causal: bool,
        options: tuple[str, int, float | None, float | None],
        fixed_split_size: int | None,
        disable_split_kv: bool,
    ) -> None:
        self._num_qo_heads, self._num_kv_heads, self._head_dim, self._page_size = shape
        self._q_dtype = dtype_of(dtypes[0])
        self._kv_dtype, o_dtype = (self._q_dtype if each is None else dtype_of(each) for each in dtypes[1:])
        if self._q_dtype not in QUERY_DTYPES:
            raise NotImplementedError(f"q_data_type: {self._q_dtype} is none of float16, bfloat16, float32")
        if self._kv_dtype not in (self._q_dtype, torch.float8_e4m3fn):
            raise NotImplementedError(f"kv_data_type: {self._kv_dtype} is neither {self._q_dtype} nor float8_e4m3fn")
        if o_dtype != self._q_dtype:
            raise NotImplementedError(f"o_data_type: {o_dtype} is not {self._q_dtype}, which q has")
        self._causal = causal
        self._set_options(*options)
        self._num_splits = 1 if disable_split_kv else 0 if fixed_split_size is None else FIXED_SPLITS

    def _set_options(
        self, pos_encoding_mode: str, window_left: int, logits_soft_cap: float | None, sm_scale: float | None
    ) -> None:
        if pos_encoding_mode not in ("NONE", "ROPE_LLAMA", "ALIBI"):
            raise KeyError(f"Invalid pos_encoding_mode {pos_encoding_mode}")
        if pos_encoding_mode == "ROPE_LLAMA":
            raise NotImplementedError("pos_encoding_mode: ROPE_LLAMA; rotate keys before they are stored, and q")
        self._slopes: torch.Tensor | None = None
        if pos_encoding_mode == "ALIBI":
            if logits_soft_cap:  # theirs caps the sum of logit and bias, pagedkv the logit
                raise NotImplementedError("logits_soft_cap: cannot be combined with pos_encoding_mode ALIBI")
            if not self._causal:  # theirs raises the logits of keys after the query, pagedkv lowers them
                raise NotImplementedError("causal: must be True with pos_encoding_mode ALIBI")
            self._slopes = _alibi_slopes(self._num_qo_heads, self.device)
        self._window_left, self._soft_cap, self._sm_scale = window_left, logits_soft_cap or 0.0, sm_scale

    def _expect_plan(self) -> None:
        if self._q_dtype is None:
            raise RuntimeError(f"{type(self).__name__}: run() was called before plan()")

    def _run(
        self,
        q: torch.Tensor,
        paged_kv_cache: Pair,
        scales: tuple[Scale, Scale, Scale],
        out: torch.Tensor | None,
        lse: torch.Tensor | None,
        return_lse: bool,
        window_left: int | None,
        sinks: torch.Tensor | None,
        lse_base: str = "log2",
        lse_layout: str = "NH",
        **queries: Any,
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        if return_lse and self._slopes is not None:  # theirs counts distances from another place
            raise NotImplementedError("return_lse: cannot be combined with pos_encoding_mode ALIBI")
        k_cache, v_cache = self._checked(q, paged_kv_cache, out)
        softmax_scale, v_factor, cache_scales = self._split_scales(k_cache.dtype, *scales)
        pages = self._pages
        result: Any = operations().paged_attention_fwd(
            q, k_cache, v_cache, pages.tables, pages.lens, table_starts=pages.starts, softmax_scale=softmax_scale,
            causal=self._causal, window_size=(self._window_left if window_left is None else window_left, -1),
            softcap=self._soft_cap, alibi_slopes=self._slopes, sinks=sinks, num_splits=self._num_splits, out=out,
            return_lse=return_lse, **cache_scales, **queries,
        )  # fmt: skip
        out, natural = result if return_lse else (result, None)
        if v_factor is not None:
            out *= v_factor
        return out if natural is None else (out, _converted(natural, lse, lse_base, lse_layout))

    def _checked(
        self, q: torch.Tensor, paged_kv_cache: Pair, out: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V. Raises if the tensors are not what was planned for."""
        k_cache, v_cache = caches_in_nhd(paged_kv_cache, self._kv_layout)
        for name, of, x, planned in (("q", "q", q, self._q_dtype), ("k", "kv", k_cache, self._kv_dtype)):
            if x.dtype != planned:
                raise ValueError(f"The dtype of {name} {x.dtype} does not match the {of}_data_type {planned} of plan()")
        shapes = tuple(q.shape[1:]), tuple(k_cache.shape[1:])
        heads = self._num_qo_heads, self._head_dim
        pages = self._page_size, self._num_kv_heads, self._head_dim
        if shapes != (heads, pages):
            raise ValueError(f"rows of q and pages are {shapes} but were planned as {(heads, pages)}")
        if out is not None:
            check_buffer("out", out, tuple(q.shape), q.dtype, q.device)
        return k_cache, v_cache

    def _split_scales(
        self, cache_dtype: torch.dtype, q_scale: Scale, k_scale: Scale, v_scale: Scale
    ) -> tuple[float, Scale, dict[str, Any]]:
        """The factors of the logits and of out, and the scales for the kernels, which scale only float8 caches."""
        cache_scales: dict[str, Any] = {}
        if cache_dtype == torch.float8_e4m3fn:
            given = {"k_scale": k_scale, "v_scale": v_scale}
            cache_scales = {name: x.reshape(-1) if isinstance(x, torch.Tensor) else x for name, x in given.items()}
            k_scale = v_scale = None
        factor = 1 / math.sqrt(self._head_dim) if self._sm_scale is None else self._sm_scale
        for name, scale in (("q_scale", q_scale), ("k_scale", k_scale)):
            if isinstance(scale, torch.Tensor):
                raise NotImplementedError(f"{name}: a tensor; only a float8_e4m3fn cache is scaled by one")
            factor *= 1.0 if scale is None else scale
        return factor, v_scale, cache_scales


def _converted(natural: torch.Tensor, lse: torch.Tensor | None, base: str, layout: str) -> torch.Tensor:
    """The log-sum-exp [num_qo_heads, num_tokens] in the base and layout asked for, in `lse` if that is given."""
    source = natural if layout == "HN" else natural.t()
    if lse is None:
        lse = torch.empty(source.shape, dtype=torch.float32, device=source.device)
    check_buffer("lse", lse, tuple(source.shape), torch.float32, source.device)
    return torch.mul(source, LOG2_E if base == "log2" else 1.0, out=lse)
