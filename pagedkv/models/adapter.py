"""Reads an adapter of low rank as the library PEFT saves it: adapter_config.json and adapter_model.safetensors.

Every key of the configuration is read, must have a value with which it changes nothing, or never changes what is
computed; any other is refused by name. So is a tensor that the model has no projection for.
"""

from __future__ import annotations

import hashlib
import os
import re
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pagedkv import Tensor, ops

from .config_keys import check_keys
from .files import CheckpointError, read_json
from .safetensors import SafetensorsFile

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
READ = """
    alpha_pattern exclude_modules init_lora_weights layers_pattern layers_to_transform lora_alpha r rank_pattern
    target_modules use_rslora
"""
# How it was trained, and what library did that.
HARMLESS = """
    auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config inference_mode lora_dropout
    lora_ga_config loftq_config megatron_core peft_version qalora_group_size revision runtime_config task_type
"""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "alora_invocation_tokens": (),
    "arrow_config": (),
    "bias": ("none",),
    "fan_in_fan_out": (False,),
    "kasa_config": (),
    "layer_replication": (),
    "lora_bias": (False,),
    "megatron_config": (),
    "modules_to_save": ([],),
    "monteclora_config": (),
    "peft_type": ("LORA",),
    "target_parameters": ([],),
    "trainable_token_indices": (),
    "use_bdlora": (),
    "use_dora": (False,),
    "use_qalora": (False,),
    "velora_config": (),
}
# Other beginnings than these change the base model's weights, too.
BEGINNINGS = True, False, None, "gaussian", "eva", "mica", "orthogonal"
PREFIX = "base_model.model."
NAME = re.compile(re.escape(PREFIX) + r"(.+)\.lora_([AB])\.weight")
BASE = "model."  # what names of a model with a head have before those of its base model
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
Stamps = tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Adapter:
    """On the host. digest: of all that it adds, so of another content another one, whatever its name is."""

    digest: bytes
    matrices: Mapping[str, tuple[Tensor, Tensor]]  # by projection: A [r, in], B [out, r] with the scale

    def __reduce__(self) -> tuple[Any, ...]:
        """For another rank: tensors as their bytes."""

        def packed(matrix: Tensor) -> tuple[np.ndarray, tuple[int, ...], str]:
            return matrix.view(matrix.nbytes, "uint8").numpy(), matrix.shape, matrix.dtype

        return _unpacked, (self.digest, {name: (packed(a), packed(b)) for name, (a, b) in self.matrices.items()})


def _unpacked(digest: bytes, matrices: Mapping[str, Any]) -> Adapter:
    def tensor(content: np.ndarray, shape: tuple[int, ...], dtype: str) -> Tensor:
        return ops.from_dlpack(content).view(shape, dtype)

    return Adapter(digest, {name: (tensor(*a), tensor(*b)) for name, (a, b) in matrices.items()})


def stamps(folder: Path) -> Stamps:
    """Another one: another content. FileNotFoundError where a file is missing."""
    found = []
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            other = "adapter_model.bin"
            hint = f" ({other} is not read: save it as safetensors)" if (folder / other).exists() else ""
            raise FileNotFoundError(f"{folder}: no {name}: not the folder of an adapter{hint}")
        stat = (folder / name).stat()
        found.append((stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns))
    return tuple(found)


def read_adapter(folder: Path, shapes: Mapping[str, tuple[int, int]], max_rank: int, dtype: str) -> Adapter:
    """shapes: of the weights of the projections that adapters may have; dtype: of the matrices."""
    config = AdapterConfig(folder / CONFIG)
    file = SafetensorsFile(folder / WEIGHTS)
    # One of a base model, as of Qwen3-Embedding, has the names that these have there.
    has_base = not any(tensor.startswith(PREFIX + BASE) for tensor in file.entries)
    full = {name.removeprefix(BASE) if has_base else name: name for name in shapes}
    names = _names(file, full)
    config.check_targets(names.keys(), full.keys())
    digest, matrices = hashlib.blake2b(digest_size=32), {}
    for name, (of_a, of_b) in sorted(names.items()):
        (num_rows, in_features), rank, where = shapes[full[name]], config.rank(name), f"{file.path}: tensor"
        if rank > max_rank:
            raise ValueError(f"{config.path}: r is {rank} for {name} but max_lora_rank is {max_rank}")
        for tensor, shape in ((of_a, (rank, in_features)), (of_b, (num_rows, rank))):
            if file.entry(tensor).shape != shape:
                given = list(file.entry(tensor).shape)
                raise CheckpointError(f"{where} {tensor!r} has shape {given} but must have {list(shape)}")
        scaled = ops.asarray(file.tensor(of_b), "float32").numpy() * np.float32(config.scale(name))
        pair = ops.empty((rank, in_features), dtype).copy_(file.tensor(of_a)), ops.asarray(scaled, dtype)
        digest.update(repr((full[name], rank)).encode())
        for matrix in pair:
            digest.update(matrix.view(matrix.nbytes, "uint8").numpy().data)
        matrices[full[name]] = pair
    return Adapter(digest.digest(), matrices)


def _names(file: SafetensorsFile, known: Collection[str]) -> dict[str, tuple[str, str]]:
    """The names of A and B, by projection. Every tensor of the file is one of them."""
    found: dict[str, dict[str, str]] = {}
    for tensor in file.entries:
        match, where = NAME.fullmatch(tensor), f"{file.path}: tensor {tensor!r}"
        if match is None:
            raise NotImplementedError(f"{where} is no {PREFIX}<projection>.lora_A.weight or .lora_B.weight")
        if match[1] not in known:
            kinds = ", ".join(sorted({name.rpartition(".")[2] for name in known}))
            raise NotImplementedError(f"{where}: this model has no such projection that takes an adapter ({kinds} do)")
        found.setdefault(match[1], {})[match[2]] = tensor
    for name, pair in found.items():
        for kind in {"A", "B"} - pair.keys():
            raise CheckpointError(f"{file.path}: tensor '{PREFIX}{name}.lora_{kind}.weight' is missing")
    if not found:
        raise CheckpointError(f"{file.path}: no tensors")
    return {name: (pair["A"], pair["B"]) for name, pair in found.items()}


class AdapterConfig:
    """adapter_config.json."""

    def __init__(self, path: Path) -> None:
        self.path, self._raw = path, read_json(path)
        raw = self._raw
        try:
            check_keys(raw, READ.split(), NEUTRAL, HARMLESS.split())
            if raw.get("peft_type") is None:
                raise ValueError("peft_type is missing but must be 'LORA'")
            if raw.get("init_lora_weights") not in BEGINNINGS:
                raise NotImplementedError(
                    f"init_lora_weights is {raw['init_lora_weights']!r}, which changes the base model's weights, too"
                )
            if raw.get("layers_pattern") not in (None, [], "layers", ["layers"]):
                raise NotImplementedError(f"layers_pattern is {raw['layers_pattern']!r}; only 'layers' is supported")
            self._rank, self._ranks = _number(raw, "r", 1), _numbers(raw, "rank_pattern", 1)
            self._alpha, self._alphas = _number(raw, "lora_alpha"), _numbers(raw, "alpha_pattern")
            if not isinstance(raw.get("use_rslora", False), bool):
                raise ValueError(f"use_rslora is {raw['use_rslora']!r} but must be true or false")
            self._layers = _layers(raw.get("layers_to_transform"))
            self._targets, self._excluded = (_targets(raw, key) for key in ("target_modules", "exclude_modules"))
            if self._targets is None:
                raise ValueError("target_modules is missing")
        except NotImplementedError as error:
            raise NotImplementedError(f"{path}: {error}") from None
        except (TypeError, ValueError) as error:
            raise ValueError(f"{path}: {error}") from None

    def rank(self, name: str) -> int:
        return int(_of_pattern(self._ranks, name, self._rank))

    def scale(self, name: str) -> float:
        rank = self.rank(name)
        alpha = float(_of_pattern(self._alphas, name, self._alpha))
        return alpha / (rank**0.5 if self._raw.get("use_rslora") else rank)

    def check_targets(self, given: Any, projections: Any) -> None:
        """Raises where the file has other projections than the configuration names."""
        for name in projections:
            if self._covers(name) != (name in given):
                has, says = ("no", "names it") if name not in given else ("an", "does not name it")
                raise CheckpointError(f"{self.path.parent}: {has} adapter for {name}, but target_modules {says}")

    def _covers(self, name: str) -> bool:
        """As PEFT decides it."""
        if self._excluded is not None and _matches(self._excluded, name):
            return False
        layer = LAYER.search(name)
        is_in_layer = self._layers is None or (layer is not None and int(layer[1]) in self._layers)
        if isinstance(self._targets, tuple) and name in self._targets:  # a whole name, of whatever layer
            return True
        return is_in_layer and self._targets is not None and _matches(self._targets, name)


def _number(raw: Mapping[str, Any], key: str, least: float = 0) -> Any:
    value = raw.get(key)
    kinds = (int,) if key in ("r", "rank_pattern") else (int, float)
    if not isinstance(value, kinds) or isinstance(value, bool) or not least <= value <= sys.float_info.max:
        raise ValueError(f"{key} is {value!r} but must be {'an integer' if kinds == (int,) else 'a number'} >= {least}")
    return value


def _numbers(raw: Mapping[str, Any], key: str, least: float = 0) -> dict[re.Pattern[str], Any]:
    """By what a projection's name must end with."""
    patterns = raw.get(key) or {}
    if not isinstance(patterns, dict):
        raise ValueError(f"{key} is {patterns!r} but must map names to numbers")
    form = r"(.*\.)?({})$"
    return {_compiled(key, each, form): _number({key: value}, key, least) for each, value in patterns.items()}


def _compiled(key: str, pattern: str, form: str = "{}") -> re.Pattern[str]:
    try:
        return re.compile(form.format(pattern))
    except re.error as error:
        raise ValueError(f"{key} holds {pattern!r}, which is no pattern: {error}") from None


def _of_pattern(numbers: Mapping[re.Pattern[str], Any], name: str, default: Any) -> Any:
    return next((value for pattern, value in numbers.items() if pattern.match(name)), default)


def _layers(value: Any) -> frozenset[int] | None:
    if value is None or value == []:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(isinstance(layer, int) and not isinstance(layer, bool) for layer in layers):
        raise ValueError(f"layers_to_transform is {value!r} but must be numbers of layers")
    return frozenset(layers)


def _targets(raw: Mapping[str, Any], key: str) -> tuple[str, ...] | re.Pattern[str] | None:
    """Names or their ends; a pattern of whole names; None: nothing is said."""
    value = raw.get(key)
    if value is None or value == []:
        return None
    if isinstance(value, str):
        return _compiled(key, ".*" if value == "all-linear" and key == "target_modules" else value)
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError(f"{key} is {value!r} but must be a pattern or a list of names")
    return tuple(value)


def _matches(targets: tuple[str, ...] | re.Pattern[str], name: str) -> bool:
    if isinstance(targets, re.Pattern):
        return targets.fullmatch(name) is not None
    return any(name == each or name.endswith(f".{each}") for each in targets)


def folder_of(path: str | os.PathLike[str]) -> Path:
    folder = Path(path)
    if not folder.is_dir():
        raise FileNotFoundError(f"lora_path is {os.fspath(path)!r}, which is no folder")
    return folder
