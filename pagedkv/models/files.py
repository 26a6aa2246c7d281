"""The files of a model's folder: JSON, and which of them hold the weights."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

LFS_POINTER = b"version https://git-lfs"  # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md
OTHERS = "pytorch_model*.bin", "consolidated*.safetensors", "*.gguf", "*.pth", "*.npz"  # formats that are not read
SHARD = re.compile(r"-of-(\d+)\.safetensors$")


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


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: the message names the file and the tensor."""


def find_weights(folder: Path) -> tuple[list[Path], dict[str, str] | None]:
    """The files with a model's weights, and which of them, by name, has a tensor (None: the only one). All are there.

    model.safetensors counts before an index, as in transformers: where both are there, the shards are older. Without
    either, a single file of another name will do, but for Mistral's own format, which has other names of tensors."""
    path, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if path.exists():
        return [path], None
    if not index.exists():
        return [_only_file(folder)], None
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"{index}: no 'weight_map'")
    for tensor, name in weight_map.items():
        if not isinstance(name, str):
            raise CheckpointError(f"{index}: tensor {tensor!r} is in {name!r}, which is no name of a file")
    names = sorted(set(weight_map.values()))
    for name in names:
        path = Path(name)
        if path.is_absolute() or ".." in path.parts or not (folder / path).is_file():
            raise CheckpointError(f"{index} names {name!r}, which is not in the folder")
    return [folder / name for name in names], weight_map


def _only_file(folder: Path) -> Path:
    paths = sorted(path for path in folder.glob("*.safetensors") if not path.name.startswith("consolidated"))
    others = [path for pattern in OTHERS for path in sorted(folder.glob(pattern))]
    shard = SHARD.search(paths[0].name) if len(paths) == 1 else None
    if len(paths) == 1 and (shard is None or int(shard[1]) == 1):
        return paths[0]
    if shard is not None:
        found = f"{paths[0].name} is one of several files, whose model.safetensors.index.json is not there"
    elif paths:
        found = "several .safetensors files but neither model.safetensors nor model.safetensors.index.json"
    elif others:
        found = f"{others[0].name} but no model.safetensors: convert it (load and save_pretrained() in transformers)"
    else:
        found = "no model.safetensors"
    raise FileNotFoundError(f"{folder}: {found}: no weights to load")
