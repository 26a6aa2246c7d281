"""A DLPack producer that says what it is told to, true or not."""

import ctypes
from typing import ClassVar

import numpy as np


class _Tensor(ctypes.Structure):
    """DLManagedTensor, whose first member is a DLTensor: https://dmlc.github.io/dlpack/latest/c_api.html"""

    _fields_ = [("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
                ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
                ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
                ("byte_offset", ctypes.c_uint64), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]  # fmt: skip


CODES = {"i": 0, "u": 1, "f": 2, "bfloat16": 4}
new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


class Producer:
    """`strides` None: the shape's own, counted by the consumer. What describes it is never freed, because a tensor that
    was made of it looks there once more when it goes."""

    alive: ClassVar[list["Producer"]] = []

    def __init__(self, address: int, shape, strides, dtype: str, byte_offset: int = 0) -> None:
        self.alive.append(self)
        self.dtype = np.dtype("u2" if dtype == "bfloat16" else dtype)  # NumPy has none
        code = CODES[dtype if dtype in CODES else self.dtype.kind]
        self._shape = (ctypes.c_int64 * len(shape))(*shape)
        self._strides = None if strides is None else (ctypes.c_int64 * len(strides))(*strides)
        self._tensor = _Tensor(address or None, 1, 0, len(shape), code, 8 * self.dtype.itemsize, 1,
                               self._shape, self._strides, byte_offset, None, None)  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **_) -> object:
        return new_capsule(ctypes.addressof(self._tensor), b"dltensor", None)
