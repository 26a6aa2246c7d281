"""A rank's share of a dimension: an int, its own size, which knows where in the whole it lies.

The configuration of one of several ranks is the model's, in which shares stand for some of its numbers (Spec.shard). So
a block asks for its weights as ever, of shapes whose dimensions are shares or whole; what reads the files finds the
place. A product whose inputs are a share has a part of the sum: see Linear.comm.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from pagedkv import Tensor, ops

from . import ITEM_BYTES

Ranges = tuple[tuple[int, int], ...]


class Share(int):
    """Its ranges of a dimension of `whole`, one behind the other. Times a number it is a share of as many more; a sum
    is the share of dimensions that lie behind one another. All else makes a plain int of it."""

    ranges: Ranges
    whole: int

    def __new__(cls, ranges: Iterable[tuple[int, int]], whole: int) -> Share:
        ranges = tuple(ranges)
        share = super().__new__(cls, sum(end - start for start, end in ranges))
        share.ranges, share.whole = ranges, whole
        return share

    def __getnewargs__(self) -> tuple[Ranges, int]:  # type: ignore[override]
        return self.ranges, self.whole

    def __mul__(self, count: int) -> Share:
        return Share(((start * count, end * count) for start, end in self.ranges), self.whole * count)

    __rmul__ = __mul__

    def __add__(self, other: int) -> Share:
        behind = ((start + self.whole, end + self.whole) for start, end in ranges_of(other))
        return Share((*self.ranges, *behind), self.whole + whole(other))

    def __radd__(self, other: int) -> Share:
        return self if other == 0 else Share(ranges_of(other), other) + self


def whole(size: int) -> int:
    """Of the dimension that this is a share of, or is."""
    return size.whole if isinstance(size, Share) else size


def ranges_of(size: int) -> Ranges:
    return size.ranges if isinstance(size, Share) else ((0, size),)


def is_first(size: int) -> bool:
    """Whether the dimension's begin is here: at one rank of all."""
    return ranges_of(size)[0][0] == 0


def blocks(size: int, block: int) -> int:
    """In how many blocks a dimension is divided, the last of which may be smaller; of a share, its share of them."""
    if not isinstance(size, Share):
        return -(-size // block)
    for border in (border for each in size.ranges for border in each):
        if border % block and border != size.whole:
            raise NotImplementedError(f"a rank's share ends at {border} of {size.whole}, within a block of {block}")
    return Share(((start // block, -(-end // block)) for start, end in size.ranges), -(-size.whole // block))


def split(
    name: str, size: int, rank: int, num_ranks: int, unit: int = 1, *, rounds: bool = True, num_alike: int = 1
) -> Share:
    """A rank's share, in units of which the last may be smaller, as even as these are; the name is for the error.
    rounds: a unit of one may become one of 8, so that rows of 16 bits are aligned to 16 bytes. num_alike: there are so
    many dimensions like this one, each with num_ranks of its own."""
    if rounds and unit == 1 and size % 8 == 0 and size // 8 >= num_ranks:
        unit = 8
    count = -(-size // unit)
    if count < num_ranks:
        units = f", of which {unit} stay together in a quantised weight" if unit > 1 else ""
        num_ranks *= num_alike
        raise NotImplementedError(f"tensor_parallel_size is {num_ranks}: too many for {name} {size}{units}")
    start, end = (count * each // num_ranks * unit for each in (rank, rank + 1))
    return Share([(start, min(end, size))], size)


VOCAB_UNIT = 64  # tokens: see ops.linear_candidates


def split_vocab(vocab_size: int, rank: int, num_ranks: int, unit: int = 1) -> Share:
    """Each rank but the last one has as many tokens, so that their logits lie side by side when they are gathered.
    unit: rows of the head that must stay together."""
    unit = math.lcm(VOCAB_UNIT, unit)
    width = -(-vocab_size // unit // num_ranks) * unit
    if (num_ranks - 1) * width >= vocab_size:
        raise NotImplementedError(
            f"tensor_parallel_size is {num_ranks}: too many for vocab_size {vocab_size} in parts of {unit}"
        )
    return Share([(rank * width, min((rank + 1) * width, vocab_size))], vocab_size)


def split_heads(
    num_q_heads: int, num_kv_heads: int, head_dim: int, rank: int, num_ranks: int, unit: tuple[int, int]
) -> tuple[Share, Share]:
    """A rank's query heads and their KV heads. These are repeated where there are fewer than ranks. unit: rows and
    columns of a weight that must stay together."""
    group, of_rows = num_q_heads // num_kv_heads, _heads(head_dim, unit[0])
    if num_kv_heads >= num_ranks:
        together = math.lcm(of_rows, _heads(group * head_dim, unit[1]))
        kv_heads = split("num_key_value_heads", num_kv_heads, rank, num_ranks, together, rounds=False)
        return kv_heads * group, kv_heads
    repeats, rest = divmod(num_ranks, num_kv_heads)
    given = f"tensor_parallel_size is {num_ranks} but num_key_value_heads {num_kv_heads}"
    if rest:
        raise NotImplementedError(f"{given}, which does not divide it")
    if of_rows > 1:
        raise NotImplementedError(f"{given}, of which {of_rows} share blocks of a quantised weight")
    head, turn = divmod(rank, repeats)
    name, of_both = "num_attention_heads / num_key_value_heads", _heads(head_dim, math.lcm(*unit))
    ((start, end),) = split(name, group, turn, repeats, of_both, rounds=False, num_alike=num_kv_heads).ranges
    return Share([(head * group + start, head * group + end)], num_q_heads), Share([(head, head + 1)], num_kv_heads)


def _heads(head_dim: int, block: int) -> int:
    """How many heads end with a block."""
    return block // math.gcd(block, head_dim)


def narrowed(view: Tensor, shape: Sequence[int]) -> Tensor:
    """What a shape asks of a tensor on the host: the tensor, rows of it, or a copy of what lies apart."""
    shares = [dim for dim, size in enumerate(shape) if isinstance(size, Share)]
    if not shares:
        return view
    if shares == [0] and len(ranges_of(shape[0])) == 1:
        ((start, end),) = ranges_of(shape[0])
        return view[start:end]
    item = ITEM_BYTES[view.dtype]
    array = view.view((*view.shape[:-1], view.shape[-1] * item), "uint8").numpy()
    for dim in shares:
        ranges = ranges_of(shape[dim] * item if dim == len(shape) - 1 else shape[dim])
        parts = [array[(slice(None),) * dim + (slice(start, end),)] for start, end in ranges]
        array = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=dim)
    return ops.from_dlpack(np.ascontiguousarray(array)).view(tuple(map(int, shape)), view.dtype)
