"""Attention in vLLM 0.33.0, and the base of the other releases."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
import vllm.envs as envs
from vllm.v1.attention import backend as interface

from pagedkv import ops

if TYPE_CHECKING:
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.kv_cache_interface import KVCacheSpec

NAME = "PAGEDKV"
FP8 = ("fp8", "fp8_e4m3")


@dataclass
class PagedKVMetadata(interface.AttentionMetadata):  # type: ignore[misc]
    """The batch of one step for the layers of one group, all tensors on the device.

    In a batch padded for a CUDA graph, the last requests have no queries and no keys, and the last slots are -1.
    """

    num_actual_tokens: int  # rows of the queries, the padding of a graph included
    max_query_len: int  # at least the longest query of a request
    query_start_loc: torch.Tensor  # int32 [num_reqs + 1]
    seq_lens: torch.Tensor  # int32 [num_reqs], keys of each request, the new ones included
    block_table: torch.Tensor  # int32 [num_reqs, max_blocks]
    slot_mapping: torch.Tensor  # int64 [num_tokens]
    causal: bool
    # What plan_attention made of this batch for layers that divide it alike: see PagedKVImpl.plan.
    plans: dict[tuple[Any, ...], torch.Tensor] = field(default_factory=dict)


class PagedKVMetadataBuilder(interface.AttentionMetadataBuilder):  # type: ignore[misc]
    # The kernels choose by shapes alone and read lengths on the device, so one graph serves every batch that fits it.
    _cudagraph_support: ClassVar[interface.AttentionCGSupport] = interface.AttentionCGSupport.ALWAYS

    def __init__(self, kv_cache_spec: KVCacheSpec, layer_names: list[str], vllm_config: Any, device: torch.device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(
        self, common_prefix_len: int, common_attn_metadata: interface.CommonAttentionMetadata, fast_build: bool = False
    ) -> PagedKVMetadata:
        """The step's batch. Nothing is computed here: the first layer that needs a plan makes it."""
        common = common_attn_metadata
        if common_prefix_len > 0:
            raise NotImplementedError(f"common_prefix_len is {common_prefix_len}: {NAME} has no cascade attention")
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError(f"causal: {NAME} takes one bool for the whole batch, not one for each request")
        return PagedKVMetadata(
            num_actual_tokens=common.num_actual_tokens, max_query_len=common.max_query_len,
            query_start_loc=common.query_start_loc, seq_lens=common.seq_lens, block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping, causal=common.causal,
        )  # fmt: skip


class PagedKVImpl(interface.AttentionImpl):  # type: ignore[misc]
    """The attention of one layer."""

    supports_dcp = False
    supports_pcp = False

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = interface.AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: torch.Tensor | None = None,
    ) -> None:
        if attn_type != interface.AttentionType.DECODER:
            raise NotImplementedError(f"attn_type is {attn_type}: {NAME} has decoder attention only")
        if sinks is not None and sinks.shape != (num_heads,):
            raise ValueError(f"sinks: shape is {tuple(sinks.shape)} but must be ({num_heads},), one for each head")
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.alibi_slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.window = -1 if sliding_window is None else sliding_window - 1
        self.kv_cache_dtype = kv_cache_dtype
        self.softcap = float(logits_soft_cap or 0)
        self.sinks = sinks
        self.num_splits = 1 if envs.VLLM_BATCH_INVARIANT else 0

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        if self.sinks is not None:
            self.sinks = self.sinks.detach().float()

    def do_kv_cache_update(
        self,
        layer: interface.AttentionLayer,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        """Stores new keys and values; vLLM calls it before forward. Rows after those of slot_mapping are padding."""
        num_tokens = slot_mapping.shape[0]
        k_cache, v_cache = self.caches(kv_cache)
        k_scale, v_scale = self.scales(layer)
        new = key[:num_tokens], value[:num_tokens]
        ops.store_kvcache(*new, k_cache, v_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale)

    def forward(
        self,
        layer: interface.AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: PagedKVMetadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of query [num_tokens, num_heads, head_size] over the pages, into output, which has that shape.

        key and value are in kv_cache [num_blocks, num_kv_heads, block_size, 2 * head_size] already, side by side.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(f"output_scale, output_block_scale: {NAME} does not quantise its output")
        if attn_metadata is None:  # vLLM measures its memory
            return output.fill_(0)
        batch, num_tokens = attn_metadata, attn_metadata.num_actual_tokens
        k_scale, v_scale = self.scales(layer)
        tensors = query[:num_tokens], *self.caches(kv_cache), batch.block_table, batch.seq_lens
        options: dict[str, Any] = dict(
            cu_seqlens_q=batch.query_start_loc,
            max_seqlen_q=batch.max_query_len,
            causal=batch.causal,
            window_size=(self.window, self.window),  # causal makes the right side 0
            num_splits=self.num_splits,
        )
        ops.paged_attention_fwd(
            *tensors, **options, plan=self.plan(batch, tensors, options), softmax_scale=self.scale,
            softcap=self.softcap, alibi_slopes=self.alibi_slopes, sinks=self.sinks, k_scale=k_scale, v_scale=v_scale,
            out=output[:num_tokens],
        )  # fmt: skip
        return output

    def plan(self, batch: PagedKVMetadata, tensors: tuple[torch.Tensor, ...], options: dict[str, Any]) -> torch.Tensor:
        """How this batch is divided among the processors. The first layer makes the plan, and later layers of the same
        kind use it.

        In a captured graph the plan is a part of the graph, so that every replay plans for the lengths that it finds. A
        plan from outside of the graph is therefore not used in it.
        """
        is_captured = tensors[0].is_cuda and torch.cuda.is_current_stream_capturing()
        kind = is_captured, self.num_heads, self.window
        plan = batch.plans.get(kind)
        if plan is None:
            plan = batch.plans[kind] = ops.plan_attention(*tensors, **options)
        return plan

    def caches(self, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as views [num_blocks, block_size, num_kv_heads, head_size]. vLLM holds fp8 as bytes."""
        if self.kv_cache_dtype in FP8:
            kv_cache = kv_cache.view(torch.float8_e4m3fn)
        k_cache, v_cache = kv_cache.transpose(1, 2).split(self.head_size, dim=-1)
        return k_cache, v_cache

    def scales(self, layer: interface.AttentionLayer) -> tuple[torch.Tensor, torch.Tensor] | tuple[None, None]:
        """The scales of the keys and the values of an fp8 cache: one number (a scalar in vLLM), or one per KV head."""
        if self.kv_cache_dtype not in FP8:
            return None, None
        return layer._k_scale.reshape(-1), layer._v_scale.reshape(-1)


class PagedKVBackend(interface.AttentionBackend):  # type: ignore[misc]
    """What vLLM asks before it chooses. The layout of the cache is vLLM's choice: the kernels take any strides."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16", *FP8]
    forward_includes_kv_cache_update = False
    supports_kv_cache_update_bypass = True

    @staticmethod
    def get_name() -> str:
        return NAME

    @staticmethod
    def get_impl_cls() -> type[PagedKVImpl]:
        return PagedKVImpl

    @staticmethod
    def get_builder_cls() -> type[PagedKVMetadataBuilder]:
        return PagedKVMetadataBuilder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: KVCacheSpec | None = None) -> list[int | interface.MultipleOf]:
        """The kernels take any size, but for layers with a window vLLM takes the smallest that it finds here."""
        return [interface.MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size % 8 == 0 and 8 <= head_size <= 256

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return bool(capability.major >= 8)

    @classmethod
    def supports_combination(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool,
        has_sink: bool,
        use_sparse: bool,
        use_mm_prefix: bool,
        device_capability: DeviceCapability,
    ) -> str | None:
        """Why not, or None. vLLM asks on GPUs only."""
        if kv_cache_dtype in ("float16", "bfloat16") and dtype != getattr(torch, kv_cache_dtype):
            return f"kv_cache_dtype {kv_cache_dtype} with a model of {dtype}: both must be the same, or the cache fp8"
        problem = ops.build_info()["cuda_problem"]
        return None if problem is None else f"pagedkv cannot use the GPU: {problem}"

    @classmethod
    def supports_sink(cls) -> bool:
        return True

    supports_sliding_window = supports_non_causal = supports_sink
    supports_per_head_quant_scales = supports_batch_invariance = supports_sink
