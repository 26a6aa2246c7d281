"""Reading and writing the memory of an ElasticBuffer, for its tests."""

from __future__ import annotations

import numpy as np

import pagedkv
from pagedkv import Tensor
from pagedkv.ops import ElasticBuffer

MIB = 1 << 20


def to_numpy(tensor: Tensor) -> np.ndarray:
    return pagedkv.asarray(tensor, device="cpu").numpy()


def fill(tensor: Tensor, array: np.ndarray) -> None:
    tensor.copy_(pagedkv.asarray(array))


def address(buffer: ElasticBuffer) -> int:
    return buffer.tensor(0).data_ptr()
