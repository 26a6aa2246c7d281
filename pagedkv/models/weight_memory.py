"""The memory of a model's weights on its device: a range of addresses, as the pool's. So it can be given back while
graphs stay that read it, and be taken again at the same place."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from functools import cached_property

from pagedkv import Tensor, ops
from pagedkv.ops import ElasticBuffer

from . import ITEM_BYTES

ALIGNMENT = 256  # bytes


class WeightMemory:
    """One tensor lies behind the other. What is freed is all of it, with the last tensor."""

    def __init__(self, device: str) -> None:
        self.device, self._end = device, 0

    @cached_property
    def _buffer(self) -> ElasticBuffer:
        return ElasticBuffer(total_memory(self.device), self.device)

    @cached_property
    def _all(self) -> Tensor:
        return self._buffer.tensor(self._buffer.capacity, "uint8", reserved=True)

    def empty(self, shape: Sequence[int], dtype: str) -> Tensor:
        """As ops.empty(). MemoryError: the device has too little."""
        start = -(-self._end // ALIGNMENT) * ALIGNMENT
        end = start + math.prod(map(int, shape)) * ITEM_BYTES[dtype]
        if end > self._buffer.capacity:
            raise MemoryError(f"the weights take more than the {self._buffer.capacity:,} bytes of {self.device}")
        self._buffer.resize(max(end, self._buffer.size))
        self._end = end
        return self._all[start:end].view(tuple(map(int, shape)), dtype)

    @property
    def content(self) -> Tensor:
        """All of it, as bytes."""
        return self._all[: self._end]

    def give_back(self) -> None:
        """No tensor may be touched before take()."""
        self._buffer.resize(0)

    def take(self) -> None:
        """The tensors are there again, with anything in them. MemoryError, and no change: the device has too little."""
        self._buffer.resize(self._end)


def total_memory(device: str) -> int:
    """All that the device has, in bytes."""
    if device == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return ops.memory_info(device)[1]
