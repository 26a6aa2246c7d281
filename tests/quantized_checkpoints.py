"""Tiny quantised checkpoints, written from the definitions of their formats, and the same weights as float32."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from checkpoints import random_weights, safetensors_bytes, tiny_config, write_tokenizer
from oracle import _F8_VALUES, rounded

Quantise = Callable[[np.ndarray], "Matrix"]
PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Matrix(NamedTuple):
    tensors: dict[str, np.ndarray]  # by the last part of their names
    values: np.ndarray  # float64


class Format(NamedTuple):
    quantise: Quantise
    config: dict[str, Any]  # quantization_config
    has_head: bool = False  # whether the head is quantised, too


# --- numbers


def bfloat16(values: np.ndarray) -> np.ndarray:
    """Rounded, as uint16."""
    return (rounded(values, "bfloat16").astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def float8(values: np.ndarray) -> np.ndarray:
    """Rounded, as uint8."""
    near = rounded(values, "float8_e4m3fn")
    return (np.searchsorted(_F8_VALUES, np.abs(near)) | (np.signbit(near) << 7)).astype(np.uint8)


def numbers(stored: np.ndarray) -> np.ndarray:
    """What stored scales are worth."""
    if stored.dtype == np.uint16:
        return (stored.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return stored.astype(np.float64)


def spread(scales: np.ndarray, block: tuple[int, int], shape: tuple[int, ...]) -> np.ndarray:
    return np.repeat(np.repeat(scales, block[0], axis=0), block[1], axis=1)[: shape[0], : shape[1]]


# --- float8


def fp8(block: tuple[int, int] | None, name: str, scale_dtype: Any = np.float32) -> Quantise:
    """block: of a scale, None: one for all; rows of blocks as long as a row: (1, 0)."""

    def quantise(w: np.ndarray) -> Matrix:
        rows, columns = (w.shape if block is None else block)
        columns = columns or w.shape[1]
        largest = [[np.abs(w[i : i + rows, j : j + columns]).max() for j in range(0, w.shape[1], columns)]
                   for i in range(0, w.shape[0], rows)]  # fmt: skip
        scales = np.array(largest) / 448
        stored = bfloat16(scales) if scale_dtype is bfloat16 else scales.astype(scale_dtype)
        each = spread(numbers(stored), (rows, columns), w.shape)
        codes = rounded(w / each, "float8_e4m3fn")
        tensors = {"weight": float8(codes), name: stored[0] if block is None else stored}
        return Matrix(tensors, codes * each)

    return quantise


# --- int4


def groups_of(w: np.ndarray, of_inputs: np.ndarray, zero: int | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Integers [N, K], float16 scales and zeros [N, groups]; zero: None: another one for each."""
    count = of_inputs.max() + 1
    integers, scales, zeros = np.zeros(w.shape, np.int64), [], []
    for group in range(count):
        part = w[:, of_inputs == group]
        low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
        scale = (np.maximum(high, -low) / 7.5 if zero is not None else (high - low) / 15).astype(np.float16)
        offset = np.full(len(w), zero) if zero is not None else np.clip(np.round(-low / scale), 0, 15).astype(np.int64)
        if zero is None:
            offset[::7], offset[1::7] = 0, 15  # the ends, whatever suits
        integers[:, of_inputs == group] = np.clip(np.round(part / scale[:, None]) + offset[:, None], 0, 15)
        scales.append(scale)
        zeros.append(offset)
    return integers, np.stack(scales, 1), np.stack(zeros, 1)


def packed(integers: np.ndarray, axis: int, order: tuple[int, ...] = tuple(range(8))) -> np.ndarray:
    """int32: eight neighbours along the axis in a word; order: the neighbour in each nibble, the lowest one first."""
    rows = np.moveaxis(integers, axis, -1)
    rows = rows.reshape(*rows.shape[:-1], -1, 8).astype(np.uint64)
    words = sum(rows[..., which] << np.uint64(4 * i) for i, which in enumerate(order))
    return np.ascontiguousarray(np.moveaxis(words.astype(np.uint32).view(np.int32), -1, axis))


def int4(layout: str, size: int, *, zero: int | None = 8, has_order: bool = False, stored_less: int = 0) -> Quantise:
    """size: of a group, 0: all inputs; has_order: groups of inputs that are no neighbours."""

    def quantise(w: np.ndarray) -> Matrix:
        of_inputs = np.arange(w.shape[1]) // (size or w.shape[1])
        if has_order:
            of_inputs = np.random.default_rng(w.shape[1]).permutation(of_inputs)
        q, scales, zeros = groups_of(w, of_inputs, zero)
        values = (q - zeros[:, of_inputs]) * scales.astype(np.float64)[:, of_inputs]
        index = of_inputs.astype(np.int32)
        if layout == "compressed-tensors":
            scales = bfloat16(scales)
            values = (q - zeros[:, of_inputs]) * numbers(scales)[:, of_inputs]
            tensors = {"weight_packed": packed(q, 1), "weight_scale": scales, "weight_shape": np.array(w.shape, np.int64)}
            tensors |= {"weight_zero_point": packed(zeros, 0)} if zero is None else {}
            tensors |= {"weight_g_idx": index} if has_order else {}
        elif layout == "awq":
            order = (0, 2, 4, 6, 1, 3, 5, 7)
            tensors = {"qweight": packed(q.T, 1, order), "qzeros": packed(zeros.T, 1, order), "scales": scales.T.copy()}
        else:
            less = np.int32(stored_less * 0x11111111)  # the words as numbers: a zero of 0 borrows from its neighbour
            tensors = {"qweight": packed(q.T, 0), "qzeros": packed(zeros.T, 1) - less, "scales": scales.T.copy()}
            tensors["g_idx"] = index
        return Matrix(tensors, values)

    return quantise


# --- formats


def compressed(kind: str, num_bits: int, strategy: str, form: str, **weights: Any) -> dict[str, Any]:
    activations = {"num_bits": 8, "type": "float", "dynamic": True, "strategy": "token", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "input_activations": activations if kind == "float" else None,
        "output_activations": None,
        "weights": {"num_bits": num_bits, "type": kind, "strategy": strategy, "symmetric": True, "dynamic": False,
                    "observer": "minmax", "observer_kwargs": {}, "group_size": None, "actorder": None} | weights,
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "config_groups": {"group_0": group}, "format": form, "ignore": ["lm_head"],
        "kv_cache_scheme": None, "quantization_status": "compressed", "global_compression_ratio": 1.5, "version": "0.12.2",
    }  # fmt: skip


QWEN = {
    "quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "mlp.gate"],
}  # fmt: skip
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
GPTQ = {
    "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "damp_percent": 0.1,
    "true_sequential": True, "lm_head": False, "checkpoint_format": "gptq", "pack_dtype": "int32", "meta": {"quantizer": ["x:1"]},
}  # fmt: skip
PACKED = "pack-quantized"
FORMATS = {
    "fp8": Format(fp8((128, 128), "weight_scale_inv", bfloat16), QWEN),
    "fp8, small blocks": Format(fp8((48, 24), "weight_scale_inv"), QWEN | {"weight_block_size": [48, 24]}),
    "fp8, tensor": Format(fp8(None, "weight_scale"), compressed("float", 8, "tensor", "float-quantized")),
    "fp8, channel": Format(fp8((1, 0), "weight_scale", bfloat16), compressed("float", 8, "channel", "naive-quantized")),
    "fp8, block": Format(
        fp8((128, 128), "weight_scale"), compressed("float", 8, "block", "float-quantized", block_structure=[128, 128])
    ),
    "packed": Format(int4("compressed-tensors", 32), compressed("int", 4, "group", PACKED, group_size=32)),
    "packed, zeros": Format(
        int4("compressed-tensors", 32, zero=None), compressed("int", 4, "group", PACKED, group_size=32, symmetric=False)
    ),
    "packed, channel": Format(int4("compressed-tensors", 0), compressed("int", 4, "channel", PACKED)),
    "packed, order": Format(
        int4("compressed-tensors", 32, zero=None, has_order=True),
        compressed("int", 4, "group", PACKED, group_size=32, symmetric=False, actorder="group"),
    ),
    "awq": Format(int4("awq", 32, zero=None), AWQ),
    "gptq": Format(int4("gptq", 32, stored_less=1), GPTQ),
    "gptq, zeros": Format(int4("gptq", 32, zero=None, stored_less=1), GPTQ | {"sym": False}),
    "gptq, version 2": Format(
        int4("gptq", 32, zero=None), GPTQ | {"sym": False, "checkpoint_format": "gptq_v2", "lm_head": True}, has_head=True
    ),
    "gptq, order": Format(int4("gptq", 32, stored_less=1, has_order=True), GPTQ | {"desc_act": True}),
    "gptq, channel": Format(int4("gptq", 0, stored_less=1), GPTQ | {"group_size": -1}),
}


def write_quantised(
    folder: Path, form: Format, family: str = "qwen3", *, seed: int = 0, plain: tuple[str, ...] = (),
    edit: Callable[[dict[str, np.ndarray]], object] = lambda tensors: None, dtypes: dict[str, str] | None = None,
    quantization: dict[str, Any] | None = None, **overrides: Any,
) -> dict[str, np.ndarray]:  # fmt: skip
    """A folder whose products are quantised, but for those that end with one of `plain`, and its weights in float32.

    Args:
        edit: changes what is written
        dtypes: of the format, by name, where they are not those of the arrays
        quantization: replaces entries of quantization_config
    """
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, **({"vocab_size": 104} | overrides))
    tensors, values = {}, random_weights(config, seed)
    for name, value in list(values.items()):
        module = name.removesuffix(".weight")
        is_product = module.endswith(PROJECTIONS) and name != module
        if not (is_product or (form.has_head and module == "lm_head")) or module.endswith(plain or ("?",)):
            tensors[name] = value
            continue
        matrix = form.quantise(value.astype(np.float64))
        tensors |= {f"{module}.{last}": each for last, each in matrix.tensors.items()}
        values[name] = matrix.values.astype(np.float32)
    edit(tensors)
    config["quantization_config"] = form.config | (quantization or {})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(tensors, dtypes))
    write_tokenizer(folder)
    return values


def write_plain(folder: Path, values: dict[str, np.ndarray], family: str = "qwen3", **overrides: Any) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_config(family, **({"vocab_size": 104} | overrides))))
    (folder / "model.safetensors").write_bytes(safetensors_bytes(values))
    write_tokenizer(folder)
    return folder
