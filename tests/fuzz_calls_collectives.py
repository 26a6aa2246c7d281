"""Collectives for the fuzzer of calls: of a group of one, whose sum is its own part."""

import os

import numpy as np
import oracle
from fuzz_calls_ops import Draw, Operation, Outcome, near, numbers

from pagedkv import ops


def alone() -> ops.Communicator:
    memory = os.memfd_create("alone")
    comm = ops.Communicator(0, 1, memory)
    os.close(memory)
    return comm


COMM = alone()


def draw_all_reduce(d: Draw) -> dict:
    dtype, shape = d.dtype(), (d.size(), d.size(300 if d.is_large else 20))
    return {
        "x": d.tensor(shape, dtype),
        "comm": COMM,
        **d.some(
            residual=lambda: d.tensor(shape, dtype),
            out_squares=lambda: d.output((shape[0], 1), "float32", is_plain=True),
            out=lambda: d.output(shape, dtype),
        ),
        **d.stream(),
    }


def expect_all_reduce(a) -> dict:
    total = numbers(a.x) if a.residual is None else numbers(a.x) + numbers(a.residual)
    out = oracle.rounded(total.astype(np.float32), a.x.dtype)
    return {"out": Outcome(out), "out_squares": near((out.astype(np.float64) ** 2).sum(1, keepdims=True), "float32", 2)}


def draw_all_gather(d: Draw) -> dict:
    dtype, shape = d.dtype(), (d.size(), d.size(20))
    return {
        "x": d.tensor(shape, dtype),
        "comm": COMM,
        **d.some(out=lambda: d.output(shape, dtype)),
        **d.stream(),
    }


def draw_candidates(d: Draw) -> dict:
    rows = d.size(20)
    keys, tokens = d.rng.integers(0x00800000, 0xFF800001, rows), d.rng.integers(0, 2**31, rows)
    words = (keys.astype(np.uint64) << np.uint64(32) | (0xFFFFFFFF - tokens).astype(np.uint64)).view(np.int64)
    return {
        "candidates": d.array(words, "int64"),
        "comm": COMM,
        **d.some(out=lambda: d.output((rows,), "int32")),
        **d.stream(),
    }


COLLECTIVE_OPERATIONS = {
    "all_reduce": Operation(draw_all_reduce, expect_all_reduce),
    "all_gather": Operation(draw_all_gather, lambda a: {"out": Outcome(numbers(a.x))}),
    "sample_candidates": Operation(
        draw_candidates, lambda a: {"out": Outcome(~numbers(a.candidates).astype(np.int64).astype(np.int32))}
    ),
}
