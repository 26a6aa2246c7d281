"""Tensors that a process sends to others by a broadcast of NCCL: a trainer's new weights, from other GPUs or machines.

    id = unique_id()                              # in one process, which lets the others know it
    group = WeightGroup(id, world_size, rank)     # in each, at the same time
    group.broadcast(tensors)                      # in each, with tensors of the same sizes in the same order

NCCL is no part of this package, and is loaded at first use: what PAGEDKV_NCCL names, else libnccl.so.2 where the loader
finds it, else that of the package nvidia-nccl or of CUDA_HOME.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pagedkv import Event, Stream, Tensor, ops
from pagedkv.checks import check_float, check_int

from . import ITEM_BYTES
from .places import is_contiguous

UNIQUE_ID_BYTES = 128
SONAME = "libnccl.so.2"
# nccl.h
SUCCESS, IN_PROGRESS, UINT8, MAGIC = 0, 7, 1, 0xCAFEBEEF
OLDEST = 21400  # 2.14, the first whose calls need not wait
POLL_SECONDS = 1e-3


@dataclass(frozen=True)
class BroadcastTensor:
    """What the member 0 of an engine's group broadcasts next: its shape, and its dtype by name."""

    shape: tuple[int, ...]
    dtype: str

    def empty(self, device: str) -> Tensor:
        if self.dtype not in ITEM_BYTES:
            raise ValueError(f"dtype is {self.dtype!r} but must be one of {', '.join(ITEM_BYTES)}")
        return ops.empty(tuple(check_int("shape", size, 0) for size in self.shape), self.dtype, device)


class _UniqueId(ctypes.Structure):
    _fields_ = [("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES)]


class _Config(ctypes.Structure):
    """ncclConfig_t as it was in 2.14, which says how much of it there is."""

    _fields_ = [
        ("size", ctypes.c_size_t), ("magic", ctypes.c_uint), ("version", ctypes.c_uint), ("blocking", ctypes.c_int),
    ]  # fmt: skip


# --- the library


def _paths() -> Iterator[str]:
    if given := os.environ.get("PAGEDKV_NCCL"):
        yield given
        return
    for folder in sys.path:  # first: what a trainer's torch takes, and all members must have one version
        yield from map(str, Path(folder).glob(f"nvidia/nccl/lib/{SONAME}"))
    yield SONAME
    for name in ("CUDA_HOME", "CUDA_PATH"):
        if home := os.environ.get(name):
            yield f"{home}/lib64/{SONAME}"
    yield f"/usr/local/cuda/lib64/{SONAME}"


@cache
def _library() -> ctypes.CDLL:
    tried = []
    for path in _paths():
        try:
            library = ctypes.CDLL(path)
        except OSError:
            tried.append(path)
            continue
        library.ncclGetErrorString.restype = library.ncclGetLastError.restype = ctypes.c_char_p
        found = ctypes.c_int()
        library.ncclGetVersion(ctypes.byref(found))
        if found.value < OLDEST:
            raise ImportError(f"{path} is NCCL {found.value} but must be {OLDEST} (2.14) or later")
        return library
    where = f"{SONAME}, of the package nvidia-nccl-cu13, say"
    raise ImportError(f"a group of weights needs NCCL ({where}) and found none: tried {', '.join(tried)}")


def unique_id() -> bytes:
    """By which the members of one group find each other: 128 bytes."""
    found = _UniqueId()
    _check(_library().ncclGetUniqueId(ctypes.byref(found)), None, "GetUniqueId")
    return bytes(found.internal)


def _check(result: int, comm: ctypes.c_void_p | None, what: str) -> None:
    if result not in (SUCCESS, IN_PROGRESS):
        words = [_library().ncclGetErrorString(result), _library().ncclGetLastError(comm)]
        raise RuntimeError(f"NCCL, {what}: {', '.join(word.decode(errors='replace') for word in words if word)}")


# --- a group


def check_member(unique_id: bytes, world_size: int, rank: int, timeout: float) -> None:
    """Raises for what WeightGroup does not take."""
    if not isinstance(unique_id, bytes) or len(unique_id) != UNIQUE_ID_BYTES:
        raise ValueError(f"unique_id is {unique_id!r} but must be {UNIQUE_ID_BYTES} bytes")
    check_int("world_size", world_size, 2)
    check_int("rank", rank, 0, world_size - 1)
    check_float("timeout", timeout, 0, threading.TIMEOUT_MAX, is_open=True)


class WeightGroup:
    """This process, or one rank of an engine, as a member of a group that weights are sent around in.

    Args:
        unique_id: see unique_id()
        world_size: how many members there are
        rank: which of them this is; 0 is the one that sends
        device: where its tensors are. NCCL wants a GPU of its own for each member
        timeout: seconds after which a wait for the others ends, and with it the group

    It waits for all members. RuntimeError: what NCCL says; TimeoutError: somebody did not come; ImportError: there is
    no NCCL. One call at a time.
    """

    def __init__(
        self, unique_id: bytes, world_size: int, rank: int, device: str = "cuda", *, timeout: float = 60.0
    ) -> None:
        check_member(unique_id, world_size, rank, timeout)
        self.world_size, self.rank, self.device, self._timeout = world_size, rank, device, timeout
        self._is_gpu, self._comm = device != "cpu", ctypes.c_void_p()
        config = _Config(ctypes.sizeof(_Config), MAGIC, OLDEST, 0)
        id = _UniqueId((ctypes.c_ubyte * UNIQUE_ID_BYTES)(*unique_id))
        with self._on_device():
            comm = ctypes.byref(self._comm)
            self._call("CommInitRankConfig", comm, self.world_size, id, self.rank, ctypes.byref(config))
            self._stream: Any = Stream(device) if self._is_gpu else nullcontext()

    def broadcast(self, tensors: Iterable[Any], root: int = 0) -> None:
        """Writes the tensors of member `root` into those of all others, and waits for it: any that DLPack describes,
        contiguous, on the device. What a library has queued on the device for them is waited for before."""
        check_int("root", root, 0, self.world_size - 1)
        if not self._comm:
            raise RuntimeError("this WeightGroup is closed")
        found = [each if isinstance(each, Tensor) else ops.from_dlpack(each) for each in tensors]
        for i, tensor in enumerate(found):
            if tensor.device != ops.empty(0, "uint8", self.device).device:
                raise ValueError(f"tensors[{i}] is on {tensor.device} but the group is of {self.device}")
            if not is_contiguous(tensor):
                raise ValueError(f"tensors[{i}] is not contiguous")
        ops.synchronize(self.device)
        with self._on_device(), self._stream:
            queue = ctypes.c_void_p(self._stream.cuda_stream if self._is_gpu else 0)
            for tensor in found:
                at, count = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes)
                self._call("Broadcast", at, at, count, UINT8, root, self._comm, queue)
            if self._is_gpu:
                self._wait("Broadcast", Event(device=self.device).record().query)

    def close(self) -> None:
        """Leaves the group, whatever the others do. Closing twice is fine."""
        comm, self._comm = self._comm, ctypes.c_void_p()
        if comm:
            with self._on_device():
                _library().ncclCommAbort(comm)

    def _call(self, name: str, *arguments: Any) -> None:
        """Calls NCCL, whose own threads may go on with it, and waits for them."""
        try:
            _check(_library()[f"nccl{name}"](*arguments), self._comm, name)
            self._wait(name, lambda: True)
        except BaseException:
            self.close()
            raise

    def _wait(self, name: str, is_done: Callable[[], bool]) -> None:
        """Returns when is_done() says so and NCCL has nothing under way. Who waits too long leaves the group."""
        state, end = ctypes.c_int(IN_PROGRESS), time.monotonic() + self._timeout
        while True:
            _check(_library().ncclCommGetAsyncError(self._comm, ctypes.byref(state)), self._comm, name)
            _check(state.value, self._comm, name)
            if state.value == SUCCESS and is_done():
                return
            if time.monotonic() > end:
                self.close()
                raise TimeoutError(f"NCCL, {name}: the other members did not come within {self._timeout:g} s")
            time.sleep(POLL_SECONDS)

    @contextmanager
    def _on_device(self) -> Iterator[None]:
        """NCCL takes the GPU whose context is current in the thread."""
        if not self._is_gpu:
            yield
            return
        driver, device, context = ctypes.CDLL("libcuda.so.1"), ctypes.c_int(), ctypes.c_void_p()
        index = int(self.device.partition(":")[2] or 0)
        calls = (
            ("cuInit", 0), ("cuDeviceGet", ctypes.byref(device), index),
            ("cuDevicePrimaryCtxRetain", ctypes.byref(context), device), ("cuCtxPushCurrent_v2", context),
        )  # fmt: skip
        for name, *arguments in calls:
            if error := driver[name](*arguments):
                raise RuntimeError(f"{name}: error {error} for device {self.device!r}")
        try:
            yield
        finally:
            driver.cuCtxPopCurrent_v2(ctypes.byref(context))
            driver.cuDevicePrimaryCtxRelease_v2(device)
