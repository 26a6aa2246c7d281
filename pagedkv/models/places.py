"""Where the tensors of a checkpoint went, by their names, so that new ones can be written there.

A Place is memory that is written as a whole. Most are the rows of a weight that a checkpoint has under a name of their
own (Rows). A weight that a reader makes, a quantised one above all, is one place for all tensors that it was made of
(Made): its scales are those of blocks that its parts may share. Where the weight of a norm was multiplied into that of
a product (Linear.fold), the place knows the norm, which stays for that, and multiplies it again.
"""

from __future__ import annotations

import ctypes
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from pagedkv import Tensor, ops

from . import DTYPES
from .share import Share, narrowed, whole
from .upload import Upload
from .weight import INT4_ZERO, Part, Weight
from .weight_memory import WeightMemory


def is_readonly(tensor: Tensor) -> bool:
    return tensor.device == "cpu" and memoryview(tensor.view(tensor.nbytes, "uint8")).readonly


def writable(tensor: Tensor) -> Tensor:
    """Over the same memory, which must outlive it: that of a file (SafetensorsFile) may be written."""
    if not tensor.nbytes or not is_contiguous(tensor) or not is_readonly(tensor):
        return tensor
    memory = (ctypes.c_uint8 * tensor.nbytes).from_address(tensor.data_ptr())
    return ops.from_dlpack(np.ctypeslib.as_array(memory)).view(tensor.shape, tensor.dtype)


class Place(ABC):
    """names: of the tensors that it is made of, all of which must be given together."""

    def __init__(self, names: Sequence[str], memory: Tensor) -> None:
        self.names, self.memory = tuple(names), writable(memory)
        self._kept = memory
        self.norm: Rows | None = None  # which is multiplied into it
        self._factor_of: list[weakref.ref[Place]] = []  # no cycle: memory is free when its model is gone

    @property
    def factor_of(self) -> list[Place]:
        """Of a norm: what it is multiplied into."""
        return [place for ref in self._factor_of if (place := ref()) is not None]

    @abstractmethod
    def check(self, source: Any) -> Callable[[Upload], None]:
        """Raises for what cannot be written; else what writes it. source: see update.Given."""

    def _fold(self) -> None:
        if self.norm is not None:
            ops.scale_columns(self.memory, self.norm.memory, out=self.memory)


class Rows(Place):
    """A tensor as it is, but for its dtype. shape: that of the rank's share, in which dimensions are Shares."""

    def __init__(self, name: str, shape: Sequence[int], memory: Tensor) -> None:
        super().__init__((name,), memory)
        self.shape = tuple(shape)

    def check(self, source: Any) -> Callable[[Upload], None]:
        given = source.tensor(self.names[0], self.shape, DTYPES)

        def write(upload: Upload) -> None:
            is_there = given.device == self.memory.device or "cpu" not in (given.device, self.memory.device)
            if is_there and not any(isinstance(size, Share) for size in self.shape):
                self.memory.copy_(given if given.device == self.memory.device else _same_dtype(given, self.memory))
            else:
                upload.copy(self.memory, narrowed(on_host(given), self.shape))
            self._fold()

        return write


class Made(Place):
    """A weight in the form in which ops.linear reads it. again: reads each of its parts of another source."""

    def __init__(self, parts: Sequence[Part], num_experts: int | None, weight: Weight) -> None:
        super().__init__([name for part in parts for name in part.names], weight.data)
        self._again = [part.again for part in parts]
        self._kind, self._num_experts, self._weight = parts[0].kind, num_experts, weight

    def check(self, source: Any) -> Callable[[Upload], None]:
        parts = [again(source) for again in self._again if again is not None]
        has_zeros = any(part.scales is not None and part.scales.zeros is not None for part in parts)
        if any(part.kind != self._kind for part in parts) or (has_zeros and self._weight.zeros is None):
            raise source.error(self.names[0], "is quantised in another way than what was loaded")

        def write(upload: Upload) -> None:
            fresh, here = upload.place(parts, self._num_experts), self._weight
            self.memory.copy_(fresh.data)
            if here.scales is not None and fresh.scales is not None:
                writable(here.scales).copy_(fresh.scales)
            if here.zeros is not None:
                here.zeros.copy_(_no_zeros(here.zeros) if fresh.zeros is None else fresh.zeros)
            self._fold()

        return write


def _no_zeros(like: Tensor) -> Tensor:
    return ops.asarray(np.full(like.shape, INT4_ZERO, np.uint8), device=like.device)


def _same_dtype(given: Tensor, like: Tensor) -> Tensor:
    """On the other's device."""
    return ops.asarray(ops.asarray(given, like.dtype), device=like.device)


def on_host(given: Tensor) -> Tensor:
    """Contiguous."""
    here = ops.asarray(given, device="cpu")
    return here if is_contiguous(here) else ops.empty(here.shape, here.dtype).copy_(here)


def is_contiguous(tensor: Tensor) -> bool:
    expected = 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.strides), strict=True):
        if size != 1 and stride != expected:
            return not tensor.nbytes
        expected *= size
    return True


class Places:
    """Those of a model, of one rank, and the memory that they lie in. Sources add them while they are read (see
    linear.TensorSource)."""

    def __init__(self, device: str, dtype: str) -> None:
        """dtype: of what is not quantised."""
        self.dtype = dtype
        self.memory = WeightMemory(device)
        self.by_name: dict[str, Place] = {}
        self.copies: dict[str, str] = {}  # names that a checkpoint may have besides, and what those must equal
        self.elsewhere: set[str] = set()  # names of what another rank alone has
        # Of names under which a checkpoint may have several tensors as one: where each lies in it.
        self.joined: dict[str, list[tuple[str, tuple[int, slice]]]] = {}
        self._last: list[Place] = []  # in the order in which they were added
        self.missing: set[Place] = set()  # which have no content

    def add(self, place: Place) -> None:
        self._last.append(place)
        self.by_name.update(dict.fromkeys(place.names, place))

    def add_fold(self, before: Tensor, folded: Tensor, norm: Tensor) -> None:
        """The norm was multiplied into a product's weight, which was just loaded as all of `before`. Other memory that
        it lies in now is that of a single projection: see Linear.fold."""
        begin, end = before.data_ptr(), before.data_ptr() + before.nbytes
        factor = next(each for each in reversed(self._last) if each.memory.data_ptr() == norm.data_ptr())
        assert isinstance(factor, Rows)
        for place in reversed(self._last):
            if begin <= place.memory.data_ptr() < end:
                place.norm = factor
                place.memory = place.memory if before.data_ptr() == folded.data_ptr() else folded
                factor._factor_of.insert(0, weakref.ref(place))
            elif factor.factor_of:
                return  # those of one product are neighbours

    def add_experts(self, name: str, weight: Tensor, experts: Sequence[Mapping[str, int]]) -> None:
        """The weights of all experts [num_experts, rows, in_features], which a checkpoint may have as one tensor of
        this name or as one of each projection. experts: the names of each one's projections, with their rows."""
        joined = self.by_name.pop(name, None)
        self.joined[name] = found = []
        for expert, projections in enumerate(experts):
            start = first = 0
            for each, rows in projections.items():
                found.append((each, (expert, slice(start, start + whole(rows)))))
                if isinstance(joined, Rows):
                    self.add(Rows(each, (rows, joined.shape[2]), weight[expert, first : first + int(rows)]))
                start, first = start + whole(rows), first + int(rows)

    def drop(self) -> None:
        """Gives the memory back, without its content."""
        self.memory.give_back()
        self.missing = set(self.by_name.values())
