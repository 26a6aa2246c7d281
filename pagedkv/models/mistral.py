"""Mistral 7B and its kin, https://arxiv.org/abs/2310.06825: the plain decoder; all its layers may have a window."""

from __future__ import annotations

from typing import Any

from .config import DecoderConfig, Keys, checked, common_fields, count, count_layers
from .decoder import Decoder
from .spec import Family

KEYS = Keys(
    architectures=("MistralForCausalLM", "MistralModel"),
    read=("layer_types", "sliding_window"),
    neutral={"attention_bias": (False,), "use_sliding_window": (True,)},
    defaults={
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "sliding_window": 4096,  # null: none
    },
)


def parse(raw: dict[str, Any], generation: dict[str, Any]) -> DecoderConfig:
    raw = checked(raw, KEYS)
    return DecoderConfig(**common_fields(raw, generation), windows=_windows(raw))


def _windows(raw: dict[str, Any]) -> tuple[int, ...]:
    """transformers knows one window for all layers, and passes over layer_types: a file with another pattern, as
    Ministral's, would be computed as it was not trained."""
    window = 0 if raw["sliding_window"] is None else count(raw, "sliding_window")
    kind = "sliding_attention" if window else "full_attention"
    others = [each for each in raw.get("layer_types") or () if each != kind]
    if others:
        raise NotImplementedError(f"layer_types holds {others[0]!r} but sliding_window is {raw['sliding_window']!r}")
    return (window,) * count_layers(raw)


FAMILY = Family(parse, Decoder)
