"""Llama 3 (https://arxiv.org/abs/2407.21783), and what else is called Llama: the plain decoder, without norms of q and
k. A file may add biases to all projections of the attention, or to those of the MLP."""

from __future__ import annotations

from typing import Any

from .config import DecoderConfig, Keys, checked, common_fields, no_windows
from .config_keys import flag
from .decoder import Decoder
from .spec import Family

KEYS = Keys(
    architectures=("LlamaForCausalLM", "LlamaModel"),
    read=("attention_bias", "mlp_bias"),
    neutral={"rope_interleaved": (False,), "sliding_window": (), "use_sliding_window": (False,)},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048},
)


def parse(raw: dict[str, Any], generation: dict[str, Any]) -> DecoderConfig:
    raw = checked(raw, KEYS)
    has_bias = flag(raw, "attention_bias")
    return DecoderConfig(
        **common_fields(raw, generation),
        windows=no_windows(raw),
        qkv_bias=has_bias,
        o_bias=has_bias,
        mlp_bias=flag(raw, "mlp_bias"),
    )


FAMILY = Family(parse, Decoder)
