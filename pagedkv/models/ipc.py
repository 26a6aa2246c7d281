"""Tensors of a GPU that another process of this machine has."""

from __future__ import annotations

import math
from dataclasses import dataclass

from pagedkv import Tensor, ops
from pagedkv.checks import check_int

from . import ITEM_BYTES

HANDLE_BYTES = 64
OF_CUDA_MALLOC = b"c"  # before torch's handles: a version, and this where it is one of cudaMalloc's


@dataclass(frozen=True)
class IpcTensor:
    """A contiguous, complete tensor that another process has on a GPU of this machine, and keeps until it was read.

    Args:
        handle: a cudaIpcMemHandle_t, as bytes. Of a tensor `t` of torch, `t.untyped_storage()._share_cuda_()` has it in
            the second place, and an offset in the fourth, to which `t.storage_offset() * t.itemsize` is added
        shape, dtype: its shape, and its dtype by name
        offset: bytes from where the handle points
        device: the GPU, as this process calls it
    """

    handle: bytes
    shape: tuple[int, ...]
    dtype: str
    offset: int = 0
    device: str = "cuda"

    def open(self) -> Tensor:
        """A Tensor over that memory. ValueError, TypeError: what is wrong; CudaError: there is no such memory."""
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype is {self.dtype!r} but must be one of {', '.join(ITEM_BYTES)}")
        shape, offset = tuple(check_int("shape", size, 0) for size in self.shape), check_int("offset", self.offset, 0)
        end = offset + math.prod(shape) * ITEM_BYTES[self.dtype]
        is_torchs = len(self.handle) == 2 + HANDLE_BYTES and self.handle[1:2] == OF_CUDA_MALLOC
        handle = self.handle[2:] if is_torchs else self.handle
        return ops.open_ipc(handle, end, self.device)[offset:].view(shape, self.dtype)
