"""Qwen3 (dense), https://arxiv.org/abs/2505.09388: a norm of each head of q and k; layers may have windows."""

from __future__ import annotations

from typing import Any

from .config import DecoderConfig, Keys, checked, common_fields, windows_of_types
from .config_keys import flag
from .decoder import Decoder
from .spec import Family

KEYS = Keys(
    architectures=("Qwen3ForCausalLM", "Qwen3Model"),
    read=("attention_bias", "layer_types", "max_window_layers", "sliding_window", "use_sliding_window"),
    defaults={
        "num_key_value_heads": 32,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)


def parse(raw: dict[str, Any], generation: dict[str, Any]) -> DecoderConfig:
    raw = checked(raw, KEYS)
    has_bias = flag(raw, "attention_bias")
    return DecoderConfig(
        **common_fields(raw, generation),
        windows=windows_of_types(raw),
        qk_norm=True,
        qkv_bias=has_bias,
        o_bias=has_bias,
    )


FAMILY = Family(parse, Decoder)
