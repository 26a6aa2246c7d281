"""The operations on a paged KV cache, for the fuzzer of calls: how to draw arguments that fit, and what must come out.

An Operation's `draw` gives arguments, Views where they are tensors; its `expect` takes them all, changed or not, and
gives an Outcome for each tensor that is written: of the parameter's name, whether it was given or is returned.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import oracle
from fuzz_calls_memory import FLOATS, View, place, split

F8 = "float8_e4m3fn"


@dataclass
class Outcome:
    """values None: undefined. `mask`: the elements that may change; None is all. `check` looks at them instead."""

    values: Any
    atol: float = 0.0
    rtol: float = 0.0
    mask: Any = None
    check: Callable | None = None


@dataclass
class Operation:
    draw: Callable
    expect: Callable
    returns: Callable = field(default=lambda a: ["out"])  # names of what is returned; a tuple where they are several


class Draw:
    """Random arguments. `everything`: every optional one is given."""

    def __init__(self, rng, everything=False):
        self.rng, self.everything = rng, everything
        self.is_large = rng.random() < 0.004

    def one_of(self, *choices):
        return choices[self.rng.integers(len(choices))]

    def maybe(self, p=0.4) -> bool:
        return self.everything or self.rng.random() < p

    def size(self, most=6) -> int:
        if self.rng.random() < (0 if self.everything else 0.05):
            return 0
        return int(self.rng.integers(1, (8 * most if self.is_large else most) + 1))

    def dtype(self) -> str:
        return self.one_of(*FLOATS)

    def floats(self, shape, dtype: str, scale=1.0) -> np.ndarray:
        return oracle.rounded(self.rng.standard_normal(shape) * scale, dtype)

    def tensor(self, shape, dtype: str, scale=1.0, **layout) -> View:
        return place(
            self.rng, self.floats(shape, dtype, scale), dtype, **{"may_repeat": True, "may_be_readonly": True} | layout
        )

    def array(self, values, dtype="int32", **layout) -> View:
        return place(self.rng, values, dtype, **{"may_be_readonly": True} | layout)

    def output(self, shape, dtype: str, **layout) -> View:
        values = self.rng.integers(-9, 9, shape) if dtype.startswith("int") else self.floats(shape, dtype, 9)
        return place(self.rng, values, dtype, **layout)

    def some(self, p=0.4, **arguments) -> dict:
        """Each of the optional arguments or not; they are made when they are needed."""
        return {name: make() for name, make in arguments.items() if self.maybe(p)}

    def stream(self) -> dict:
        return self.some(0.1, stream=lambda: self.one_of(None, 0, 12345))

    def flag(self):
        return self.one_of(True, False, 1, 0, 2.5, np.True_, np.False_, None)


def numbers(x):
    """Of a tensor or of bytes, which are elements of uint8; anything else is returned as it is."""
    if isinstance(x, (bytes, bytearray, memoryview)):
        return np.asarray(memoryview(x))
    return x.numbers() if isinstance(x, View) else x


def near(values, dtype: str, factor=1.0, mask=None) -> Outcome:
    tolerance = factor * oracle.tolerance(dtype)
    if dtype == "float16":  # what is rounded to infinity
        values = np.where(np.abs(values) >= 65520, np.copysign(np.inf, values), values)
    return Outcome(values, tolerance, tolerance, mask)


# --- caches


def draw_caches(d: Draw, k_values, v_values, dtype: str) -> dict:
    """NHD, HND, anything else that strides can say, or K and V of a block side by side."""
    if d.rng.random() < 0.25:
        both = place(d.rng, np.stack([k_values, v_values], 1), dtype)
        return dict(zip(("k_cache", "v_cache"), split(both, 1), strict=True))
    order = [3, 1, 2, 0] if d.rng.random() < 0.2 else None
    return {"k_cache": place(d.rng, k_values, dtype, order=order), "v_cache": place(d.rng, v_values, dtype)}


def draw_scales(d: Draw, cache_dtype: str, num_kv_heads: int, num_seqs=None) -> dict:
    def scale():
        shapes = [(), (1,), (num_kv_heads,)] + ([(num_seqs, num_kv_heads)] if num_seqs else [])
        shape = d.one_of(*(shapes[1:] if d.everything else shapes))
        drawn = d.rng.uniform(0.5, 1.5, shape).astype(np.float32)
        return place(d.rng, drawn, "float32", may_be_readonly=True) if shape else float(drawn)

    if cache_dtype != F8:
        return d.some(0.1, k_scale=lambda: d.one_of(None, 1.0, 1), v_scale=lambda: d.one_of(None, 1.0, 1))
    return d.some(0.5, k_scale=scale, v_scale=scale)


def draw_store(d: Draw) -> dict:
    dtype = d.dtype()
    cache_dtype = F8 if d.maybe(0.3) else dtype
    tokens, heads, head_dim = d.size(), d.size(3), d.one_of(1, 2, 3, 8, 16, 40)
    blocks, block_size = d.size(5), int(d.rng.integers(1, 41 if d.is_large else 7))
    slots = d.rng.permutation(blocks * block_size)[:tokens]
    slots = np.append(slots, np.full(tokens - len(slots), -1))
    slots[d.rng.random(tokens) < 0.1] = d.one_of(-1, -7, -(2**31))
    if d.maybe(0.3):
        rows = place(d.rng, d.floats((tokens, 2, heads, head_dim), dtype, 2), dtype, may_be_readonly=True)
        key, value = split(rows, 1)
    else:
        key, value = (d.tensor((tokens, heads, head_dim), dtype, 2) for _ in range(2))
    shape = (blocks, block_size, heads, head_dim)
    return {
        "key": key,
        "value": value,
        **draw_caches(d, d.floats(shape, cache_dtype), d.floats(shape, cache_dtype), cache_dtype),
        "slot_mapping": d.array(slots, d.one_of("int32", "int64")),
        **draw_scales(d, cache_dtype, heads),
        **d.stream(),
    }


def stored(cache, slots, k, v, **how):
    """Outcomes of the caches: exactly the rows of the slots change."""
    mask = np.zeros(cache.shape[0] * cache.shape[1], bool)
    mask[slots[slots >= 0]] = True
    mask = mask.reshape(*cache.shape[:2], 1, 1)
    return {"k_cache": Outcome(k, mask=mask, **how), "v_cache": Outcome(v, mask=mask, **how)}


def expect_store(a) -> dict:
    k, v = oracle.store_kvcache(
        numbers(a.key), numbers(a.value), numbers(a.k_cache), numbers(a.v_cache), numbers(a.slot_mapping),
        cache_dtype=a.k_cache.dtype, k_scale=scale_of(a.k_scale), v_scale=scale_of(a.v_scale),
    )
    return stored(a.k_cache, numbers(a.slot_mapping), k, v)


def scale_of(scale):
    return None if scale is None else numbers(scale) if isinstance(scale, View) else float(scale)


# --- pages


def draw_pools(d: Draw, count: int, blocks: int, dtype: str, shape) -> list[View]:
    def pool():
        values = d.rng.integers(0, 99, (blocks, *shape)) if dtype[0] in "iu" else d.floats((blocks, *shape), dtype)
        if d.rng.random() < 0.3:  # every second block of twice as many
            return split(place(d.rng, np.stack([values, values], 1), dtype, is_plain=True), 1)[1]
        return place(d.rng, values, dtype, is_plain=True)

    return [pool() for _ in range(count)]


def as_argument(d: Draw, pools):
    return pools[0] if len(pools) == 1 and d.rng.random() < 0.5 else d.one_of(list, tuple)(pools)


def draw_block_shape(d: Draw):
    shape = tuple(d.size(4) for _ in range(d.rng.integers(0, 4)))
    return d.one_of(*FLOATS, F8, "uint8", "int32", "int64"), shape


def draw_copy(d: Draw) -> dict:
    (dtype, shape), blocks = draw_block_shape(d), d.size()
    caches = draw_pools(d, d.size(3), blocks, dtype, shape)
    ids = d.rng.permutation(blocks)
    count = d.size(blocks // 2) if blocks > 1 else 0
    count = min(count, blocks // 2)
    pairs = np.stack([d.rng.choice(ids[count:], count) if count else ids[:0], ids[:count]], 1)
    return {
        "caches": as_argument(d, caches),
        "src_dst_pairs": d.array(pairs, d.one_of("int32", "int64"), is_plain=True),
        **d.stream(),
    }


def listed(pools) -> list:
    return list(pools) if isinstance(pools, (list, tuple)) else [pools]


def copied(name: str, src, dst, pairs) -> dict:
    outcomes = {}
    for i, (a, b) in enumerate(zip(listed(src), listed(dst), strict=True)):
        values, mask = numbers(b).copy(), np.zeros(b.shape[:1], bool)
        values[pairs[:, 1]] = numbers(a)[pairs[:, 0]]
        mask[pairs[:, 1]] = True
        outcomes[name, i] = Outcome(values, mask=mask.reshape(-1, *[1] * (len(b.shape) - 1)))
    return outcomes


def draw_swap(d: Draw) -> dict:
    (dtype, shape), count = draw_block_shape(d), d.size(3)
    src, dst = (draw_pools(d, count, blocks, dtype, shape) for blocks in (d.size(), d.size()))
    most = [pools[0].shape[0] if pools else 9 for pools in (src, dst)]
    chosen = d.rng.permutation(most[1])[: d.size() if most[0] else 0]
    pairs = np.stack([d.rng.integers(0, max(most[0], 1), len(chosen)), chosen], 1)
    return {
        "src": as_argument(d, src),
        "dst": as_argument(d, dst),
        "pairs": d.array(pairs, d.one_of("int32", "int64"), is_plain=True),
        **d.stream(),
    }


# --- merging


def draw_merge(d: Draw) -> dict:
    dtype, (parts, tokens, heads, head_dim) = (
        d.dtype(),
        (d.size(4), d.size(), d.size(3), d.one_of(1, 5, 8, 40, 300 if d.is_large else 9)),
    )
    lse = d.floats((parts, heads, tokens), "float32")
    o = d.floats((parts, tokens, heads, head_dim), dtype)
    nothing = d.rng.random(lse.shape) < 0.1
    lse[nothing] = -np.inf
    o[nothing.transpose(0, 2, 1)] = np.nan
    return {
        "o": place(d.rng, o, dtype, is_plain=True, may_be_readonly=True),
        "lse": place(d.rng, lse, "float32", is_plain=True),
        **d.some(out=lambda: d.output((tokens, heads, head_dim), dtype, is_plain=True), return_lse=d.flag),
        **d.stream(),
    }


def expect_merge(a) -> dict:
    o, lse = numbers(a.o), numbers(a.lse)
    if len(o) == 0:
        out, merged = np.zeros(o.shape[1:]), np.full(lse.shape[1:], -np.inf)
    else:
        out, merged = oracle.merge_attention_states(o, lse)
    return {"out": near(out, a.o.dtype, 2), **({"out_lse": near(merged, "float32", 2)} if a.return_lse else {})}


def out_and_lse(a) -> list[str]:
    return ["out", "out_lse"] if a.return_lse else ["out"]


CACHE_OPERATIONS = {
    "store_kvcache": Operation(draw_store, expect_store, lambda a: []),
    "copy_blocks": Operation(
        draw_copy, lambda a: copied("caches", a.caches, a.caches, numbers(a.src_dst_pairs)), lambda a: []
    ),
    "swap_blocks": Operation(draw_swap, lambda a: copied("dst", a.src, a.dst, numbers(a.pairs)), lambda a: []),
    "merge_attention_states": Operation(draw_merge, expect_merge, out_and_lse),
}
