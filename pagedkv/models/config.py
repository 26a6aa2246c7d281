"""Qwen3's config.json: the dense models, in the spellings of transformers 4 and 5.

A setting that this file does not know is refused by name: a model with a setting ignored would write wrong text.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROPE_TYPES = ("default", "linear", "yarn")
DTYPES = ("float32", "float16", "bfloat16")
LFS_POINTER = b"version https://git-lfs"  # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: the angle of pair i at position p is p * inv_freq[i]; attention_factor scales cos and sin."""

    type: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True


@dataclass(frozen=True)
class Qwen3Config:
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    tie_word_embeddings: bool
    attention_bias: bool
    dtype: str
    rope: Rope
    windows: tuple[int, ...]  # by layer: how many keys a query sees, itself included; 0: all
    eos_token_ids: frozenset[int] = field(default_factory=frozenset)

    @staticmethod
    def from_folder(folder: Path) -> Qwen3Config:
        """Reads config.json, and the EOS ids of generation_config.json where there is one."""
        path = folder / "config.json"
        raw = read_json(path)
        generation = folder / "generation_config.json"
        generation_raw = read_json(generation) if generation.exists() else {}
        try:
            return _parse(raw, generation_raw)
        except KeyError as error:
            raise ValueError(f"{path}: no {error.args[0]!r}") from None
        except NotImplementedError as error:
            raise NotImplementedError(f"{path}: {error}") from None
        except (AttributeError, TypeError, ValueError) as error:  # an entry of another type than the code below reads
            raise ValueError(f"{path}: {error}") from None

    def fingerprint(self) -> str:
        """A digest of all that the KV of a prompt depends on besides the weights, in hexadecimal."""
        kept = replace(self, eos_token_ids=frozenset())
        return hashlib.blake2b(repr(kept).encode(), digest_size=16).hexdigest()


def read_json(path: Path, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object in a JSON file. A file that is not there raises FileNotFoundError, or is `missing`."""
    if missing is not None and not path.is_file():
        return missing
    refuse_pointer(path)
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSON or UTF-8
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object was expected, not {type(value).__name__}")
    return value


def refuse_pointer(path: Path) -> None:
    """Raises where git has put a pointer in place of a large file."""
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(f"{path}: a git-lfs pointer stands in place of the file: run `git lfs pull` in its folder")


def _parse(raw: dict[str, Any], generation: dict[str, Any]) -> Qwen3Config:
    if raw.get("model_type") != "qwen3":
        raise NotImplementedError(f"model_type is {raw.get('model_type')!r}; only 'qwen3' (dense) is supported")
    if raw.get("hidden_act", "silu") != "silu":
        raise NotImplementedError(f"hidden_act is {raw['hidden_act']!r}; only 'silu' is supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise NotImplementedError(f"quantised weights (quantization_config.quant_method is {method!r})")
    dtype = raw.get("dtype") or raw.get("torch_dtype") or "float32"  # transformers 5 and 4
    if dtype not in DTYPES:
        raise NotImplementedError(f"dtype is {dtype!r}; supported are {', '.join(DTYPES)}")
    num_q_heads = _count(raw, "num_attention_heads")
    num_kv_heads = _count(raw, "num_key_value_heads") if raw.get("num_key_value_heads") else num_q_heads
    hidden_size = _count(raw, "hidden_size")
    head_dim = _count(raw, "head_dim") if raw.get("head_dim") else hidden_size // num_q_heads
    if num_q_heads % num_kv_heads:
        raise ValueError(f"num_attention_heads is {num_q_heads}, no multiple of num_key_value_heads {num_kv_heads}")
    if head_dim % 2:
        raise ValueError(f"head_dim is {head_dim} but rotary embeddings need an even one")
    max_position_embeddings = _count(raw, "max_position_embeddings")
    return Qwen3Config(
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
        rope=_parse_rope(raw, max_position_embeddings),
        windows=_parse_windows(raw),
        eos_token_ids=_token_ids(raw, "eos_token_id") | _token_ids(generation, "eos_token_id"),
    )


def _count(raw: dict[str, Any], name: str) -> int:
    value = raw[name]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value < 2**31:
        raise ValueError(f"{name} is {value!r} but must be a positive integer below 2**31")
    return value


def _token_ids(raw: dict[str, Any], name: str) -> frozenset[int]:
    value = raw.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ValueError(f"{name} is {value!r} but must be an integer or a list of integers")
    return frozenset(ids)


def _parse_windows(raw: dict[str, Any]) -> tuple[int, ...]:
    num_layers = _count(raw, "num_hidden_layers")
    if not raw.get("use_sliding_window") or not raw.get("sliding_window"):
        return (0,) * num_layers
    types = raw.get("layer_types")
    if types is None:
        full = raw.get("max_window_layers", 28)
        types = ["sliding_attention" if i >= full else "full_attention" for i in range(num_layers)]
    unknown = set(types) - {"sliding_attention", "full_attention"}
    if unknown:
        raise NotImplementedError(f"layer_types holds {sorted(unknown)[0]!r}")
    if len(types) != num_layers:
        raise ValueError(f"layer_types has {len(types)} entries but num_hidden_layers is {num_layers}")
    return tuple(_count(raw, "sliding_window") if t == "sliding_attention" else 0 for t in types)


def _parse_rope(raw: dict[str, Any], max_position_embeddings: int) -> Rope:
    # transformers 5 writes rope_parameters with everything in it, 4 wrote rope_theta beside rope_scaling.
    scaling = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    theta = float(scaling.get("rope_theta") or raw.get("rope_theta") or 10000.0)
    if kind not in ROPE_TYPES:
        raise NotImplementedError(f"rope type {kind!r}; supported are {', '.join(ROPE_TYPES)}")
    if scaling.get("partial_rotary_factor", 1.0) != 1.0 or raw.get("partial_rotary_factor", 1.0) != 1.0:
        raise NotImplementedError("partial_rotary_factor other than 1")
    if kind == "default":
        return Rope(theta=theta)
    original = scaling.get("original_max_position_embeddings") or max_position_embeddings
    factor = scaling.get("factor") or max_position_embeddings / original
    if factor < 1:
        raise ValueError(f"the rope scaling factor is {factor} but must be at least 1")
    if kind == "linear":
        return Rope("linear", theta, float(factor))
    return Rope(
        "yarn",
        theta,
        float(factor),
        int(original),
        float(scaling.get("beta_fast") or 32.0),
        float(scaling.get("beta_slow") or 1.0),
        _yarn_attention_factor(scaling, factor),
        bool(scaling.get("truncate", True)),
    )


def _yarn_attention_factor(scaling: dict[str, Any], factor: float) -> float:
    """What cos and sin are multiplied by (YaRN, section 3.4: sqrt(1/t) = 0.1 ln(s) + 1), unless the file says."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    if scaling.get("attention_factor") is not None:
        return float(scaling["attention_factor"])
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return temperature(scaling["mscale"]) / temperature(scaling["mscale_all_dim"])
    return temperature(1.0)
