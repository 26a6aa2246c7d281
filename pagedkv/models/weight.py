"""A product's weight, and the rows of one on their way into it from a checkpoint."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np

from pagedkv import Tensor, ops

INT4_ZERO = 8  # of a weight of int4 without zeros


@dataclass(frozen=True)
class Weight:
    """[out_features, in_features] in one of the forms that ops.linear reads: in the dtype of x, or quantised, with
    scales. Or that of experts, of which each tensor has one more dimension before the others."""

    data: Tensor
    scales: Tensor | None = None
    zeros: Tensor | None = None
    block: tuple[int, int] | None = None  # rows and columns that share a scale
    quantizes_x: bool = False  # see ops.linear's quantize_x

    @property
    def is_quantised(self) -> bool:
        return self.scales is not None

    @property
    def nbytes(self) -> int:
        return sum(each.nbytes for each in (self.data, self.scales, self.zeros) if each is not None)

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Those of ops.linear and ops.expert_linear, and of their kin."""
        if not self.is_quantised:
            return {"weight": self.data}
        return {
            "weight": self.data,
            "weight_scales": self.scales,
            "weight_zeros": self.zeros,
            "weight_block": self.block,
        }


class Scales(NamedTuple):
    """Of a part, on the host."""

    values: Tensor  # [num_rows, in_features] in blocks: float32, or of int4 any float
    block: tuple[int, int]
    zeros: np.ndarray | None = None  # uint8, of int4
    quantizes_x: bool = False


@dataclass(frozen=True)
class Part:
    """Rows of a weight that a checkpoint has under a name of their own."""

    num_rows: int
    row_size: int  # elements of the data
    dtype: str  # the same
    # Writes the data of rows first..last into a tensor on the host. Several threads may, of different rows.
    write: Callable[[int, int, Tensor], None]
    step: int = 1  # first and last are multiples, but for the end
    scales: Scales | None = None  # complete when all rows were written
    whole: Tensor | None = None  # the data, where nothing needs to be done to it
    names: tuple[str, ...] = ()  # of the tensors that it was made of, and ...
    again: Callable[[Any], Part] | None = None  # ... how it is made of another source's

    @property
    def kind(self) -> tuple[object, ...]:
        """Parts of one kind make one weight. (Their blocks may have different numbers of rows.)"""
        if self.scales is None:
            return (self.dtype,)
        return self.dtype, self.scales.block[1], self.scales.values.dtype, self.scales.quantizes_x


class _Noted:
    """A source that notes which tensors a reader asks for."""

    def __init__(self, source: Any) -> None:
        self.source = source
        self.names: list[str] = []

    def view(self, name: str, shape: tuple[int, ...], dtypes: Collection[str]) -> Tensor:
        self.names.append(name)
        view: Tensor = self.source.view(name, shape, dtypes)
        return view

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)


def part_of(source: Any, read: Callable[[Any], Part]) -> Part:
    """What the reader makes of a source, and knows how to make of another one."""
    noted = _Noted(source)
    return replace(read(noted), names=tuple(noted.names), again=read)


def part_of_view(view: Tensor, dtype: str, scales: Scales | None = None) -> Part:
    """Of data [num_rows, row_size] that lie on the host as they are, but for a conversion to `dtype`."""

    def write(first: int, last: int, out: Tensor) -> None:
        out.view(-1).copy_(view[first:last].view(-1))  # in one dimension: by this thread alone

    whole = view if view.dtype == dtype else None
    return Part(len(view), view.shape[1], dtype, write, scales=scales, whole=whole)


def stackable(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """The parts, neighbours of one kind together."""
    for _, group in groupby(parts, key=lambda part: part.kind):
        yield list(group)


def stack_scales(parts: Sequence[Part], num_experts: int = 1) -> Scales:
    """Of quantised parts of one kind, one below the other; of several experts, which have as many parts each. Where a
    part does not end with a block, the blocks become so short that all do, and neighbours hold the same scale. The last
    part, and that of each expert, may end within a block."""
    if len(parts) == 1:
        assert parts[0].scales is not None
        return parts[0].scales
    each = [part.scales for part in parts if part.scales is not None]
    of_expert = len(parts) // num_experts
    inner = (part.num_rows for i, part in enumerate(parts, 1) if i % of_expert)
    rows = math.gcd(*(scales.block[0] for scales in each), *inner)
    counts = [-(-part.num_rows // rows) for part in parts]
    stacked = ops.empty((sum(counts), each[0].values.shape[1]), each[0].values.dtype)
    start = 0
    for scales, count in zip(each, counts, strict=True):
        values, repeats = scales.values, min(scales.block[0] // rows, count)
        if repeats > 1:  # those of int4 have one row and never come here, so this is float32
            values = ops.asarray(np.repeat(values.numpy(), repeats, axis=0)[:count])
        stacked[start : start + count].copy_(values)
        start += count
    zeros = None
    if any(scales.zeros is not None for scales in each):
        none = [np.full(scales.values.shape, INT4_ZERO, np.uint8) for scales in each]
        zeros = np.concatenate([full if s.zeros is None else s.zeros for s, full in zip(each, none, strict=True)])
    return Scales(stacked, (rows, each[0].block[1]), zeros, each[0].quantizes_x)
