"""The weights of a model's folder: safetensors files, of which a large model has several, and an index of them."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

import pagedkv
from pagedkv import ops
from pagedkv.ops import Communicator
from pagedkv.progress import progress_bar
from pagedkv.threads import Threads

from . import DTYPES
from .files import CheckpointError, find_weights
from .linear import TensorSource
from .lora import LoraSize
from .places import Made, Places, Rows
from .safetensors import Entry, SafetensorsFile
from .share import narrowed, whole
from .spec import Quantization
from .upload import Upload
from .weight import Part, Weight

logger = logging.getLogger(__name__)
ROTARY = "rotary_emb.inv_freq"  # what the rotary table is made from, which old files hold beside config.json
PIECE_BYTES = 16 << 20  # of a fingerprint: read by one thread at a time


class Checkpoint(TensorSource):
    """The tensors of a model's folder by name, in one dtype and on one device.

    Every tensor of the folder must be loaded: check_all_used() finds those that the model does not know. On a GPU the
    tensors are complete after finish(): the host reads the files while the GPU copies what was read before.
    """

    def __init__(
        self, folder: Path, dtype: str, device: str,
        quantization: Quantization | None = None, lora: LoraSize | None = None, comm: Communicator | None = None,
        batch_invariant: bool = False, places: Places | None = None,
    ) -> None:  # fmt: skip
        """places: learns where the tensors go, and has the memory for them."""
        self.folder, self.dtype, self.device, self.quantization = folder, dtype, device, quantization
        self.lora, self.comm, self.batch_invariant = lora, comm, batch_invariant
        self.places = places or Places(device, dtype)
        self.files = _open_files(folder)
        embedding = "model.embed_tokens.weight"
        self.has_head = embedding not in self.files or embedding in self.files[embedding].entries
        self.stamps = _stamps(self.files)
        self.used: set[str] = set()
        self._views: list[tuple[SafetensorsFile, str]] = []  # whose tensors are about to be copied
        self.dequantised = []
        self._upload = Upload(device, self.places.memory)
        self._progress = ExitStack()
        num_bytes = sum(file.num_bytes for file in set(self.files.values()))
        self._bar = self._progress.enter_context(progress_bar(num_bytes, "weights", "B", is_scaled=True))

    def close(self) -> None:
        """Waits until all that was loaded is on the device, and lets go of files of which no tensor is a view."""
        if self.dequantised:
            logger.warning(
                "%s: %d weights (%s is one) have groups in the order of activations (desc_act, actorder): they were "
                "loaded as %s, several times as large",
                self.folder,
                len(self.dequantised),
                self.dequantised[0],
                self.dtype,
            )
            self.dequantised.clear()
        self._upload.close()
        self._progress.close()
        self.files.clear()
        self._views.clear()
        # The model has those that there were.
        self.places, self._upload = Places(self.device, self.dtype), Upload(self.device)

    def fingerprint(self) -> str:
        """A digest of the weights, in hexadecimal, for which all their bytes are read. Raises CheckpointError where the
        files are no longer those that were loaded."""
        files = _open_files(self.folder)
        if _stamps(files) != self.stamps:
            raise CheckpointError(f"{self.folder}: the weights in the folder are not those that were loaded from it")
        return fingerprint(files)

    def load(self, name: str, *shape: int) -> pagedkv.Tensor:
        """The tensor, which must have this shape. It is the file's own memory where neither dtype nor device differ."""
        view = self.view(name, shape, DTYPES)
        if view.dtype == self.dtype and self.device == "cpu":
            self._views.pop()  # it stays
            loaded = view
        else:
            loaded = self._upload.copy(self._upload.empty(shape, self.dtype), view)
            self._forget_views()
        self.places.add(Rows(name, shape, loaded))
        return loaded

    def load_stacked(self, rows: Mapping[str, int], *rest: int) -> pagedkv.Tensor:
        """Several tensors, each [rows, *rest], stacked along dimension 0: one projection instead of several."""
        stacked = self._upload.empty((sum(rows.values()), *rest), self.dtype)
        start = 0
        for name, count in rows.items():
            memory = self._upload.copy(stacked[start : start + count], self.view(name, (count, *rest), DTYPES))
            self.places.add(Rows(name, (count, *rest), memory))
            start += count
        self._forget_views()
        return stacked

    def place(self, parts: Sequence[Part], num_experts: int | None = None) -> Weight:
        weight = self._upload.place(parts, num_experts)
        self._forget_views()
        self.places.add(Made(parts, num_experts, weight))
        return weight

    def _forget_views(self) -> None:
        """What was copied need not stay in memory, or all shards would."""
        for file, name in self._views:
            file.forget(name)
        self._views.clear()

    def check_all_used(self, copies: Mapping[str, str]) -> None:
        """Raises if the folder holds a tensor that was not loaded: then the model is not what the config says."""
        self.places.copies |= copies
        if self.comm is not None and self.comm.rank:
            return  # one rank checks it, or each would read what is compared
        for name, original in copies.items():
            if name in self.files and not self._is_same(name, original):
                raise self.error(name, f"is not {original!r} but config.json says tie_word_embeddings")
        extra = sorted(set(self.files) - self.used - set(copies))
        extra = [name for name in extra if not name.endswith(ROTARY) and not self._is_zero_bias(name)]
        if extra:
            more = f"and {len(extra) - 1} more are" if len(extra) > 1 else "is"
            raise self.error(extra[0], f"{more} no part of the model")

    def _is_zero_bias(self, name: str) -> bool:
        """AutoGPTQ wrote a bias for every product that it quantised, most of them of zeros."""
        return name.endswith(".bias") and not self._content(name).any()

    def has(self, name: str) -> bool:
        return name in self.files

    def view(self, name: str, shape: tuple[int, ...], dtypes: Collection[str]) -> pagedkv.Tensor:
        if name not in self.files:
            raise CheckpointError(f"{self.folder}: tensor {name!r} is missing")
        file = self.files[name]
        entry = _entry(file, name).name
        view = file.tensor(entry, dtypes)
        if view.shape == () and shape == (1,):
            view = view.view(shape)
        expected = tuple(map(whole, shape))
        if tuple(view.shape) != expected:
            raise self.error(name, f"has shape {list(view.shape)} but the config says {list(expected)}")
        self.used.add(name)
        self._views.append((file, entry))
        if self._bar is not None:
            self._bar.update(view.nbytes)
        return narrowed(view, shape)

    def _is_same(self, name: str, other: str) -> bool:
        one, two = (_entry(self.files[each], each) for each in (name, other))
        is_alike = (one.dtype, one.shape) == (two.dtype, two.shape)
        return is_alike and self._content(name).data == self._content(other).data

    def _content(self, name: str) -> np.ndarray:
        file = self.files[name]
        return file.content(_entry(file, name).name)

    def error(self, name: str, message: str) -> CheckpointError:
        return CheckpointError(f"{self.files[name].path}: tensor {name!r} {message}")


def _open_files(folder: Path) -> dict[str, SafetensorsFile]:
    """The file of every tensor name."""
    paths, weight_map = find_weights(folder)
    if weight_map is None:
        files = {name: file for file in map(SafetensorsFile, paths) for name in file.entries}
    else:
        opened = {name: SafetensorsFile(folder / name) for name in sorted(set(weight_map.values()))}
        files = {name: opened[file] for name, file in weight_map.items()}
    if "embed_tokens.weight" in files:  # a model without a head, such as Qwen3-Embedding's
        files = {f"model.{name}": file for name, file in files.items()}
    return files


def entries_of(folder: Path) -> dict[str, tuple[SafetensorsFile, str]]:
    """The file of every tensor, and its name there."""
    return {name: (file, _entry(file, name).name) for name, file in _open_files(folder).items()}


def _entry(file: SafetensorsFile, name: str) -> Entry:
    short = name.removeprefix("model.")
    return file.entry(short if name not in file.entries and short in file.entries else name)


def _stamps(files: Mapping[str, SafetensorsFile]) -> dict[Path, tuple[int, ...]]:
    return {file.path: file.stamp for file in files.values()}


def fingerprint(files: Mapping[str, SafetensorsFile]) -> str:
    """A name for a model's weights, which any change of them changes: SHA-256 over the names, dtypes, shapes and all
    bytes of the tensors, in hexadecimal. How they are spread over files does not count. A core reads 1 to 2 GB/s, and
    all cores read at once."""
    names, pieces = hashlib.sha256(), []
    for name, file in sorted(files.items(), key=lambda each: each[0]):
        entry = _entry(file, name)
        names.update(repr((name, entry.dtype, entry.shape)).encode())
        content = file.content(entry.name)
        pieces += [content[start : start + PIECE_BYTES] for start in range(0, len(content), PIECE_BYTES)]
    with Threads(ops.get_num_threads(), "pagedkv fingerprint") as threads:
        for digest in threads.map(lambda piece: hashlib.sha256(piece.data).digest(), pieces):
            names.update(digest)
    return names.hexdigest()
