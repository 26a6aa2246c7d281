"""Random weights, made on the device that uses them, to measure a model's speed without its files."""

from __future__ import annotations

import math
from collections.abc import Mapping, Set

import numpy as np

import pagedkv
from pagedkv import ops

from .linear import TensorSource

POOL_SIZE = 4_194_301  # a prime: neighbouring tensors, and rows of one, hold different numbers


class DummyCheckpoint(TensorSource):
    """Stands in for a Checkpoint: every tensor exists, with normal values of deviation 0.02, or 1 for norms.

    The values repeat after POOL_SIZE: drawing all those of a large model would take minutes.
    """

    def __init__(self, dtype: str, device: str) -> None:
        self.dtype, self.device = dtype, device
        values = np.random.default_rng(0).standard_normal(POOL_SIZE, np.float32) * np.float32(0.02)
        self.pool = self._upload(values)
        self.start = 0  # in the pool, of the next tensor

    def load(self, name: str, *shape: int) -> pagedkv.Tensor:
        if len(shape) == 1 and name.endswith(".weight"):  # a norm's
            return self._upload(np.ones(shape, np.float32))
        tensor = ops.empty(shape, self.dtype, self.device)
        flat, size = tensor.view(math.prod(shape)), math.prod(shape)
        done = 0
        while done < size:
            count = min(size - done, POOL_SIZE - self.start)
            flat[done : done + count].copy_(self.pool[self.start : self.start + count])
            done += count
            self.start = (self.start + count) % POOL_SIZE
        return tensor

    def load_stacked(self, rows: Mapping[str, int], *rest: int) -> pagedkv.Tensor:
        return self.load("+".join(rows), sum(rows.values()), *rest)

    def has(self, name: str) -> bool:
        return True

    def _upload(self, values: np.ndarray) -> pagedkv.Tensor:
        return ops.asarray(ops.asarray(values, self.dtype), device=self.device)  # only the CPU converts

    @staticmethod
    def fingerprint() -> str:
        """As Checkpoint.fingerprint()."""
        return "dummy"

    def finish(self) -> None:
        """As Checkpoint.finish()."""
        ops.synchronize(self.device)

    def check_all_used(self, ignored: Set[str] = frozenset()) -> None:
        """No folder, so nothing in it that the model does not know."""
