"""What differs in vLLM 0.26.0 from 0.33.0: the backend gives the cache its shape, a graph for batches of all kinds is
captured with short queries, and the name PAGEDKV is made in another way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.config import CUDAGraphMode
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.attention.backends.utils import get_kv_cache_layout

from . import backend

if TYPE_CHECKING:
    from vllm.v1.attention.backend import CommonAttentionMetadata


class PagedKVMetadataBuilder(backend.PagedKVMetadataBuilder):
    def build_for_cudagraph_capture(self, common_attn_metadata: CommonAttentionMetadata) -> backend.PagedKVMetadata:
        """A graph that also serves prefills is captured with many requests and their max_query_len, but may be replayed
        for a single request that has all of the tokens."""
        metadata = self.build(0, common_attn_metadata)
        if self.vllm_config.compilation_config.cudagraph_mode.mixed_mode() == CUDAGraphMode.FULL:
            metadata.max_query_len = metadata.num_actual_tokens
        return metadata


class PagedKVBackend(backend.PagedKVBackend):
    @staticmethod
    def get_builder_cls() -> type[PagedKVMetadataBuilder]:
        return PagedKVMetadataBuilder

    @staticmethod
    def get_kv_cache_shape(
        num_blocks: int, block_size: int, num_kv_heads: int, head_size: int, cache_dtype_str: str = "auto"
    ) -> tuple[int, ...]:
        """Keys and values of a token side by side, the only shape that 0.33.0 has."""
        return num_blocks, num_kv_heads, block_size, 2 * head_size

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """The order in memory of the dimensions above, for the layout that vLLM was told: NHD has tokens before heads.
        With all layers in one tensor, whose first dimension they are, blocks stay outermost."""
        is_nhd = get_kv_cache_layout() == "NHD"
        if include_num_layers_dimension:
            return (1, 0, 3, 2, 4) if is_nhd else (1, 2, 0, 3, 4)
        return (0, 2, 1, 3) if is_nhd else (0, 1, 2, 3)


def register() -> None:
    """0.26.0 has one name for foreign backends, CUSTOM: PAGEDKV becomes an alias of it."""
    if AttentionBackendEnum.CUSTOM.is_overridden():
        taken_by = AttentionBackendEnum.CUSTOM.get_path()
        raise RuntimeError(f"{backend.NAME}: vLLM's CUSTOM backend is taken by {taken_by}")
    register_backend(AttentionBackendEnum.CUSTOM, f"{__name__}.{PagedKVBackend.__name__}")
    AttentionBackendEnum._member_map_[backend.NAME] = AttentionBackendEnum.CUSTOM
