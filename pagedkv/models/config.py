"""Qwen3's config.json: the dense models, in the spellings of transformers 4 and 5."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from . import DTYPES
from .config_keys import HARMLESS, HARMLESS_PREFIXES, NEUTRAL, check_keys
from .rope import Rope, parse_rope

ARCHITECTURES = ("Qwen3ForCausalLM", "Qwen3Model")
READ = """
    architectures attention_bias auto_map dtype eos_token_id head_dim hidden_act hidden_size intermediate_size
    layer_types max_position_embeddings max_window_layers model_type num_attention_heads num_hidden_layers
    num_key_value_heads quantization_config rms_norm_eps rope_parameters rope_scaling rope_theta sliding_window
    tie_word_embeddings torch_dtype use_sliding_window vocab_size
"""
ADAPTERS = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin")
LFS_POINTER = b"version https://git-lfs"  # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md


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
        for name in ADAPTERS:
            if (folder / name).exists():
                raise NotImplementedError(
                    f"{folder / name}: adapters (LoRA) are not supported: merge it into the weights and remove the file"
                )
        if not path.exists():
            raise FileNotFoundError(f"{folder}: no config.json: not the folder of a model")
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
    value = load_json(path)
    if not isinstance(value, dict):
        raise ValueError(f"{path}: a JSON object was expected, not {type(value).__name__}")
    return value


def load_json(path: Path) -> Any:
    refuse_pointer(path)
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:  # JSON or UTF-8
        raise ValueError(f"{path}: {error}") from None


def refuse_pointer(path: Path) -> None:
    """Raises where git has put a pointer in place of a large file."""
    with path.open("rb") as file:
        if file.read(len(LFS_POINTER)) == LFS_POINTER:
            raise ValueError(f"{path}: a git-lfs pointer stands in place of the file: run `git lfs pull` in its folder")


def _parse(raw: dict[str, Any], generation: dict[str, Any]) -> Qwen3Config:
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
        eos_token_ids=_token_ids(raw, "eos_token_id") | _token_ids(generation, "eos_token_id"),
    )


def _check_kind(raw: dict[str, Any]) -> None:
    """Raises for another model than this one, whatever its settings are."""
    if raw.get("model_type") != "qwen3":
        raise NotImplementedError(f"model_type is {raw.get('model_type')!r}; only 'qwen3' (dense) is supported")
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


def _token_ids(raw: dict[str, Any], name: str) -> frozenset[int]:
    value = raw.get(name)
    ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(isinstance(i, int) for i in ids):
        raise ValueError(f"{name} is {value!r} but must be an integer or a list of integers")
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
