"""Decode attention on CUDA against the floor of reading its keys and values once.

Three calls of every row. `unplanned_us` is the plain call, which makes its plan. `late_us` has a plan that was made
before (plan_attention), as the peers' rows have theirs. `us` is as in a layer of the engine: planned, and with
past_is_constant, so that a launch may read keys while the one before it comes to its end. `of_peer`, `late_of_peer`
and `unplanned_of_peer` are shares of the time of the better of FlashAttention-3 and FlashInfer on an H200
(peers.json). `of_plain` compares more queries, fp8 and num_splits (what batch invariance costs) with the same row
without them. Page order is random, inputs rotate over at least 600 MB, launches run as one CUDA graph. Burst: 50 ms
idle, one replay, median of 5. Sustained (page 16): 150 ms of the same load, then 100 ms. All of it takes some
minutes.

    python benchmarks/attention_cuda.py [--rows 128x2048] [--no-record]
"""

import argparse
import random
import statistics
import time

import torch
from peers import best_decode_us
from record import add_record_option, record

import pagedkv
from pagedkv import ops

# batch, context (0: ragged, 100 to 2048)
ROWS = {
    "1x1024": (1, 1024), "1x8192": (1, 8192), "1x32768": (1, 32768), "8x8192": (8, 8192), "32x4096": (32, 4096),
    "64x1024": (64, 1024), "128x2048": (128, 2048), "256x1024": (256, 1024), "256xragged": (256, 0),
}  # fmt: skip
HEADS = (16, 8), (32, 8), (64, 8), (64, 4)  # query, KV
# rows, query/KV heads, head_dim, page, queries per sequence, cache dtype, num_splits
CASES = [(row, heads, 128, page, 1, "bfloat16", 0)
         for page in (16, 64) for heads in HEADS for row in ROWS]
CASES += [("32x4096", (32, 8), 128, 16, queries, "bfloat16", 0) for queries in (2, 4, 8, 16)]
CASES += [("128x2048", (32, 8), 128, 16, 1, "float8_e4m3fn", 0), ("64x4096", (16, 8), 256, 16, 1, "bfloat16", 0),
          ("128x2048", (16, 8), 128, 16, 1, "bfloat16", 1), ("128x2048", (16, 8), 128, 16, 1, "bfloat16", 4)]


def make_graphs(row, heads, head_dim, page, queries, cache_dtype, num_splits):
    """Captured graphs of many launches, overlapped, planned and neither; how many; the bytes that one must read."""
    batch, context = ROWS[row] if row in ROWS else map(int, row.split("x"))
    q_heads, kv_heads = heads
    lens = [context or random.Random(7 + i).randint(100, 2048) for i in range(batch)]
    pages = [-(-n // page) for n in lens]
    nbytes = 2 * sum(lens) * kv_heads * head_dim * (2 if cache_dtype == "bfloat16" else 1)
    copies = max(1, round(600e6 / nbytes + 0.5))
    pool = torch.randn(2, sum(pages) * copies, page, kv_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    k_cache, v_cache = pool.to(getattr(torch, cache_dtype))
    order = torch.randperm(sum(pages) * copies, device="cuda", dtype=torch.int32)
    tables = torch.full((copies, batch, max(pages)), -1, device="cuda", dtype=torch.int32)
    taken = 0
    for copy in range(copies):
        for seq, n in enumerate(pages):
            tables[copy, seq, :n] = order[taken : taken + n]
            taken += n
    q = torch.randn(batch * queries, q_heads, head_dim, device="cuda", dtype=torch.bfloat16)
    context_lens = torch.tensor(lens, device="cuda", dtype=torch.int32)
    out = torch.empty_like(q)

    launches = max(copies, int(3e-3 / (nbytes / 4.3e12 + 2e-6)))
    arguments = dict(num_splits=num_splits)
    plan = pagedkv.plan_attention(q, k_cache, v_cache, tables[0], context_lens, **arguments)
    graphs = []
    for given in ((plan, True), (plan, False), (None, False)):
        arguments |= dict(zip(("plan", "past_is_constant"), given))
        pagedkv.paged_attention_fwd(q, k_cache, v_cache, tables[0], context_lens, out=out, **arguments)
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            for i in range(launches):
                pagedkv.paged_attention_fwd(q, k_cache, v_cache, tables[i % copies], context_lens, out=out, **arguments)
    return graphs, launches, nbytes


def time_us(graph: torch.cuda.CUDAGraph, launches: int, replays: int) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / replays / launches


def burst_us(graph: torch.cuda.CUDAGraph, launches: int) -> list[float]:
    burst = []
    for _ in range(5):
        time.sleep(0.05)
        burst.append(time_us(graph, launches, 1))
    return burst


def measure(case, medians: dict) -> dict:
    row, heads, head_dim, page, queries, cache_dtype, num_splits = case
    (graph, late, unplanned), launches, nbytes = make_graphs(*case)
    time_us(graph, launches, 2)
    burst = burst_us(graph, launches)
    median = statistics.median(burst)
    result = dict(row=row, heads=f"{heads[0]}/{heads[1]}", head_dim=head_dim, page=page, queries=queries, cache=cache_dtype,
                  num_splits=num_splits, us=round(median, 2), us_min=round(min(burst), 2), us_max=round(max(burst), 2),
                  bytes=nbytes, gb_per_s=round(nbytes / median / 1e3))
    if page == 16:
        replays = max(1, int(0.1e6 / (median * launches)))
        time_us(graph, launches, replays * 3 // 2 + 1)
        result["sustained_us"] = round(time_us(graph, launches, replays), 2)
    times = {"": median, "late_": statistics.median(burst_us(late, launches)),
             "unplanned_": statistics.median(burst_us(unplanned, launches))}
    result |= {f"{name}us": round(us, 2) for name, us in times.items()}
    plain = (row, heads, head_dim, page, 1, "bfloat16", 0)
    if case != plain and plain in medians:
        result["of_plain"] = round(median / medians[plain], 3)
    medians[case] = median
    peer = best_decode_us(row, result["heads"], page, nbytes) if case == plain and head_dim == 128 else None
    if peer:
        result["best_peer_us"] = round(peer, 2)
        result |= {f"{name}of_peer": round(us / peer, 3) for name, us in times.items()}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    add_record_option(parser)
    args = parser.parse_args()
    results, medians = [], {}
    for case in CASES:
        if args.rows in case[0]:
            results.append(measure(case, medians))
            print(*(f"{name}={value}" for name, value in results[-1].items()), flush=True)
            torch.cuda.empty_cache()
    ops.check_errors()
    if not args.no_record:
        record("attention-cuda-decode", results, machine={"gpu": torch.cuda.get_device_name()},
               versions={"torch": torch.__version__, "cuda": torch.version.cuda})


if __name__ == "__main__":
    main()
