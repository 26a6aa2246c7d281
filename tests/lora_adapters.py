"""Adapters of low rank as PEFT saves them, with random matrices, and the merged model that is their oracle."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from checkpoints import random_weights, safetensors_bytes, tensor_shapes, tiny_config, write_model

ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZE = 0.25  # of what a pair of matrices adds to a weight, whose values have a deviation of 0.2


def write_adapter(
    folder: Path, family: str = "qwen3", *, seed: int = 1, r: int = 4, lora_alpha: float = 8, targets: tuple[str, ...] = ALL,
    layers: tuple[int, ...] | None = None, dtype: str = "float32", change: Any = None, **config: Any,
) -> dict[str, np.ndarray]:  # fmt: skip
    """Returns what it adds to which weights. change: a function that is given the tensors before they are written."""
    rng = np.random.default_rng(seed)
    ranks, alphas = config.get("rank_pattern", {}), config.get("alpha_pattern", {})
    tensors, deltas = {}, {}
    for name, shape in tensor_shapes(tiny_config(family)).items():
        module, kind = name.removesuffix(".weight"), name.split(".")[-2]
        if kind not in targets or len(shape) < 2 or (layers is not None and int(name.split(".")[2]) not in layers):
            continue
        rank, alpha = ranks.get(kind, r), alphas.get(kind, lora_alpha)
        scale = alpha / (rank**0.5 if config.get("use_rslora") else rank)
        deviation = (SIZE / scale / rank**0.5) ** 0.5
        a, b = (rng.standard_normal(each) * deviation for each in ((rank, shape[1]), (shape[0], rank)))
        a, b = a.astype(dtype), b.astype(dtype)
        tensors[f"base_model.model.{module}.lora_A.weight"], tensors[f"base_model.model.{module}.lora_B.weight"] = a, b
        deltas[name] = scale * b.astype(np.float64) @ a.astype(np.float64)
    if change is not None:
        change(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    if layers is not None:
        config = {"layers_to_transform": list(layers)} | config
    whole = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": r, "lora_alpha": lora_alpha, "target_modules": list(targets),
             "lora_dropout": 0.1, "bias": "none", "inference_mode": True, "base_model_name_or_path": "somewhere"} | config  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps({k: v for k, v in whole.items() if v != "absent"}))
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(tensors))
    return deltas


def write_merged(folder: Path, deltas: dict[str, np.ndarray], family: str = "qwen3", **overrides: Any) -> Path:
    """The model of write_model with these added to its weights."""
    write_model(folder, family, **overrides)
    weights = random_weights(tiny_config(family, **overrides))
    for name, delta in deltas.items():
        weights[name] = (weights[name] + delta).astype(np.float32)
    (folder / "model.safetensors").write_bytes(safetensors_bytes(weights))
    return folder
