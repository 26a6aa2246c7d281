"""Safetensors files, which are mapped into memory. Tensors are views of it, without a copy.

The format (https://huggingface.co/docs/safetensors): 8 bytes, the little-endian length of a JSON header; the header,
which maps a tensor's name to its dtype, shape and [begin, end) offsets; then the data, to which the offsets are
relative and which they cover without a gap.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Collection
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import pagedkv
from pagedkv import ops

from . import DTYPES
from .files import CheckpointError, refuse_pointer

# Those that can be viewed, by their names in the format.
VIEWED = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "U8": "uint8", "I32": "int32",
    "I64": "int64",
}  # fmt: skip
FORMAT_NAMES = {ours: name for name, ours in VIEWED.items()}
# Every dtype of the format, supported or not: the tensors must fill their file.
ITEM_BITS = (
    {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
    | dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8)
    | dict.fromkeys(("I16", "U16", "F16", "BF16"), 16)
    | dict.fromkeys(("I32", "U32", "F32"), 32)
    | dict.fromkeys(("I64", "U64", "F64", "C64"), 64)
)
MAX_HEADER_BYTES = 100_000_000


class Entry(NamedTuple):
    """What the header says of a tensor. Offsets are relative to the end of the header."""

    begin: int
    end: int
    name: str
    dtype: str
    shape: tuple[int, ...]


class SafetensorsFile:
    """One mapped file. Its tensors are read-only and keep the mapping alive; there is nothing to close.

    The memory is not: see places.writable(). Pages that are written become this process's own, and the file stays as it
    is.

    A file that breaks a rule of the format is refused as a whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        refuse_pointer(path)
        try:
            with open(path, "rb") as file:
                stat = os.fstat(file.fileno())
                self.stamp = stat.st_ino, stat.st_size, stat.st_mtime_ns  # another one: another content
                self.mapping = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except ValueError:  # mmap refuses an empty file
            raise CheckpointError(f"{path}: empty file") from None
        self.bytes = np.frombuffer(self.mapping, np.uint8)
        self.bytes.flags.writeable = False
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
        if end > self.num_bytes:
            raise CheckpointError(
                f"{self.path}: tensor {before!r} ends at byte {self.data_start + end} "
                f"but the file is truncated at {len(self.bytes)}"
            )
        if end < self.num_bytes:
            raise CheckpointError(
                f"{self.path}: bytes {end}..{self.num_bytes} of the data, after the last tensor, are no tensor's"
            )

    @property
    def num_bytes(self) -> int:
        """Of all tensors."""
        return len(self.bytes) - self.data_start

    def entry(self, name: str) -> Entry:
        if name not in self.entries:
            raise CheckpointError(f"{self.path}: tensor {name!r} is missing")
        return self.entries[name]

    def content(self, name: str) -> np.ndarray:
        """The bytes of one tensor, uint8 [n]."""
        entry = self.entry(name)
        return self.bytes[self.data_start + entry.begin : self.data_start + entry.end]

    def tensor(self, name: str, dtypes: Collection[str] = DTYPES) -> pagedkv.Tensor:
        """A view of one tensor in the dtype that the file has, which must be one of these."""
        entry, data = self.entry(name), self.content(name)
        dtype = VIEWED.get(entry.dtype, entry.dtype)
        if dtype not in dtypes:
            where, names = f"{self.path}: tensor {name!r}", ", ".join(FORMAT_NAMES[each] for each in dtypes)
            raise NotImplementedError(f"{where} has dtype {entry.dtype}; supported are {names}")
        # Unaligned data is allowed by the format, rare, and slow or wrong to compute on.
        if (self.data_start + entry.begin) % (ITEM_BITS[entry.dtype] // 8):
            data = data.copy()
        return ops.from_dlpack(data).view(entry.shape, dtype)

    def forget(self, name: str) -> None:
        """The pages of a tensor are no memory of this process any more, until it reads them again."""
        entry = self.entry(name)
        begin = -(-(self.data_start + entry.begin) // mmap.PAGESIZE) * mmap.PAGESIZE
        size = self.data_start + entry.end - begin
        if size > 0:
            self.mapping.madvise(mmap.MADV_DONTNEED, begin, size // mmap.PAGESIZE * mmap.PAGESIZE)


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
