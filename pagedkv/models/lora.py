"""Adapters of low rank (LoRA, Hu et al. 2021) beside a product's weight: memory for several of them, by slots.

A token's slot says which adapter it has, -1: none. See ops.lora_add; adapter.py reads their files.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedkv import Tensor, ops

from .share import narrowed, whole


class LoraSize(NamedTuple):
    """The memory for adapters."""

    num_slots: int
    max_rank: int


class LoraPart:
    """What adapters add to one projection, whose outputs are these columns of a product.

    The memory of a slot is not initialised before an adapter is written there."""

    def __init__(
        self, name: str, first: int, num_rows: int, in_features: int, size: LoraSize, dtype: str, device: str
    ) -> None:
        self.name, self.columns = name, slice(first, first + int(num_rows))
        self._size = num_rows, in_features
        self.a = ops.empty((size.num_slots, size.max_rank, in_features), dtype, device)
        self.b = ops.empty((size.num_slots, num_rows, size.max_rank), dtype, device)

    @property
    def shape(self) -> tuple[int, int]:
        """That of the projection's weight, as files have it."""
        return whole(self._size[0]), whole(self._size[1])

    def add(self, x: Tensor, slots: Tensor, product: Tensor) -> None:
        """To the product of x and the weight. slots: int32, of each row."""
        ops.lora_add(x, self.a, self.b, slots, out=product[:, self.columns])

    def write(self, slot: int, matrices: tuple[Tensor, Tensor] | None) -> None:
        """A and B of an adapter, on the host and of this dtype; None: it has nothing for this projection."""
        shares: tuple[Tensor | None, Tensor | None] = None, None
        if matrices is not None:
            (a, b), (num_rows, in_features) = matrices, self._size
            shares = narrowed(a, (len(a), in_features)), narrowed(b, (num_rows, b.shape[1]))
        for memory, matrix in zip((self.a[slot], self.b[slot]), shares, strict=True):
            if matrix is None or matrix.shape != memory.shape:  # a lower rank
                matrix = _filled_up(matrix, memory.shape, memory.dtype)
            memory.copy_(matrix)


def _filled_up(matrix: Tensor | None, shape: tuple[int, ...], dtype: str) -> Tensor:
    """With zeros."""
    whole = ops.asarray(np.zeros(shape, np.float32), dtype)
    if matrix is not None:
        whole[: matrix.shape[0], : matrix.shape[1]].copy_(matrix)
    return whole
