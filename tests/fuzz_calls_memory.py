"""Tensors of any dtype, layout and kind over memory that can be looked at as a whole; for the fuzzer of calls.

A View says how a tensor lies in a Memory: what is passed is made of it by `give`, what it holds is decoded by
`numbers`, and the bytes around it are random, so that a call which writes or believes them shows. Never imports pagedkv.
"""

import array
import ctypes
from dataclasses import dataclass, replace

import numpy as np
import oracle

F8_CODES = np.append(oracle._F8_VALUES, np.nan)  # of code 0x00 to 0x7f; 0x80 more is negative
CODES = {
    "float32": "f4",
    "float16": "f2",
    "bfloat16": "u2",
    "float8_e4m3fn": "u1",
    "uint8": "u1",
    "int32": "i4",
    "int64": "i8",
}
DLPACK = {
    "float32": (2, 32),
    "float16": (2, 16),
    "bfloat16": (4, 16),
    "float8_e4m3fn": (10, 8),
    "uint8": (1, 8),
    "int32": (0, 32),
    "int64": (0, 64),
}
FORMATS = {"float32": "f", "uint8": "B", "int32": "i", "int64": "q"}  # of array.array
FLOATS = ("float32", "float16", "bfloat16")
try:
    import torch
except ImportError:
    torch = None


def encode(x, dtype: str) -> np.ndarray:
    """Numbers of the dtype as the codes that memory holds."""
    if dtype == "bfloat16":
        return (np.asarray(x, np.float32).view(np.uint32) >> 16).astype("u2")
    if dtype == "float8_e4m3fn":
        x = np.asarray(x, np.float64)
        code = np.where(np.isnan(x), 0x7F, np.searchsorted(oracle._F8_VALUES, np.abs(x)))
        return (code | np.where(np.signbit(x), 0x80, 0)).astype("u1")
    with np.errstate(over="ignore", invalid="ignore"):
        return np.asarray(x).astype(CODES[dtype])


def decode(codes: np.ndarray, dtype: str) -> np.ndarray:
    """As float64, or integers as they are."""
    if dtype == "bfloat16":
        return (codes.astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    if dtype == "float8_e4m3fn":
        return np.where(codes & 0x80, -1.0, 1.0) * F8_CODES[codes & 0x7F]
    return codes.astype(np.float64) if dtype in FLOATS else codes.copy()


class Memory:
    """Bytes that are remembered as they were."""

    def __init__(self, owner):
        self.owner, self.bytes = owner, np.frombuffer(owner, np.uint8) if not isinstance(owner, np.ndarray) else owner
        self.before = None

    def remember(self):
        self.before = self.bytes.copy()


@dataclass
class View:
    """A tensor in a memory. Strides count elements, `offset` bytes."""

    memory: Memory
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    offset: int
    kind: str = "numpy"
    is_readonly: bool = False
    claims: tuple[int, ...] | None = None  # strides that a DLPack producer gives instead

    def __repr__(self):
        changes = (", read-only" if self.is_readonly else "") + (f", claims {self.claims}" if self.claims else "")
        place = f"{id(self.memory) & 0xFFFFF:05x}+{self.offset}"
        return f"<{self.kind} {self.dtype}{list(self.shape)} strides {list(self.strides)} at {place}{changes}>"

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=object)) if self.shape else 1

    def of(self, data: np.ndarray) -> np.ndarray:
        """The codes in `data`, which is this memory or an image of it."""
        code = np.dtype(CODES[self.dtype])
        if self.size == 0:
            return np.zeros(self.shape, code)
        base = data[self.offset % code.itemsize :]
        base = base[: base.size // code.itemsize * code.itemsize].view(code)
        strides = tuple(s * code.itemsize for s in self.strides)
        return np.lib.stride_tricks.as_strided(base[self.offset // code.itemsize :], self.shape, strides)

    def numbers(self, data=None) -> np.ndarray:
        return decode(self.of(self.memory.before if data is None else data), self.dtype)

    def bytes_of(self, elements) -> np.ndarray:
        """Where the bytes of chosen elements (a mask) are in the memory."""
        image = np.zeros(self.memory.bytes.size, bool)
        if self.size:
            width = np.dtype(CODES[self.dtype]).itemsize
            places = np.full(self.shape, self.offset)
            for dim, stride in enumerate(self.strides):
                places += np.expand_dims(
                    np.arange(self.shape[dim]) * stride * width, [d for d in range(len(self.shape)) if d != dim]
                )
            chosen = places[np.broadcast_to(elements, self.shape)]
            image[(chosen[:, None] + np.arange(width)).reshape(-1)] = True
        return image

    def give(self, tensors):
        """What is passed. `tensors` is pagedkv, for its own Tensor."""
        if self.kind == "dlpack":
            return Producer(self)
        if self.kind == "tensor":
            return tensors.from_dlpack(Producer(self))
        if self.kind == "torch":
            width = np.dtype(CODES[self.dtype]).itemsize
            whole = self.memory.bytes[: self.memory.bytes.size // width * width].view(CODES[self.dtype])
            whole = torch.from_numpy(whole).view(getattr(torch, self.dtype))
            return whole.as_strided(self.shape, self.strides, self.offset // width)
        if self.kind == "array":
            return self.memory.owner
        x = self.of(self.memory.bytes)
        if self.is_readonly:
            x.flags.writeable = False
        return memoryview(x) if self.kind == "memoryview" else x


class DLTensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]


class Versioned(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    ]


class Legacy(ctypes.Structure):
    _fields_ = [("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype, new_capsule.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


alive: dict[int, tuple] = {}  # what capsules point to, by address, until it is given back


@ctypes.CFUNCTYPE(None, ctypes.c_void_p)
def delete(address):
    del alive[address]


class Exported:
    """Whatever capsule there is."""

    def __init__(self, capsule):
        self.capsule = capsule

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, **options):
        return self.capsule


class Producer:
    """A plain DLPack producer."""

    def __init__(self, view: View):
        self.view = view

    def __dlpack_device__(self):
        return (1, 0)

    def __dlpack__(self, *, stream=None, max_version=None, dl_device=None, copy=None):
        view, ndim = self.view, len(self.view.shape)
        sizes = (ctypes.c_int64 * max(ndim, 1))(*view.shape)
        strides = (ctypes.c_int64 * max(ndim, 1))(*(view.claims or view.strides))
        tensor = DLTensor(
            view.memory.bytes.ctypes.data, 1, 0, ndim, *DLPACK[view.dtype], 1, sizes, strides, view.offset
        )
        is_versioned = max_version is not None and (view.is_readonly or view.offset % 2 == 0)
        deleter = ctypes.cast(delete, ctypes.c_void_p)
        managed = (
            Versioned(1, 0, None, deleter, int(view.is_readonly), tensor)
            if is_versioned
            else Legacy(tensor, None, deleter)
        )
        alive[ctypes.addressof(managed)] = (managed, sizes, strides, view.memory)
        return new_capsule(ctypes.addressof(managed), b"dltensor_versioned" if is_versioned else b"dltensor", None)


# --- drawing


def draw_kind(rng, dtype: str, shape, *, is_dense: bool, is_positive: bool, is_readonly: bool) -> str:
    kinds = ["tensor", "tensor", "dlpack"]
    if dtype not in ("bfloat16", "float8_e4m3fn"):
        kinds += ["numpy", "numpy", "numpy"] + ["memoryview"] * (len(shape) > 0 and min(shape) > 0)
    if dtype in FORMATS and len(shape) == 1 and shape[0] and is_dense and not is_readonly:
        kinds += ["array"]
    if torch is not None and is_positive and not is_readonly:
        kinds += ["torch", "torch"]
    return str(rng.choice(kinds))


def place(
    rng, values, dtype: str, *, order=None, is_plain=False, may_repeat=False, may_be_readonly=False, alignment=1
) -> View:
    """A new tensor that holds `values`. The last dimension is dense; the others lie in the `order` given or a random one,
    with gaps, backwards or, where `may_repeat` and the values allow it, again and again. `is_plain`: contiguous."""
    values = np.asarray(values)
    shape, ndim, width = values.shape, values.ndim, np.dtype(CODES[dtype]).itemsize
    strides, stride = [0] * ndim, 1
    is_loose = not is_plain and ndim > 1 and rng.random() < 0.6
    if order is None:
        order = [*range(ndim - 1, -1, -1)]
        order[1:] = rng.permutation(order[1:]) if is_loose and rng.random() < 0.3 else order[1:]
    for dim in order:
        if is_loose and stride > 1 and rng.random() < 0.4:
            stride += int(rng.integers(1, 20))
        strides[dim] = stride
        stride *= max(shape[dim], 1)
    if is_loose:
        for dim in range(ndim - 1):
            if rng.random() < 0.1:
                strides[dim] = -strides[dim]
            elif may_repeat and rng.random() < 0.1 and values.size and (values == values.take([0], dim)).all():
                strides[dim] = 0
    first = sum(s * (n - 1) for s, n in zip(strides, shape) if s < 0 and n > 0)
    last = sum(s * (n - 1) for s, n in zip(strides, shape) if s > 0 and n > 0)
    gap = 0 if is_plain and rng.random() < 0.5 else int(rng.integers(0, 9)) * width // alignment * alignment
    behind = 0 if rng.random() < 0.5 else int(rng.integers(0, 40))
    is_readonly = may_be_readonly and rng.random() < 0.1
    kind = draw_kind(
        rng, dtype, shape, is_dense=not is_loose, is_positive=all(s >= 0 for s in strides), is_readonly=is_readonly
    )
    count = gap + (last - first + 1 if values.size else 0) * width + behind
    if kind == "array":
        memory, gap = Memory(array.array(FORMATS[dtype], bytes(values.size * width))), 0
    else:
        memory = Memory(rng.integers(0, 256, count, np.uint8))
    offset = gap - first * width
    view = View(memory, dtype, shape, tuple(strides), offset, kind, is_readonly)
    if values.size:
        view.of(memory.bytes)[...] = encode(values, dtype)
    return view


def at(view: View, **changes) -> View:
    return replace(view, **changes)


def split(view: View, dim: int) -> list[View]:
    """A view for each index of one dimension, as slices of a fused projection or of a cache of keys and values."""
    width = np.dtype(CODES[view.dtype]).itemsize
    rest = [d for d in range(len(view.shape)) if d != dim]
    shape, strides = tuple(view.shape[d] for d in rest), tuple(view.strides[d] for d in rest)
    return [
        at(view, shape=shape, strides=strides, offset=view.offset + i * view.strides[dim] * width)
        for i in range(view.shape[dim])
    ]
