"""pagedkv as an attention backend of SGLang 0.5.23, the release whose interface was read.

SGLang finds `register` through the entry point group `sglang.srt.plugins` in each of its processes. Then

    python -m sglang.launch_server --model-path Qwen/Qwen3-8B --attention-backend pagedkv --page-size 64

serves the model with pagedkv's kernels: prefill (with a prefix from the radix cache, in chunks, mixed with decodes, and
between the pieces of a breakable CUDA graph) and decode (in full CUDA graphs). Keys and values are stored directly in
SGLang's pools, which may be float8_e4m3fn with a scale per layer, have the heads before the tokens
(SGLANG_USE_HND_KVCACHE), or keep the layers with a sliding window apart. Any page size works; SGLang's own default, 1,
needs a page table with an entry per token.

These are refused with a NotImplementedError that names them: speculative decoding, diffusion language models, MLA,
encoder-decoder models, layers that attend to chunks, context parallelism, unified memory, other quantized KV caches,
and CUDA graphs of a whole prefill.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

try:
    import torch
    from sglang.srt.arg_groups import choices
    from sglang.srt.layers.attention.attention_registry import register_attention_backend
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend, SharedReadEnds
    from sglang.srt.layers.radix_attention import AttentionType
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.runtime_context import get_exec, get_parallel
except ModuleNotFoundError as error:
    raise ImportError(f"pagedkv.integrations.sglang needs SGLang 0.5.23 (package sglang): {error}") from error

from pagedkv import ops

NAME = "pagedkv"
KV_CACHE_DTYPES = torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn


def register() -> None:
    """Makes `--attention-backend pagedkv` known to this process; may be called again.

    The backend may also be used with --enable-deterministic-inference, for which SGLang turns its radix cache off.
    """
    register_attention_backend(NAME)(PagedKVBackend)
    for names, add in (
        (choices.ATTENTION_BACKEND_CHOICES, choices.add_attention_backend_choices),
        (choices.DETERMINISTIC_ATTENTION_BACKEND_CHOICES, choices.add_deterministic_attention_backend_choices),
    ):
        if NAME not in names:
            add([NAME])


@dataclass(slots=True)
class Metadata:
    """What the layers of one forward pass share."""

    context_lens: torch.Tensor  # [num_seqs] int32
    tables: list[torch.Tensor]  # [num_seqs, max_pages] int32, one for each pool: of all tokens, and of windows
    cu_seqlens_q: torch.Tensor | None = None  # [num_seqs + 1] int32; None: one token each
    max_seqlen_q: int = 1
    is_graph: bool = False  # the pass is captured, and its tables are written before each replay
    window_slots: Any = None  # [num_tokens], the batch's out_cache_loc in the pool of windows, if there is one
    # By kind of layer. The first layer of a kind plans, so in a graph each replay plans for its own lengths.
    plans: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)


class PagedKVBackend(AttentionBackend):  # type: ignore[misc]
    """Serves all layers of an SGLang ModelRunner."""

    def __init__(self, model_runner: Any) -> None:
        super().__init__()
        _check_runner(model_runner)
        self.device = model_runner.device
        self.page_size = model_runner.page_size
        self.max_context_len = model_runner.model_config.context_len
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.token_to_kv_pool = model_runner.token_to_kv_pool
        self.has_window_pool = isinstance(self.token_to_kv_pool, SWAKVPool) and self.token_to_kv_pool.swa_layer_nums > 0
        self.is_fp8 = model_runner.kv_cache_dtype == torch.float8_e4m3fn
        # One part per sequence: its sums do not depend on what else is in the batch.
        self.num_splits = 1 if get_exec().deterministic.enable_deterministic_inference else 0
        self.forward_metadata: Metadata | None = None

    # --- what is made once for each batch

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """For a pass without a graph, or with a breakable one, between whose pieces attention runs."""
        mode = forward_batch.forward_mode
        is_known = mode.is_decode_or_idle() or mode.is_extend_or_draft_extend_or_mixed()
        _refuse([(not is_known, f"forward_mode {mode.name}")])
        if mode.is_idle():
            self.forward_metadata = None
            return
        num_pages = self._num_pages(forward_batch)
        tables = self._empty_tables(forward_batch.batch_size, num_pages)
        self._write_tables(forward_batch, tables, num_pages)
        self.forward_metadata = Metadata(forward_batch.seq_lens.to(torch.int32, copy=True), tables)
        if not mode.is_decode():
            ends = torch.cumsum(forward_batch.extend_seq_lens, 0, dtype=torch.int32)
            self.forward_metadata.cu_seqlens_q = torch.nn.functional.pad(ends, (1, 0))
            self.forward_metadata.max_seqlen_q = int(max(forward_batch.extend_seq_lens_cpu))
        self.init_forward_metadata_in_graph(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Allocates the memory from which all decode graphs read their batch."""
        self.graph_lens = torch.zeros(max_bs, dtype=torch.int32, device=self.device)
        self.graph_tables = self._empty_tables(max_bs, -(-self.max_context_len // self.page_size))

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a decode graph is captured and before each replay. The tables are written here, not in the graph: the
        host knows how long they are, and attention may read them ahead of its turn."""
        mode, num_seqs = forward_batch.forward_mode, forward_batch.batch_size
        if not mode.is_decode_or_idle():
            raise NotImplementedError(f"forward_mode {mode.name}: pagedkv runs in CUDA graphs of decodes only")
        lens, tables = self.graph_lens[:num_seqs], [each[:num_seqs] for each in self.graph_tables]
        lens.copy_(forward_batch.seq_lens)
        self._write_tables(forward_batch, tables, self._num_pages(forward_batch))
        self.forward_metadata = Metadata(lens, tables, is_graph=True)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Called before the layers: warm-up passes and the captured one begin here."""
        metadata = self.forward_metadata
        assert metadata is not None
        metadata.plans.clear()
        if self.has_window_pool:
            metadata.window_slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(forward_batch.out_cache_loc)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """A padding sequence of a graph's batch attends to its own token, in the page for padding."""
        return 1

    def shared_read_ends(self, fm: Any) -> Any:
        """A prefill's metadata are copies of all that the scheduler may change while the layers run."""
        return SharedReadEnds.PRE_REPLAY if fm == ForwardMode.EXTEND else super().shared_read_ends(fm)

    def _num_pages(self, forward_batch: Any) -> int:
        """The most pages that a sequence has, from the lengths that the host knows."""
        lens = forward_batch.seq_lens_cpu
        longest = self.max_context_len if lens is None else min(int(lens.max()), self.max_context_len)
        return int(-(-longest // self.page_size))

    def _empty_tables(self, num_seqs: int, max_pages: int) -> list[torch.Tensor]:
        """Tables whose every entry is 0, the page that SGLang keeps for padding."""
        options = {"dtype": torch.int32, "device": self.device}
        return [torch.zeros(num_seqs, max_pages, **options) for _ in range(1 + self.has_window_pool)]

    def _write_tables(self, forward_batch: Any, tables: list[torch.Tensor], num_pages: int) -> None:
        """Writes `num_pages` pages of each sequence from the slots of its tokens: those of a page are consecutive."""
        size = self.page_size
        firsts = self.req_to_token_pool.req_to_token[:, : num_pages * size : size]
        slots = firsts.index_select(0, forward_batch.req_pool_indices)
        torch.div(slots, size, rounding_mode="floor", out=tables[0][:, :num_pages])
        if self.has_window_pool:
            slots = self.token_to_kv_pool.translate_loc_from_full_to_swa(slots)
            torch.div(slots, size, rounding_mode="floor", out=tables[1][:, :num_pages])

    # --- layers

    def forward_extend(
        self,
        q: Any,
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: Any = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """q: [num_tokens, num_q_heads * head_dim]; k, v: [num_tokens, num_kv_heads, head_dim], stored first unless they
        are None or save_kv_cache is false. sinks: [num_q_heads]. Returns [num_tokens, num_q_heads * head_dim]."""
        _check_layer(layer, kwargs)
        metadata = self.forward_metadata
        assert metadata is not None
        pool = self.token_to_kv_pool
        is_windowed = self.has_window_pool and pool.layers_mapping[layer.layer_id][1]
        k_cache, v_cache = (self._pages(each, layer) for each in pool.get_kv_buffer(layer.layer_id))
        scales = _scales(layer) if self.is_fp8 else {}
        if save_kv_cache and k is not None:
            slots = forward_batch.out_cache_loc
            if is_windowed:
                slots = metadata.window_slots[: len(slots)]  # a caller may have narrowed the batch to real tokens
            k, v = (each.view(-1, layer.tp_k_head_num, layer.qk_head_dim) for each in (k, v))
            ops.store_kvcache(k, v, k_cache, v_cache, slots, **scales)

        q = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        batch = q, k_cache, v_cache, metadata.tables[is_windowed], metadata.context_lens
        options: dict[str, Any] = _mask(layer) | {
            "cu_seqlens_q": metadata.cu_seqlens_q,
            "max_seqlen_q": metadata.max_seqlen_q,
            "num_splits": self.num_splits,
        }
        kind = q.shape[1:], layer.tp_k_head_num, is_windowed, options["causal"], options["window_size"]
        if kind not in metadata.plans:
            metadata.plans[kind] = ops.plan_attention(*batch, **options)
        out = forward_batch._attn_output  # memory for the result, where a caller has some
        options |= scales | {
            "softmax_scale": layer.scaling,
            "softcap": layer.logit_cap,
            "sinks": None if sinks is None else sinks.float(),
            "plan": metadata.plans[kind],
            "past_is_constant": metadata.is_graph,
            "out": None if out is None else out.view(q.shape),
        }
        out = ops.paged_attention_fwd(*batch, **options)
        return out.view(-1, layer.tp_q_head_num * layer.qk_head_dim)

    forward_decode = forward_extend  # with one token per sequence

    def _pages(self, buffer: torch.Tensor, layer: Any) -> torch.Tensor:
        """A pool's buffer as [num_pages, page_size, num_kv_heads, head_dim], without a copy."""
        if buffer.dim() == 4:  # [num_pages, num_kv_heads, page_size, head_dim]
            return buffer.transpose(1, 2)
        if buffer.dim() > 4:
            raise NotImplementedError(f"token_to_kv_pool: a layout of {buffer.dim()} dimensions")
        num_slots = len(buffer) // self.page_size * self.page_size
        return buffer[:num_slots].view(-1, self.page_size, layer.tp_k_head_num, layer.qk_head_dim)


def _mask(layer: Any) -> dict[str, Any]:
    """Which keys a layer's queries see. sliding_window_size counts the keys before a query's own; -1: all."""
    is_causal = layer.attn_type != AttentionType.ENCODER_ONLY
    window = -1 if layer.sliding_window_size is None else layer.sliding_window_size
    return {"causal": is_causal, "window_size": (window, 0 if is_causal else window)}


def _scales(layer: Any) -> dict[str, Any]:
    """A number or None for each. A checkpoint sets k_scale_float; a file of scales sets only k_scale, to a number."""
    k_scale = layer.k_scale if layer.k_scale_float is None else layer.k_scale_float
    v_scale = layer.v_scale if layer.v_scale_float is None else layer.v_scale_float
    return {"k_scale": k_scale, "v_scale": v_scale}


# --- what is refused


def _refuse(reasons: Iterable[tuple[bool, str]]) -> None:
    for is_refused, reason in reasons:
        if is_refused:
            raise NotImplementedError(f"{reason}: the pagedkv backend does not support it")


def _check_runner(runner: Any) -> None:
    parallel, dtype = get_parallel(), runner.kv_cache_dtype
    _refuse(
        (
            (not runner.spec_algorithm.is_none(), f"speculative_algorithm {runner.spec_algorithm.name}"),
            (runner.use_mla_backend, "use_mla_backend (multi-head latent attention)"),
            (runner.model_config.is_encoder_decoder, "is_encoder_decoder (cross attention)"),
            (runner.attention_chunk_size is not None, f"attention_chunk_size {runner.attention_chunk_size}"),
            (dtype not in KV_CACHE_DTYPES, f"kv_cache_dtype {dtype}"),
            (runner.kv_cache_dtype_str == "mxfp8", "kv_cache_dtype mxfp8"),
            (parallel.dcp_enabled, "decode context parallelism (dcp_size > 1)"),
            (parallel.attn_cp_size > 1, f"attn_cp_size {parallel.attn_cp_size}"),
            (runner.kv_index_translator.is_translating, "enable_unified_memory"),
        )
    )


def _check_layer(layer: Any, options: dict[str, Any]) -> None:
    is_known = layer.attn_type in (AttentionType.DECODER, AttentionType.ENCODER_ONLY)
    _refuse(
        (
            (layer.is_cross_attention, "is_cross_attention"),
            (layer.v_head_dim != layer.qk_head_dim, f"v_head_dim {layer.v_head_dim} beside {layer.qk_head_dim}"),
            (not is_known, f"attn_type {layer.attn_type}"),
            (layer.pos_encoding_mode != "NONE", f"pos_encoding_mode {layer.pos_encoding_mode}"),
            (
                layer.logit_cap > 0 and layer.logit_capping_method != "tanh",
                f"logit_capping_method {layer.logit_capping_method}",
            ),
            (layer.xai_temperature_len > 0, "xai_temperature_len"),
            *((value is not None and value is not False, name) for name, value in options.items()),
        )
    )
