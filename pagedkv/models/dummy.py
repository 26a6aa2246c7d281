"""Random weights, made on the device that uses them, to measure a model's speed without its files."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache

import numpy as np

import pagedkv
from pagedkv import ops
from pagedkv.ops import Communicator

from .linear import TensorSource
from .lora import LoraSize
from .places import Made, Places, Rows
from .spec import Quantization
from .upload import Upload
from .weight import Part, Weight

POOL_SIZE = 4_194_301  # a prime: neighbouring tensors, and rows of one, hold different numbers
DEVIATION, QUANTISED = 0.02, 4.6  # of the values; of those that are quantised, in units of their scale: all of int4


class DummyCheckpoint(TensorSource):
    """Stands in for a Checkpoint: every tensor exists, with normal values of deviation 0.02, or 1 for norms.

    The values repeat after POOL_SIZE: drawing all those of a large model would take minutes.
    """

    def __init__(
        self, dtype: str, device: str,
        quantization: Quantization | None = None, lora: LoraSize | None = None, comm: Communicator | None = None,
        batch_invariant: bool = False, places: Places | None = None,
    ) -> None:  # fmt: skip
        """places: as Checkpoint's."""
        self.places = places or Places(device, dtype)
        self.dtype, self.device, self.quantization, self.lora, self.comm = dtype, device, quantization, lora, comm
        self.batch_invariant = batch_invariant
        self.normal = np.random.default_rng(0).standard_normal(POOL_SIZE, np.float32)
        self.pool = ops.asarray(self._of(self.normal * np.float32(DEVIATION)), device=device)
        self.upload = Upload(device, self.places.memory)
        self.dequantised = []
        self.start = 0  # in the pool, of the next tensor
        self.view_of = lru_cache(maxsize=4)(self._view_of)  # experts have hundreds that are alike

    def load(self, name: str, *shape: int) -> pagedkv.Tensor:
        tensor = self._drawn(name, shape)
        self.places.add(Rows(name, shape, tensor))
        return tensor

    def _drawn(self, name: str, shape: Sequence[int]) -> pagedkv.Tensor:
        tensor = self.upload.empty(shape, self.dtype)
        if len(shape) == 1 and name.endswith(".weight"):  # a norm's
            return self.upload.copy(tensor, self._of(np.ones(shape, np.float32)))
        flat, size = tensor.view(math.prod(shape)), math.prod(shape)
        done = 0
        while done < size:
            count = min(size - done, POOL_SIZE - self.start)
            flat[done : done + count].copy_(self.pool[self.start : self.start + count])
            done += count
            self.start = (self.start + count) % POOL_SIZE
        return tensor

    def load_stacked(self, rows: Mapping[str, int], *rest: int) -> pagedkv.Tensor:
        stacked, start = self._drawn("+".join(rows), (sum(rows.values()), *rest)), 0
        for name, count in rows.items():
            self.places.add(Rows(name, (count, *rest), stacked[start : start + count]))
            start += count
        return stacked

    def has(self, name: str) -> bool:
        return False

    def view(self, name: str, shape: tuple[int, ...], dtypes: Collection[str]) -> pagedkv.Tensor:
        """Of one of the dtypes. What is float is a scale, unless it is called weight."""
        if name.endswith("g_idx"):
            return ops.from_dlpack(np.full(shape, -1, np.int32))  # of groups that are neighbours: see gptq.groups_of
        dtype = self.dtype if self.dtype in dtypes else next(iter(dtypes))
        return self.view_of(shape, dtype, name.endswith(".weight"))

    def _view_of(self, shape: tuple[int, ...], dtype: str, is_weight: bool) -> pagedkv.Tensor:
        if dtype in ("int32", "uint8"):
            bits = np.random.default_rng(0).integers(-(2**31), 2**31, shape, np.int32)
            return ops.from_dlpack(bits if dtype == "int32" else bits.astype(np.uint8))
        if dtype == "float8_e4m3fn":
            return ops.asarray(np.resize(self.normal, shape) * np.float32(QUANTISED), dtype)
        values = np.resize(self.normal, shape) if is_weight else np.full(shape, 1 / QUANTISED, np.float32)
        return ops.asarray(values * np.float32(DEVIATION), dtype)

    def error(self, name: str, message: str) -> Exception:
        return ValueError(f"a dummy: tensor {name!r} {message}")

    def place(self, parts: Sequence[Part], num_experts: int | None = None) -> Weight:
        weight = self.upload.place(parts, num_experts)
        self.places.add(Made(parts, num_experts, weight))
        return weight

    def _of(self, values: np.ndarray) -> pagedkv.Tensor:
        return ops.asarray(values, self.dtype)  # here, because only the CPU converts

    @staticmethod
    def fingerprint() -> str:
        """As Checkpoint.fingerprint()."""
        return "dummy"

    def close(self) -> None:
        """As Checkpoint.close()."""
        self.upload.close()
        # The model has those that there were.
        self.places, self.upload = Places(self.device, self.dtype), Upload(self.device)

    def check_all_used(self, copies: Mapping[str, str]) -> None:
        """No folder, so nothing in it that the model does not know."""
        self.places.copies |= copies
