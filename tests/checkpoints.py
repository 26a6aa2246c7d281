"""Tiny random folders of models for tests: written by hand (no torch), or by transformers itself."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

ALPHABET = "0123456789+=abcdefghijklmnopqrstuvwxyz .,"
EOS = len(ALPHABET)  # the id behind the characters
VOCAB_SIZE = 97

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "dtype": "float32",
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


# By family, what its files have besides what TINY has of all, and the names of what a checkpoint of it holds.
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "head_dim": 32, "attention_bias": False},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"]},
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "mistral": {"architectures": ["MistralForCausalLM"], "sliding_window": None},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "head_dim": 32, "attention_bias": False, "num_experts": 6,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 48},
}


def tiny_config(family: str = "qwen3", **overrides: Any) -> dict[str, Any]:
    own = {key for each in FAMILIES.values() for key in each}
    common = {key: value for key, value in TINY.items() if key not in own}
    return common | {"model_type": family} | FAMILIES[family] | overrides


def mlp_shapes(config: dict[str, Any]) -> list[tuple[str, int, int, bool]]:
    hidden, middle, has_bias = config["hidden_size"], config["intermediate_size"], bool(config.get("mlp_bias"))
    names = ["mlp"]
    if config["model_type"] == "qwen3_moe":  # without dense layers
        names, middle = [f"mlp.experts.{i}" for i in range(config["num_experts"])], config["moe_intermediate_size"]
    parts = (("gate_proj", middle, hidden), ("up_proj", middle, hidden), ("down_proj", hidden, middle))
    router = [("mlp.gate", config["num_experts"], hidden, False)] if names != ["mlp"] else []
    return router + [(f"{name}.{part}", rows, columns, has_bias) for name in names for part, rows, columns in parts]


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What a checkpoint must hold."""
    hidden, family = config["hidden_size"], config["model_type"]
    dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    qkv_bias = family == "qwen2" or config.get("attention_bias")
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        if family.startswith("qwen3"):
            shapes |= {f"{layer}.self_attn.{name}.weight": (dim,) for name in ("q_norm", "k_norm")}
        for name, rows, columns, has_bias in (
            ("self_attn.q_proj", q_size, hidden, qkv_bias), ("self_attn.k_proj", kv_size, hidden, qkv_bias),
            ("self_attn.v_proj", kv_size, hidden, qkv_bias), ("self_attn.o_proj", hidden, q_size, config.get("attention_bias")),
            *mlp_shapes(config),
        ):  # fmt: skip
            shapes[f"{layer}.{name}.weight"] = (rows, columns)
            shapes |= {f"{layer}.{name}.bias": (rows,)} if has_bias else {}
    return shapes


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Large enough that the logits are well apart and depend on the whole context."""
    rng = np.random.default_rng(seed)
    weights = {}
    for name, shape in tensor_shapes(config).items():
        around = 1.0 if "norm" in name else 0.0
        weights[name] = (around + 0.2 * rng.standard_normal(shape)).astype(np.float32)
    return weights


def safetensors_bytes(tensors: dict[str, np.ndarray], dtypes: dict[str, str] | None = None) -> bytes:
    """The file format by hand. uint16 arrays are bfloat16 bits, uint8 those of float8_e4m3fn; `dtypes` overrides a name's dtype string."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16", "uint8": "F8_E4M3", "int32": "I32", "int64": "I64"}
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    data = b""
    for name, array in tensors.items():
        dtype = (dtypes or {}).get(name, names.get(str(array.dtype)))
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": dtype, "shape": list(array.shape), "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data


def write_tokenizer(folder: Path) -> None:
    """One token a character; the end of a sequence is special and therefore never part of a text."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(ALPHABET)}, unk_token=" "))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken("<end>", special=True)])
    assert tokenizer.token_to_id("<end>") == EOS
    tokenizer.save(str(folder / "tokenizer.json"))


def write_model(
    folder: Path, family: str = "qwen3", *, seed: int = 0, generation: dict[str, Any] | None = None, **overrides: Any
) -> Path:
    """A folder with random weights, a tokenizer and the configuration TINY, or that of another family, | overrides."""
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **overrides)
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(random_weights(config, seed)))
    write_tokenizer(folder)
    return folder


def split_in_shards(folder: Path, count: int, seed: int = 0) -> None:
    """Replaces model.safetensors of write_model() by shards and their index."""
    weights = random_weights(TINY, seed)
    names = sorted(weights)
    weight_map = {}
    for i in range(count):
        file = f"model-{i + 1:05}-of-{count:05}.safetensors"
        part = {name: weights[name] for name in names[i::count]}
        (folder / file).write_bytes(safetensors_bytes(part))
        weight_map |= dict.fromkeys(part, file)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def save_pretrained(
    folder: Path, family: str = "qwen3", *, seed: int = 0, dtype: str = "float32", max_shard_size: str = "1GB",
    **overrides: Any,
) -> Any:  # fmt: skip
    """A folder written by transformers' save_pretrained with a tokenizer beside it.

    Returns the oracle: transformers' model with these weights, computing in float32.
    """
    torch = pytest.importorskip("torch", reason="the oracle is transformers' model, which needs torch")
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' own model")
    config = tiny_config(family, **overrides)
    config = {key: value for key, value in config.items() if key not in ("architectures", "dtype")}
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(("norm" in name) + 0.2 * torch.randn(parameter.shape, generator=generator))
    model.to(getattr(torch, dtype)).save_pretrained(folder, max_shard_size=max_shard_size)
    write_tokenizer(folder)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
