"""Qwen3's config.json: the dense models, in the spellings of transformers 4 and 5."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from . import DTYPES
from .config_keys import HARMLESS, HARMLESS_PREFIXES, NEUTRAL, check_keys
from .rope import Rope, parse_rope
from .spec import KVLayer, Spec

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3Model")
READ = """
    architectures attention_bias auto_map dtype eos_token_id head_dim hidden_act hidden_size intermediate_size
    layer_types max_position_embeddings max_window_layers model_type num_attention_heads num_hidden_layers
    num_key_value_heads quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window
    tie_word_embeddings torch_dtype use_sliding_window vocab_size
"""


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(Spec):
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    rope: Rope
    windows: tuple[int, ...]  # by layer: how many keys a query sees, itself included; 0: all

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return (KVLayer(self.num_kv_heads, self.head_dim),) * self.num_layers

    @property
    def max_positions(self) -> int:
        """Files of transformers 4 scale the rotary embedding without raising max_position_embeddings."""
        scaled = int(self.rope.original_max_position_embeddings * self.rope.factor) if self.rope.type == "yarn" else 0
        return max(self.max_position_embeddings, scaled)

    @property
    def buffer_size(self) -> int:
        return sum(self.buffer_sizes)

    @property
    def buffer_sizes(self) -> list[int]:
        """The numbers of a token in each of the buffers of qwen3.py."""
        q_size, kv_size = self.num_q_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = [self.hidden_size] * 2 + [q_size + 2 * kv_size, q_size, q_size]
        return [*sizes, 2 * self.intermediate_size, self.intermediate_size]


def parse(raw: dict[str, Any], generation: dict[str, Any]) -> Qwen3Config:
    """Of config.json, and the EOS ids of generation_config.json."""
    _check_kind(raw)
    check_keys(raw, READ.split(), NEUTRAL, HARMLESS.split(), HARMLESS_PREFIXES)
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"  # transformers 5 and 4
    if dtype not in DTYPES:
        raise NotImplementedError(f"dtype is {dtype!r}; supported are {', '.join(DTYPES)}")
    num_q_heads = _count(raw, "num_attention_heads")
    num_kv_heads = _count(raw, "num_key_value_heads") if raw.get("num_key_value_heads") else num_q_heads
    hidden_size = _count(raw, "hidden_size")
    raw = {"head_dim": 128, "sliding_window": 4096, "max_window_layers": 28} | raw  # transformers' defaults
    head_dim = hidden_size // num_q_heads if raw["head_dim"] is None else _count(raw, "head_dim")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads is {num_q_heads}, no multiple of num_key_value_heads {num_kv_heads}")
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim} but rotary embeddings need an even one")
    max_position_embeddings = _count(raw, "max_position_embeddings")
    return Qwen3Config(
        family="qwen3",
        vocab_size=_count(raw, "vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=_count(raw, "intermediate_size"),
        num_layers=_count(raw, "num_hidden_layers"),
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=float(raw["rms_norm_eps"]),
        tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
        attention_bias=bool(raw.get("attention_bias", False)),
        dtype=dtype,
        rope=parse_rope(raw, max_position_embeddings),
        windows=_parse_windows(raw),
        eos_token_ids=_eos_token_ids(raw) | _eos_token_ids(generation),
    )


def _check_kind(raw: dict[str, Any]) -> None:
    """Raises for a model that is computed otherwise, whatever its other settings are."""
    for name in raw.get("architectures") or ():
        if str(name).removeprefix("FSDP") not in ARCHITECTURES:  # the prefix is that of a trainer's wrapper
            raise NotImplementedError(f"architectures holds {name!r}; supported are {', '.join(ARCHITECTURES)}")
    code = {name: place for name, place in (raw.get("auto_map") or {}).items() if name != "AutoTokenizer"}
    if code:
        raise NotImplementedError(f"auto_map is {code}: the model is computed by code of its own, which is not run")
    if raw.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"hidden_act is {raw['hidden_act']!r}; only 'silu' is supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise NotImplementedError(f"quantised weights (quantization_config.quant_method is {method!r})")


def _count(raw: dict[str, Any], name: str) -> int:
    value = raw[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ValueError(f"{name} is {value!r} but must be a positive integer below 2**31")
    return value


def _eos_token_ids(raw: dict[str, Any]) -> frozenset[int]:
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ValueError(f"eos_token_id is {value!r} but must be an integer or a list of integers")
    return frozenset(ids)


def _parse_windows(raw: dict[str, Any]) -> tuple[int, ...]:
    num_layers = _count(raw, "num_hidden_layers")
    has_windows = bool(raw.get("use_sliding_window")) and raw["sliding_window"] is not None
    num_full = raw["max_window_layers"] if has_windows else num_layers
    kinds = ("full_attention", "sliding_attention")
    types = raw.get("layer_types") or [kinds[i >= num_full] for i in range(num_layers)]
    types = ["full_attention" if each == "attention" else each for each in types]  # its older name
    unknown = set(types) - set(kinds)
    if unknown:
        raise NotImplementedError(f"layer_types holds {sorted(unknown)[0]!r}")
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries but num_hidden_layers is {num_layers}")
    if "sliding_attention" not in types:
        return (0,) * num_layers
    if not has_windows:
        raise ValueError(
            "layer_types holds 'sliding_attention' but there is no window: use_sliding_window is "
            f"{raw.get('use_sliding_window')!r}, sliding_window is {raw['sliding_window']!r}"
        )
    return tuple(_count(raw, "sliding_window") if each == "sliding_attention" else 0 for each in types)
