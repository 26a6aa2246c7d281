"""Checkpoints in safetensors files: mapped into memory, handed out as zero-copy views.

The format (https://huggingface.co/docs/safetensors): 8 bytes, the little-endian length of a JSON header; the header,
which maps a tensor's name to its dtype, shape and [begin, end) offsets; then the data, to which the offsets are
relative. A large model is several such files and an index that maps names to files.
"""

from __future__ import annotations

import json
import math
import mmap
from collections.abc import Set
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np

import pagedkv
from pagedkv import Event

from .config import read_json

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
ITEM_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1}
STAGING_BYTES = 32 << 20


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded: the message names the file and the tensor."""


class SafetensorsFile:
    """One mapped file. Its tensors are read-only and keep the mapping alive; there is nothing to close."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # mmap refuses an empty file
            raise CheckpointError(f"{path}: empty file") from None
        self.bytes = np.frombuffer(data, np.uint8)
        self.header, self.data_start = self._read_header()
        self._check_overlaps()

    def _read_header(self) -> tuple[dict[str, Any], int]:
        num_bytes = len(self.bytes)
        length = int.from_bytes(self.bytes[:8].tobytes(), "little")
        if num_bytes < 8 or 8 + length > num_bytes:
            raise CheckpointError(f"{self.path}: truncated, or no safetensors file ({num_bytes} bytes)")
        try:
            header = json.loads(self.bytes[8 : 8 + length].tobytes())
        except (ValueError, RecursionError) as error:  # JSON or UTF-8
            raise CheckpointError(f"{self.path}: the header is no JSON ({error})") from None
        if not isinstance(header, dict):
            raise CheckpointError(f"{self.path}: the header is no JSON object")
        header.pop("__metadata__", None)
        return header, 8 + length

    def _check_overlaps(self) -> None:
        """An entry that is damaged otherwise is told of when it is asked for."""
        places = []
        for name, entry in self.header.items():
            offsets = entry.get("data_offsets") if isinstance(entry, dict) else None
            if isinstance(offsets, list) and len(offsets) == 2 and all(isinstance(n, int) for n in offsets):
                places += [(*offsets, name)] if offsets[0] < offsets[1] else []
        for (_, end, first), (begin, _, second) in pairwise(sorted(places)):
            if begin < end:
                raise CheckpointError(f"{self.path}: tensors {first!r} and {second!r} share byte {begin}")

    def tensor(self, name: str) -> pagedkv.Tensor:
        """A view of one tensor in the dtype that the file has."""
        where = f"{self.path}: tensor {name!r}"
        if name not in self.header:
            raise CheckpointError(f"{where} is missing")
        entry = self.header[name]
        try:
            file_dtype, shape, (begin, end) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{where}: bad header entry {entry!r}") from None
        if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
            raise CheckpointError(f"{where}: bad header entry {entry!r}")
        if not isinstance(file_dtype, str):
            raise CheckpointError(f"{where}: bad header entry {entry!r}")
        if file_dtype not in DTYPES:
            raise NotImplementedError(f"{where} has dtype {file_dtype}; supported are {', '.join(DTYPES)}")
        dtype = DTYPES[file_dtype]
        num_bytes = math.prod(shape) * ITEM_BYTES[dtype]
        if end - begin != num_bytes:
            raise CheckpointError(f"{where}: offsets {begin}..{end} do not fit {file_dtype} {list(shape)}")
        if self.data_start + end > len(self.bytes):
            raise CheckpointError(
                f"{where} ends at byte {self.data_start + end} but the file is truncated at {len(self.bytes)}"
            )
        data = self.bytes[self.data_start + begin : self.data_start + end]
        if (self.data_start + begin) % ITEM_BYTES[dtype]:  # allowed, rare, and slow or wrong to compute on
            data = data.copy()
        return pagedkv.from_dlpack(data).view(shape, dtype)


class Checkpoint:
    """The tensors of a model's folder by name, in one dtype on one device.

    Every tensor of the folder must be asked for: check_all_used() finds what the model does not know. On a GPU the
    tensors are there after finish(): the host goes through the file while the GPU copies what was read before.
    """

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        self.folder, self.dtype, self.device = folder, dtype, device
        self.files = _open_files(folder)
        self.used: set[str] = set()
        self._staging: list[tuple[pagedkv.Tensor, Event]] = []

    def finish(self) -> None:
        """Waits until all that was loaded is on the device."""
        pagedkv.synchronize(self.device)
        self._staging.clear()

    def load(self, name: str, *shape: int) -> pagedkv.Tensor:
        """The tensor, which must have this shape: the file's own memory where nothing must change."""
        view = self._view(name, shape)
        if view.dtype == self.dtype and self.device == "cpu":
            return view
        return self._fill(pagedkv.empty(shape, self.dtype, self.device), view)

    def load_stacked(self, rows: dict[str, int], *rest: int) -> pagedkv.Tensor:
        """Several tensors, each [rows, *rest], as one along dimension 0: one projection instead of several."""
        stacked = pagedkv.empty((sum(rows.values()), *rest), self.dtype, self.device)
        start = 0
        for name, count in rows.items():
            self._fill(stacked[start : start + count], self._view(name, (count, *rest)))
            start += count
        return stacked

    def check_all_used(self, ignored: Set[str] = frozenset()) -> None:
        """Raises where the folder holds a tensor that was not asked for: the model is not what the config says."""
        extra = sorted(set(self.files) - self.used - ignored)
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise CheckpointError(f"{self.files[extra[0]].path}: tensor {extra[0]!r}{more} is no part of the model")

    def _view(self, name: str, shape: tuple[int, ...]) -> pagedkv.Tensor:
        if name not in self.files:
            raise CheckpointError(f"{self.folder}: tensor {name!r} is missing")
        file = self.files[name]
        view = file.tensor(name)
        if tuple(view.shape) != shape:
            raise CheckpointError(
                f"{file.path}: tensor {name!r} has shape {list(view.shape)} but the config says {list(shape)}"
            )
        self.used.add(name)
        return view

    def _fill(self, target: pagedkv.Tensor, view: pagedkv.Tensor) -> pagedkv.Tensor:
        if self.device == "cpu":
            return target.copy_(view)
        if not self._staging:
            self._staging = [
                (pagedkv.empty(STAGING_BYTES, "uint8", pinned=True), Event(device=self.device)) for _ in range(2)
            ]
        there, here = target.view(-1), view.view(-1)
        count = STAGING_BYTES // ITEM_BYTES[self.dtype]
        for start in range(0, len(here), count):
            piece = here[start : start + count]
            memory, event = self._staging[0]
            event.synchronize()  # the copy before the last is done
            staged = memory.view(-1, self.dtype)[: len(piece)].copy_(piece)
            there[start : start + len(piece)].copy_(staged)
            event.record()
            self._staging.reverse()
        return target


def _open_files(folder: Path) -> dict[str, SafetensorsFile]:
    """The file of every tensor name."""
    index = folder / "model.safetensors.index.json"
    if index.exists():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"{index}: no 'weight_map'")
        opened = {}
        for file in sorted(set(weight_map.values())):
            if not (folder / file).is_file():
                raise CheckpointError(f"{index} names {file!r}, which is not in the folder")
            opened[file] = SafetensorsFile(folder / file)
        return {name: opened[file] for name, file in weight_map.items()}
    paths = [folder / "model.safetensors"]
    if not paths[0].exists():
        paths = sorted(folder.glob("*.safetensors"))
    if len(paths) != 1:
        found = "several .safetensors files but no model.safetensors.index.json" if paths else "no model.safetensors"
        raise FileNotFoundError(f"{folder}: {found}: no weights to load")
    file = SafetensorsFile(paths[0])
    return dict.fromkeys(file.header, file)
