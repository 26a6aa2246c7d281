"""Qwen2 and Qwen2.5 (dense), https://arxiv.org/abs/2412.15115: biases of q, k and v, none behind the attention, and no
norms of q and k; layers may have windows."""

from __future__ import annotations

from typing import Any

from .config import DecoderConfig, Keys, checked, common_fields, windows_of_types
from .decoder import Decoder
from .spec import Family

KEYS = Keys(
    architectures=("Qwen2ForCausalLM", "Qwen2Model"),
    read=("layer_types", "max_window_layers", "sliding_window", "use_sliding_window"),
    neutral={"attention_bias": (True,)},  # transformers knows no other
    defaults={
        "num_key_value_heads": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "sliding_window": 4096,
        "max_window_layers": 28,
    },
)


def parse(raw: dict[str, Any], generation: dict[str, Any]) -> DecoderConfig:
    raw = checked(raw, KEYS)
    return DecoderConfig(**common_fields(raw, generation), windows=windows_of_types(raw), qkv_bias=True)


FAMILY = Family(parse, Decoder)
