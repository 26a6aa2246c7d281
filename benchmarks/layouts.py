"""Attention over the layouts that other engines' pools have, on a GPU, beside our own: decode and prefill.

    python benchmarks/layouts.py             prints a table and writes benchmarks/results/layouts-cuda.json

K and V of a page may lie side by side in a row of 2 * head_dim, heads before tokens, or in halves of one tensor; dense
batches and ragged keys and values in one tensor are pages, too. Each row is the median of 5 replays of a CUDA graph with
20 calls (5 of prefill): microseconds, and bytes of keys and values, or FLOPs, a second.
"""

import statistics
from collections.abc import Callable

import torch
from attention_cuda import capture, time_us
from record import make_parser, record_run

import pagedkv

DIM = 128
LAYOUTS: dict[str, Callable] = {  # K and V, [blocks, page, heads, dim], as views of what an engine allocates
    "NHD": lambda new, b, n, h: (new(b, n, h, DIM), new(b, n, h, DIM)),
    "HND": lambda new, b, n, h: (new(b, h, n, DIM).transpose(1, 2), new(b, h, n, DIM).transpose(1, 2)),
    "side by side, HND": lambda new, b, n, h: new(b, h, n, 2 * DIM).transpose(1, 2).split(DIM, 3),
    "side by side, NHD": lambda new, b, n, h: new(b, n, h, 2 * DIM).split(DIM, 3),
    "halves of one tensor": lambda new, b, n, h: new(2, b, n, h, DIM).unbind(0),
    "halves of a page": lambda new, b, n, h: new(b, 2, n, h, DIM).unbind(1),
    "halves of a page, HND": lambda new, b, n, h: new(b, 2, h, n, DIM).transpose(2, 3).unbind(1),
}
DECODES = [(16, 8, 64, 2000, 16), (32, 8, 24, 5300, 16), (16, 8, 256, 700, 256), (40, 8, 5, 9001, 64), (64, 8, 100, 1500, 16)]
PREFILLS = [(16, 8, 1, 16384, 0, 16), (32, 8, 8, 2000, 0, 16), (16, 8, 16, 1000, 1000, 256), (32, 8, 3, 5000, 3001, 64)]


def new_of(dtype: torch.dtype) -> Callable:
    return lambda *shape: torch.randn(*shape, device="cuda", dtype=torch.bfloat16).to(dtype)


def int32(values) -> torch.Tensor:
    return torch.as_tensor(values, device="cuda").to(torch.int32)


def timed(count: int, *tensors: torch.Tensor, **options: torch.Tensor) -> float:
    """us of a call of paged_attention_fwd, of so many in a graph."""

    def call(_: int) -> None:
        pagedkv.paged_attention_fwd(*tensors, **options)

    graph = capture(call, count)
    time_us(graph, count, 1)
    return round(statistics.median(time_us(graph, count, 1) for _ in range(5)), 1)


def decodes(dtype: torch.dtype):
    for q_heads, kv_heads, batch, context, page in DECODES:
        per = -(-context // page)
        q = new_of(torch.bfloat16)(batch, q_heads, DIM)
        tables, lens = int32(torch.randperm(batch * per)).view(batch, per), int32([context] * batch)
        for layout, make in LAYOUTS.items():
            k, v = make(new_of(dtype), batch * per, page, kv_heads)
            tensors, out = (q, k, v, tables, lens), torch.empty_like(q)
            plan = pagedkv.plan_attention(*tensors)
            us = timed(20, *tensors, plan=plan, out=out)
            rate = 2 * batch * context * kv_heads * DIM * k.element_size() / us / 1e6
            shape = f"decode {batch} x {context}, {q_heads}/{kv_heads} heads, page {page}, {str(dtype)[6:]}"
            yield {"shape": shape, "layout": layout, "us": us, "TB/s": round(rate, 3)}


def prefills():
    for q_heads, kv_heads, batch, new, past, page in PREFILLS:
        context = new + past
        per, flops = -(-context // page), 4 * DIM * q_heads * batch * (new * past + new * (new + 1) / 2)
        q = new_of(torch.bfloat16)(batch * new, q_heads, DIM)
        out, lens = torch.empty_like(q), int32([context] * batch)
        pages = int32(torch.randperm(batch * per)).view(batch, per)
        ragged = new_of(torch.bfloat16)(2, batch * context + 3, kv_heads, DIM)
        dense = ragged[:, 3:].reshape(2, batch, context, kv_heads, DIM)
        starts, zeros = int32(torch.arange(batch) * context + 3), int32([[0]] * batch)
        calls = {name: (*make(new_of(torch.bfloat16), batch * per, page, kv_heads), pages, lens) for name, make in LAYOUTS.items()}
        calls |= {"a dense batch": (*dense, int32(torch.arange(batch))[:, None], lens)}
        shape = f"prefill {batch} x {new} after {past}, {q_heads}/{kv_heads} heads, page {page}, bfloat16"
        for layout, tensors in (calls | {"ragged keys in one tensor": (*ragged[:, None], zeros, lens)}).items():
            more = {"key_starts": starts} if "ragged" in layout else {}
            us = timed(5, q, *tensors, out=out, **more)
            yield {"shape": shape, "layout": layout, "us": us, "TFLOP/s": round(flops / us / 1e6, 1)}


def main() -> None:
    options = make_parser(__doc__).parse_args()
    rows = []
    for source in (decodes(torch.bfloat16), decodes(torch.float8_e4m3fn), prefills()):
        for row in source:
            rows.append(row)
            print(*row.values(), sep="  ", flush=True)
    record_run(options, "layouts-cuda", rows)


if __name__ == "__main__":
    main()
