"""Tiny random Qwen3 folders for tests: written by hand (no torch), or by transformers itself."""

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


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """What a Qwen3 checkpoint must hold."""
    hidden, middle, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    q_size, kv_size = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {f"{layer}.{name}.weight": (hidden,) for name in ("input_layernorm", "post_attention_layernorm")}
        shapes |= {f"{layer}.self_attn.{name}.weight": (dim,) for name in ("q_norm", "k_norm")}
        for name, rows in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size)):
            shapes[f"{layer}.self_attn.{name}.weight"] = (rows, hidden)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (hidden, q_size)
        shapes |= {f"{layer}.mlp.{name}.weight": (middle, hidden) for name in ("gate_proj", "up_proj")}
        shapes[f"{layer}.mlp.down_proj.weight"] = (hidden, middle)
        if config["attention_bias"]:
            for name, rows in (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size), ("o_proj", hidden)):
                shapes[f"{layer}.self_attn.{name}.bias"] = (rows,)
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
    """The file format by hand. uint16 arrays are bfloat16 bits; `dtypes` overrides a name's dtype string."""
    names = {"float32": "F32", "float16": "F16", "uint16": "BF16"}
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


def write_model(folder: Path, *, seed: int = 0, generation: dict[str, Any] | None = None, **overrides: Any) -> Path:
    """A folder with random weights, a tokenizer and the configuration TINY | overrides."""
    folder.mkdir(parents=True, exist_ok=True)
    config = TINY | overrides
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


def save_pretrained(folder: Path, *, seed: int = 0, dtype: str = "float32", **overrides: Any) -> Any:
    """A folder written by transformers' save_pretrained with a tokenizer beside it.

    Returns the oracle: transformers' model with these weights, computing in float32.
    """
    torch = pytest.importorskip("torch", reason="the oracle is transformers' Qwen3, which needs torch")
    transformers = pytest.importorskip("transformers", reason="the oracle is transformers' own Qwen3")
    config = {k: v for k, v in (TINY | overrides).items() if k not in ("architectures", "model_type", "dtype")}
    model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**config)).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(("norm" in name) + 0.2 * torch.randn(parameter.shape, generator=generator))
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    write_tokenizer(folder)
    return transformers.Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
