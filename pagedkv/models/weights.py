"""Checkpoints in safetensors files, which are mapped into memory. Tensors are views of it, without a copy.

The format (https://huggingface.co/docs/safetensors): 8 bytes, the little-endian length of a JSON header; the header,
which maps a tensor's name to its dtype, shape and [begin, end) offsets; then the data, to which the offsets are
relative and which they cover without a gap. A large model has several such files, and an index of names and files.
"""

from __future__ import annotations

import hashlib
import json
import math
import mmap
import os
from collections.abc import Mapping, Set
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pagedkv
from pagedkv import Event, ops

from . import ITEM_BYTES
from .files import CheckpointError, find_weights, refuse_pointer
from .linear import TensorSource

DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
# Every dtype of the format, supported or not: the tensors must fill their file.
ITEM_BITS = (
    {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
    | dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
    | dict.fromkeys(("I16", "U16", "F16", "BF16"), 16)
    | dict.fromkeys(("I32", "U32", "F32"), 32)
    | dict.fromkeys(("I64", "U64", "F64", "C64"), 64)
)
MAX_HEADER_BYTES = 100_000_000
STAGING_BYTES = 32 << 20
ROTARY = "rotary_emb.inv_freq"  # what the rotary table is made from, which old files hold beside config.json
PIECE_BYTES = 16 << 20  # of a fingerprint: read by one thread at a time


class Entry(NamedTuple):
    """What the header says of a tensor. Offsets are relative to the end of the header."""

    begin: int
    end: int
    name: str
    dtype: str
    shape: tuple[int, ...]


class SafetensorsFile:
    """One mapped file. Its tensors are read-only and keep the mapping alive; there is nothing to close.

    A file that breaks a rule of the format is refused as a whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_pointer(path)
        try:
            with open(path, "rb") as file:
                stat = os.fstat(file.fileno())
                self.stamp = stat.st_ino, stat.st_size, stat.st_mtime_ns  # another one: another content
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:  # mmap refuses an empty file
            raise CheckpointError(f"{path}: empty file") from None
        self.bytes = np.frombuffer(data, np.uint8)
        header, self.data_start = self._read_header()
        self.entries = {name: self._read_entry(name, entry) for name, entry in header.items()}
        self._check_layout()

    def _read_header(self) -> tuple[dict[str, Any], int]:
        num_bytes = len(self.bytes)
        length = int.from_bytes(self.bytes[:8].tobytes(), "little")
        if num_bytes < 8 or 8 + length > num_bytes:
            raise CheckpointError(f"{self.path}: truncated, or no safetensors file ({num_bytes} bytes)")
        if length > MAX_HEADER_BYTES:
            raise CheckpointError(f"{self.path}: the header has {length} bytes but may have {MAX_HEADER_BYTES}")
        try:
            header = read_strict_json(self.bytes[8 : 8 + length].tobytes().decode())
        except (ValueError, RecursionError) as error:  # JSON or UTF-8
            raise CheckpointError(f"{self.path}: the header is no JSON ({error})") from None
        if not isinstance(header, dict) or self.bytes[8] != ord("{"):
            raise CheckpointError(f"{self.path}: the header is no JSON object")
        metadata = header.pop("__metadata__", None)
        is_map = isinstance(metadata, dict) and all(isinstance(value, str) for value in metadata.values())
        if metadata is not None and not is_map:
            raise CheckpointError(f"{self.path}: __metadata__ must map names to texts, not {metadata!r}")
        self.metadata: dict[str, str] = metadata or {}
        return header, 8 + length

    def _read_entry(self, name: str, entry: Any) -> Entry:
        where = f"{self.path}: tensor {name!r}"
        try:
            dtype, shape, (begin, end) = entry["dtype"], entry["shape"], entry["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise CheckpointError(f"{where}: bad header entry {entry!r}") from None
        is_good = isinstance(dtype, str) and isinstance(shape, list) and isinstance(entry["data_offsets"], list)
        if not is_good or not all(type(n) is int for n in (*shape, begin, end)):  # read_strict_json: in 0..2**64-1
            raise CheckpointError(f"{where}: bad header entry {entry!r}")
        if dtype not in ITEM_BITS:
            raise CheckpointError(f"{where}: the format has no dtype {dtype!r}")
        sizes = [*accumulate(shape, mul, initial=1)]  # a product that overflows on its way to 0 is refused, too
        num_bits = sizes[-1] * ITEM_BITS[dtype]
        if 8 * (end - begin) != num_bits or max(sizes) >= 2**64:
            raise CheckpointError(f"{where}: offsets {begin}..{end} do not fit {dtype} {shape}")
        return Entry(begin, end, name, dtype, tuple(shape))

    def _check_layout(self) -> None:
        """The tensors must cover the data exactly: each begins where the one before ends, the last ends the file."""
        end, before = 0, ""
        for entry in sorted(self.entries.values()):
            if entry.begin < end:
                raise CheckpointError(f"{self.path}: tensors {before!r} and {entry.name!r} share byte {entry.begin}")
            if entry.begin > end:
                raise CheckpointError(
                    f"{self.path}: bytes {end}..{entry.begin} of the data, before tensor {entry.name!r}, "
                    "are no tensor's"
                )
            end, before = entry.end, entry.name
        num_bytes = len(self.bytes) - self.data_start
        if end > num_bytes:
            raise CheckpointError(
                f"{self.path}: tensor {before!r} ends at byte {self.data_start + end} "
                f"but the file is truncated at {len(self.bytes)}"
            )
        if end < num_bytes:
            raise CheckpointError(
                f"{self.path}: bytes {end}..{num_bytes} of the data, after the last tensor, are no tensor's"
            )

    def entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        return self.entries[name]

    def content(self, name: str) -> np.ndarray:
        """The bytes of one tensor, uint8 [n]."""
        entry = self.entry(name)
        return self.bytes[self.data_start + entry.begin : self.data_start + entry.end]

    def tensor(self, name: str) -> pagedkv.Tensor:
        """A view of one tensor in the dtype that the file has."""
        entry, data = self.entry(name), self.content(name)
        if entry.dtype not in DTYPES:
            where = f"{self.path}: tensor {name!r}"
            raise NotImplementedError(f"{where} has dtype {entry.dtype}; supported are {', '.join(DTYPES)}")
        dtype = DTYPES[entry.dtype]
        # Unaligned data is allowed by the format, rare, and slow or wrong to compute on.
        if (self.data_start + entry.begin) % ITEM_BYTES[dtype]:
            data = data.copy()
        return ops.from_dlpack(data).view(entry.shape, dtype)


def read_strict_json(text: str) -> Any:
    """JSON as the format's reference reads it: no NaN, no name twice; integers outside of 0..2**64-1 are floats."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        names = dict(pairs)
        if len(names) < len(pairs):
            raise ValueError("a name is there twice")
        return names

    def finite(number: str) -> float:
        if not math.isfinite(float(number)):
            raise ValueError(f"{number} is no number")
        return float(number)

    def unsigned(number: str) -> float:
        return finite(number) if number.startswith("-") or int(number) >= 2**64 else int(number)

    return json.loads(text, object_pairs_hook=unique, parse_constant=finite, parse_float=finite, parse_int=unsigned)


class Checkpoint(TensorSource):
    """The tensors of a model's folder by name, in one dtype and on one device.

    Every tensor of the folder must be loaded: check_all_used() finds those that the model does not know. On a GPU the
    tensors are complete after finish(): the host reads the file while the GPU copies what was read before.
    """

    def __init__(self, folder: Path, dtype: str, device: str) -> None:
        self.folder, self.dtype, self.device = folder, dtype, device
        self.files = _open_files(folder)
        self.stamps = _stamps(self.files)
        self.used: set[str] = set()
        self._staging: list[tuple[pagedkv.Tensor, Event]] = []

    def finish(self) -> None:
        """Waits until all that was loaded is on the device, and lets go of files of which no tensor is a view."""
        ops.synchronize(self.device)
        self._staging.clear()
        self.files.clear()

    def fingerprint(self) -> str:
        """A digest of the weights, in hexadecimal, for which all their bytes are read. Raises CheckpointError where the
        files are no longer those that were loaded."""
        files = _open_files(self.folder)
        if _stamps(files) != self.stamps:
            raise CheckpointError(f"{self.folder}: the weights in the folder are not those that were loaded from it")
        return fingerprint(files)

    def load(self, name: str, *shape: int) -> pagedkv.Tensor:
        """The tensor, which must have this shape. It is the file's own memory where neither dtype nor device differ."""
        view = self._view(name, shape)
        if view.dtype == self.dtype and self.device == "cpu":
            return view
        return self._fill(ops.empty(shape, self.dtype, self.device), view)

    def load_stacked(self, rows: Mapping[str, int], *rest: int) -> pagedkv.Tensor:
        """Several tensors, each [rows, *rest], stacked along dimension 0: one projection instead of several."""
        stacked = ops.empty((sum(rows.values()), *rest), self.dtype, self.device)
        start = 0
        for name, count in rows.items():
            self._fill(stacked[start : start + count], self._view(name, (count, *rest)))
            start += count
        return stacked

    def has(self, name: str) -> bool:
        return name in self.files

    def check_all_used(self, ignored: Set[str] = frozenset()) -> None:
        """Raises if the folder holds a tensor that was not loaded: then the model is not what the config says."""
        extra = sorted(set(self.files) - self.used - ignored)
        extra = [name for name in extra if not name.endswith(ROTARY)]
        if extra:
            more = f" and {len(extra) - 1} more" if len(extra) > 1 else ""
            raise CheckpointError(f"{self.files[extra[0]].path}: tensor {extra[0]!r}{more} is no part of the model")

    def _view(self, name: str, shape: tuple[int, ...]) -> pagedkv.Tensor:
        if name not in self.files:
            raise CheckpointError(f"{self.folder}: tensor {name!r} is missing")
        file = self.files[name]
        view = file.tensor(name if name in file.entries else name.removeprefix("model."))
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
                (ops.empty(STAGING_BYTES, "uint8", pinned=True), Event(device=self.device)) for _ in range(2)
            ]
        there, here = target.view(-1), view.view(-1)
        count = STAGING_BYTES // ITEM_BYTES[self.dtype]
        for start in range(0, len(here), count):
            piece = here[start : start + count]
            memory, event = self._staging[0]
            event.synchronize()  # the copy before the last one is done
            staged = memory.view(-1, self.dtype)[: len(piece)].copy_(piece)
            there[start : start + len(piece)].copy_(staged)
            event.record()
            self._staging.reverse()
        return target


def _open_files(folder: Path) -> dict[str, SafetensorsFile]:
    """The file of every tensor name."""
    paths, weight_map = find_weights(folder)
    opened = {path.name: SafetensorsFile(path) for path in paths}
    if weight_map is None:
        files = {name: file for file in opened.values() for name in file.entries}
    else:
        files = {name: opened[file] for name, file in weight_map.items()}
    if "embed_tokens.weight" in files:  # a model without a head, such as Qwen3-Embedding's
        files = {f"model.{name}": file for name, file in files.items()}
    return files


def _stamps(files: Mapping[str, SafetensorsFile]) -> dict[Path, tuple[int, ...]]:
    return {file.path: file.stamp for file in files.values()}


def fingerprint(files: Mapping[str, SafetensorsFile]) -> str:
    """A name for a model's weights, which any change of them changes: SHA-256 over the names, dtypes, shapes and all
    bytes of the tensors, in hexadecimal. How they are spread over files does not count. A core reads 1 to 2 GB/s, and
    all cores read at once."""
    names, pieces = hashlib.sha256(), []
    for name, file in sorted(files.items(), key=lambda each: each[0]):
        entry = file.entries.get(name) or file.entries[name.removeprefix("model.")]
        names.update(repr((name, entry.dtype, entry.shape)).encode())
        content = file.content(entry.name)
        pieces += [content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES)]
    with ThreadPoolExecutor() as pool:
        for digest in pool.map(lambda piece: hashlib.sha256(piece).digest(), pieces):
            names.update(digest)
    return names.hexdigest()
