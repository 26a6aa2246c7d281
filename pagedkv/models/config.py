"""config.json of a decoder, in the spellings of transformers 4 and 5. What differs by family is in its own file."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Self

from . import DTYPES
from .config_keys import HARMLESS, HARMLESS_PREFIXES, NEUTRAL, check_keys, flag, number
from .quantized import parse_quantization
from .rope import Rope, parse_rope
from .share import split, split_heads, split_vocab
from .spec import KVLayer, Spec

READ = """
    architectures auto_map dtype eos_token_id head_dim hidden_act hidden_size intermediate_size max_position_embeddings
    model_type num_attention_heads num_hidden_layers num_key_value_heads quantization_config rms_norm_eps
    rope_parameters rope_scaling rope_theta tie_word_embeddings torch_dtype vocab_size
"""
MOST_EXPERTS, MOST_CHOSEN = 1024, 32  # of ops.route_experts
MOST_HEAD_DIM = 256  # of ops.qkv_attention_fwd
KINDS = ("full_attention", "sliding_attention")  # of layer_types


@dataclass(frozen=True, kw_only=True)
class Keys:
    """What a family reads besides READ, and transformers' defaults: of keys that may be absent."""

    architectures: tuple[str, ...]
    read: tuple[str, ...] = ()
    neutral: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)  # besides config_keys.NEUTRAL
    defaults: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class DecoderConfig(Spec):
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    rope: Rope
    windows: tuple[int, ...]  # by layer: how many keys a query sees, itself included; 0: all
    qk_norm: bool = False  # a norm of each head of q and k
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    vocab_share: int | None = None  # of the rows of embedding and head; None: all

    @property
    def vocab_rows(self) -> int:
        return self.vocab_size if self.vocab_share is None else self.vocab_share

    def shard(self, rank: int, num_ranks: int) -> Self:
        unit = self._unit()
        of_head = unit[0] if self._may_quantise_head() else 1
        q_heads, kv_heads = split_heads(self.num_q_heads, self.num_kv_heads, self.head_dim, rank, num_ranks, unit)
        return replace(
            self,
            num_q_heads=q_heads,
            num_kv_heads=kv_heads,
            intermediate_size=split("intermediate_size", self.intermediate_size, rank, num_ranks, math.lcm(*unit)),
            vocab_share=split_vocab(self.vocab_size, rank, num_ranks, of_head),
        )

    def _unit(self) -> tuple[int, int]:
        return (1, 1) if self.quantization is None else self.quantization.unit

    def _may_quantise_head(self) -> bool:
        """A tied one is the embedding."""
        method = None if self.tie_word_embeddings else self.quantization
        return method is not None and method.covers("lm_head") is not False

    @property
    def kv_layers(self) -> tuple[KVLayer, ...]:
        return tuple(KVLayer(self.num_kv_heads, self.head_dim, window) for window in self.windows)

    @property
    def max_positions(self) -> int:
        """Files of transformers 4 scale the rotary embedding without raising max_position_embeddings."""
        scaled = int(self.rope.original_max_position_embeddings * self.rope.factor) if self.rope.type == "yarn" else 0
        return max(self.max_position_embeddings, scaled)


@dataclass(frozen=True, kw_only=True)
class ExpertsConfig(DecoderConfig):
    """Of a decoder with layers whose MLP is experts."""

    has_experts: tuple[bool, ...]  # by layer
    num_experts: int
    num_chosen: int  # of a token
    expert_size: int  # their intermediate_size
    normalizes: bool  # a token's weights are divided by their sum

    def shard(self, rank: int, num_ranks: int) -> Self:
        size = split("moe_intermediate_size", self.expert_size, rank, num_ranks, math.lcm(*self._unit()))
        return replace(super().shard(rank, num_ranks), expert_size=size)


def checked(raw: Mapping[str, Any], keys: Keys) -> dict[str, Any]:
    """config.json with the family's defaults, none of whose keys is unknown."""
    _check_kind(raw, keys.architectures)
    read = {*READ.split(), *keys.read}
    neutral = {key: values for key, values in NEUTRAL.items() if key not in read} | dict(keys.neutral)
    check_keys(raw, read, neutral, HARMLESS.split(), HARMLESS_PREFIXES)
    return {**keys.defaults, **raw}


def common_fields(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of DecoderConfig that all families have alike, of config.json with its defaults and the EOS ids of
    generation_config.json."""
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"  # transformers 5 and 4
    if dtype not in DTYPES:
        raise NotImplementedError(f"dtype is {dtype!r}; supported are {', '.join(DTYPES)}")
    num_q_heads, hidden_size = count(raw, "num_attention_heads"), count(raw, "hidden_size")
    num_kv_heads = num_q_heads if raw.get("num_key_value_heads") is None else count(raw, "num_key_value_heads")
    if raw.get("head_dim") is None and hidden_size % num_q_heads:
        raise ValueError(f"hidden_size is {hidden_size}, no multiple of num_attention_heads {num_q_heads}: no head_dim")
    head_dim = hidden_size // num_q_heads if raw.get("head_dim") is None else count(raw, "head_dim")
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads is {num_q_heads}, no multiple of num_key_value_heads {num_kv_heads}")
    if head_dim % 8 or head_dim > MOST_HEAD_DIM:
        raise NotImplementedError(f"head_dim is {head_dim}; only multiples of 8 up to {MOST_HEAD_DIM} are supported")
    max_position_embeddings = count(raw, "max_position_embeddings")
    return {
        "family": raw["model_type"],
        "vocab_size": count(raw, "vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": count(raw, "intermediate_size"),
        "num_layers": count_layers(raw),
        "num_q_heads": num_q_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": max_position_embeddings,
        "rms_norm_eps": number(raw, "rms_norm_eps"),
        "tie_word_embeddings": flag(raw, "tie_word_embeddings"),
        "dtype": dtype,
        "rope": parse_rope(raw, max_position_embeddings, head_dim),
        "eos_token_ids": _eos_token_ids(raw) | _eos_token_ids(generation, "generation_config.json: "),
        "quantization": parse_quantization(raw),
    }


def experts_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Those of ExpertsConfig that all families have alike. transformers 5 spells the number of experts otherwise."""
    name = "num_experts" if raw.get("num_experts") is not None else "num_local_experts"
    num_experts, num_chosen = count({"num_local_experts": 128, **raw}, name), count(raw, "num_experts_per_tok")
    if num_experts != (raw.get("num_local_experts") or num_experts):
        raise ValueError(f"num_experts is {num_experts} but num_local_experts is {raw['num_local_experts']}")
    if num_experts > MOST_EXPERTS:
        raise NotImplementedError(f"{name} is {num_experts}; at most {MOST_EXPERTS} are supported")
    if num_chosen > (most := min(num_experts, MOST_CHOSEN)):
        raise NotImplementedError(
            f"num_experts_per_tok is {num_chosen}, of {num_experts} experts; at most {most} are supported"
        )
    return {
        "num_experts": num_experts,
        "num_chosen": num_chosen,
        "expert_size": count(raw, "moe_intermediate_size"),
        "normalizes": flag(raw, "norm_topk_prob"),
    }


def no_windows(raw: Mapping[str, Any]) -> tuple[int, ...]:
    return (0,) * count_layers(raw)


def windows_of_types(raw: Mapping[str, Any]) -> tuple[int, ...]:
    """Qwen's: use_sliding_window switches the windows on; layer_types, or max_window_layers, says which layers have
    them."""
    num_layers = count_layers(raw)
    has_windows = flag(raw, "use_sliding_window") and raw["sliding_window"] is not None
    num_full = raw["max_window_layers"] if has_windows else num_layers
    if not isinstance(num_full, int):
        raise ValueError(f"max_window_layers is {num_full!r} but must be an integer")
    types = raw.get("layer_types")
    if types is None:
        types = [KINDS[i >= num_full] for i in range(num_layers)]
    types = ["full_attention" if each == "attention" else each for each in types]  # its older name
    unknown = set(types) - set(KINDS)
    if unknown:
        raise NotImplementedError(f"layer_types holds {sorted(unknown)[0]!r}")
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries but num_hidden_layers is {num_layers}")
    if "sliding_attention" not in types:
        return no_windows(raw)
    if not has_windows:
        raise ValueError(
            "layer_types holds 'sliding_attention' but there is no window: use_sliding_window is "
            f"{raw.get('use_sliding_window')!r}, sliding_window is {raw['sliding_window']!r}"
        )
    return tuple(count(raw, "sliding_window") if each == "sliding_attention" else 0 for each in types)


def count_layers(raw: Mapping[str, Any]) -> int:
    """There are lists of all layers before any weight is read, so the limit is lower than that of other counts."""
    return count(raw, "num_hidden_layers", bits=16)


def count(raw: Mapping[str, Any], name: str, bits: int = 31) -> int:
    value = raw[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**bits:
        raise ValueError(f"{name} is {reprlib.repr(value)} but must be a positive integer below 2**{bits}")
    return value


def _check_kind(raw: Mapping[str, Any], architectures: tuple[str, ...]) -> None:
    """Raises for a model that is computed otherwise, whatever its other settings are."""
    for name in raw.get("architectures") or ():
        if str(name).removeprefix("FSDP") not in architectures:  # the prefix is that of a trainer's wrapper
            raise NotImplementedError(f"architectures holds {name!r}; supported are {', '.join(architectures)}")
    code = {name: place for name, place in (raw.get("auto_map") or {}).items() if name != "AutoTokenizer"}
    if code:
        raise NotImplementedError(f"auto_map is {code}: the model is computed by code of its own, which is not run")
    if raw.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"hidden_act is {raw['hidden_act']!r}; only 'silu' is supported")


def _eos_token_ids(raw: Mapping[str, Any], where: str = "") -> frozenset[int]:
    value = raw.get("eos_token_id")
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
        raise ValueError(f"{where}eos_token_id is {value!r} but must be an integer or a list of integers")
    return frozenset(ids)
