"""A name for a model's weights, which any change of them changes: what a saved cache belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .weights import SafetensorsFile

PIECE_BYTES = 16 << 20  # read by one thread at a time


def fingerprint(files: Mapping[str, SafetensorsFile]) -> str:
    """SHA-256 over the names, dtypes, shapes and all bytes of the tensors, in hexadecimal. How they are spread over
    files does not count. A core reads 1 to 2 GB/s, and all cores read at once."""
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
