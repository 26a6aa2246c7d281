"""Saves the prefix cache in a file, and loads it after a restart.

The file is a safetensors file (https://huggingface.co/docs/safetensors) of these tensors, for n pages of the pool. A
page comes after its parent, the page before it in its prefix:

    parents    I32 [n]: the index of the parent in this order, or -1 for the first page of a prompt
    salts      I32 [n]: the index of the salt that it is cached under
    tokens     I32 [n, block_size]
    kv         U8 [n, caches, bytes of a page in one cache]: keys, then values, of every layer

Its metadata names the model, the dtypes and the layout, lists the salts, and holds a digest of all tensors. A file that
does not fit, or is damaged anywhere, is refused as a whole.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import hashlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from pagedkv import BlockManager
from pagedkv.models.files import CheckpointError
from pagedkv.models.safetensors import SafetensorsFile

from .pool import KVCaches

FORMAT = "pagedkv cache 1"
PIECE_BYTES = 64 << 20  # of KV, which are in host memory at a time


def save(path: str | os.PathLike[str], identity: dict[str, str], manager: BlockManager, caches: KVCaches) -> int:
    """Writes all computed pages in the prefix index; returns how many. The file is written as a whole or, after an
    error or a kill, is what it was before."""
    pages, parents, indices, salts, tokens = manager.export_cache()
    size = caches.page_bytes // caches.num_caches
    shapes = {
        "parents": ("I32", [len(pages)]),
        "salts": ("I32", [len(pages)]),
        "tokens": ("I32", [len(pages), manager.block_size]),
        "kv": ("U8", [len(pages), caches.num_caches, size]),
    }
    metadata = identity | {"format": FORMAT, "salts": json.dumps([salt.hex() for salt in salts])}

    def pieces() -> Iterator[bytes]:
        for array in (parents, indices, tokens):
            yield np.ascontiguousarray(array, "<i4").tobytes()
        for contents in caches.read(pages, max(PIECE_BYTES // caches.page_bytes, 1)):
            yield np.stack(contents, axis=1).tobytes()

    _write_whole(Path(path), lambda file: _write(file, shapes, metadata, pieces()))
    return len(pages)


def open_saved(path: str | os.PathLike[str], identity: Callable[[], dict[str, str]]) -> SafetensorsFile:
    """What save() wrote, for load(). FileNotFoundError; ValueError where the file is damaged, or of another model,
    dtype or layout."""
    file = SafetensorsFile(Path(path))
    if file.metadata.get("format") != FORMAT:
        raise CheckpointError(f"{file.path}: no saved cache ({FORMAT!r})")
    for name, value in identity().items():
        if file.metadata.get(name) != value:
            raise CheckpointError(f"{file.path}: {name} is {file.metadata.get(name)!r} but this engine's is {value!r}")
    _check_digest(file)
    return file


def load(file: SafetensorsFile, manager: BlockManager, caches: KVCaches) -> int:
    """Puts the pages of a file into the pool and the prefix cache; returns how many were new and had room."""
    parents, indices, tokens = (
        file.content(name).view("<i4").astype(np.int32) for name in ("parents", "salts", "tokens")
    )
    given, shape = file.entry("kv").shape, (len(parents), caches.num_caches, caches.page_bytes // caches.num_caches)
    if given != shape:
        raise CheckpointError(f"{file.path}: damaged: kv has shape {list(given)} but must have {list(shape)}")
    kv = file.content("kv").reshape(shape)
    salts = _salts(file)
    pages = manager.import_cache(parents, indices, salts, tokens)
    (taken,) = np.nonzero(pages >= 0)
    at_once = max(PIECE_BYTES // caches.page_bytes, 1)
    try:
        for start in range(0, len(taken), at_once):
            some = taken[start : start + at_once]
            caches.write(pages[some], list(kv[some].swapaxes(0, 1)))
    except BaseException:
        manager.reset_prefix_cache()  # pages without their KV must not be found
        raise
    return len(taken)


def _digest_of_header(metadata: dict[str, str], shapes: dict[str, tuple[str, list[int]]]) -> hashlib.blake2b:
    """The digest of what precedes the data; update it with the data."""
    return hashlib.blake2b(json.dumps([metadata, shapes], sort_keys=True).encode(), digest_size=32)


# --- writing


def _write_whole(path: Path, write: Callable[[int], None]) -> None:
    """Writes under another name first, which is locked as long as it exists, and is removed if anything fails."""
    _remove_leftovers(path)
    scratch = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(scratch, os.O_WRONLY | os.O_CREAT, 0o600)  # prompts are in it
    try:
        if _lock(descriptor) is False:
            raise BlockingIOError(f"{path}: another thread saves a cache there now")
        try:
            os.ftruncate(descriptor, 0)
            write(descriptor)
            os.fsync(descriptor)
            os.replace(scratch, path)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(scratch)
            raise
    finally:
        os.close(descriptor)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the new name must be on the disk, too
    finally:
        os.close(folder)


def _remove_leftovers(path: Path) -> None:
    """Removes what killed processes have left for this path: files that nobody has locked."""
    for each in path.parent.glob(f".{glob.escape(path.name)}.*"):
        if not each.name.removeprefix(f".{path.name}.").isdecimal():
            continue
        with contextlib.suppress(FileNotFoundError, PermissionError):  # gone meanwhile, or somebody else's
            descriptor = os.open(each, os.O_WRONLY)
            try:
                if _lock(descriptor):
                    os.unlink(each)
            finally:
                os.close(descriptor)


def _lock(descriptor: int) -> bool | None:
    """Whether it got the lock, which ends with the descriptor, and so with the process. None: this file system has no
    locks, and leftover files stay."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def _write(
    file: int, shapes: dict[str, tuple[str, list[int]]], metadata: dict[str, str], pieces: Iterator[bytes]
) -> None:
    header, end = {}, 0
    for name, (dtype, shape) in shapes.items():
        begin, end = end, end + int(np.prod(shape, dtype=np.int64)) * (4 if dtype == "I32" else 1)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    digest = _digest_of_header(metadata, shapes)

    def encoded() -> bytes:
        text = json.dumps({"__metadata__": metadata | {"digest": digest.hexdigest()}} | header).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    _write_all(file, encoded())  # the digest is not known yet: this one has its length
    for piece in pieces:
        digest.update(piece)
        _write_all(file, piece)
    os.lseek(file, 0, os.SEEK_SET)
    _write_all(file, encoded())


def _write_all(file: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(file, view) :]


# --- reading


def _check_digest(file: SafetensorsFile) -> None:
    metadata = {name: value for name, value in file.metadata.items() if name != "digest"}
    digest = _digest_of_header(metadata, {name: (each.dtype, list(each.shape)) for name, each in file.entries.items()})
    digest.update(file.bytes[file.data_start :].data)
    if digest.hexdigest() != file.metadata.get("digest"):
        raise CheckpointError(f"{file.path}: damaged: its content is not what was saved")


def _salts(file: SafetensorsFile) -> list[bytes]:
    try:
        return [bytes.fromhex(salt) for salt in json.loads(file.metadata["salts"])]
    except (KeyError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"{file.path}: damaged: its salts are no list of hexadecimal strings") from error
