"""Decode attention on CUDA against the floor of reading its keys and values once.

Three calls of every row. `unplanned_us` is the plain call, which makes its plan. `late_us` has a plan that was made
before (plan_attention), as the peers' rows have theirs. `us` is as in a layer of the engine: planned, and with
past_is_constant, so that a launch may read keys while the one before it comes to its end. `of_peer`, `late_of_peer`
and `unplanned_of_peer` are shares of the time of the better of FlashAttention-3 and FlashInfer on an H200
(peers.json). `of_plain` compares more queries (queries.py), fp8 and num_splits (what batch invariance costs) with the
same row without them. Page order is random, inputs rotate over at least 600 MB, launches run as one CUDA graph. Burst: 50 ms
idle, one replay, median of 5. Sustained (page 16): 150 ms of the same load, then 100 ms. All of it takes some
minutes.

    python benchmarks/attention_cuda.py [--rows 128x2048] [--no-record]
"""

import random
import statistics
import time
from collections.abc import Callable

import torch
from peers import best_decode_us
from record import make_parser, record_run

import pagedkv

# batch, context (0: ragged, 100 to 2048)
ROWS = {
    "1x1024": (1, 1024), "1x8192": (1, 8192), "1x32768": (1, 32768), "8x8192": (8, 8192), "32x4096": (32, 4096),
    "64x1024": (64, 1024), "128x2048": (128, 2048), "256x1024": (256, 1024), "256xragged": (256, 0),
}  # fmt: skip
HEADS = (16, 8), (32, 8), (64, 8), (64, 4)  # query, KV
ROTATED_BYTES = 600e6  # of keys and values, at least
MOST_TABLES = 4000  # some 10,000 launches in one graph are timed wrongly
# rows, query/KV heads, head_dim, page, queries per sequence, cache dtype, num_splits
CASES = [(row, heads, 128, page, 1, "bfloat16", 0)
         for page in (16, 64) for heads in HEADS for row in ROWS]
CASES += [("128x2048", (32, 8), 128, 16, 1, "float8_e4m3fn", 0), ("64x4096", (16, 8), 256, 16, 1, "bfloat16", 0),
          ("128x2048", (16, 8), 128, 16, 1, "bfloat16", 1), ("128x2048", (16, 8), 128, 16, 1, "bfloat16", 4)]


class Inputs:
    """The tensors of one batch of equal numbers of queries: pages in random order, and several tables over them, which
    launches take in turn, so that none finds its keys in the L2 cache."""

    def __init__(self, lens: list[int], heads: tuple[int, int], head_dim: int, page: int, *, queries: int = 1,
                 cache_dtype: str = "bfloat16", device: str = "cuda", num_pages: int | None = None,
                 is_far: bool = False) -> None:
        """`num_pages` in the pool: else as many as the tables name; is_far: those named are the last of them."""
        q_heads, kv_heads = heads
        pages = [-(-n // page) for n in lens]
        self.nbytes = 2 * sum(lens) * kv_heads * head_dim * (2 if cache_dtype == "bfloat16" else 1)
        self.copies = copies = max(1, min(MOST_TABLES, round(ROTATED_BYTES / self.nbytes + 0.5)))
        named = sum(pages) * copies
        num_pages = num_pages or named
        pool = torch.randn(2, num_pages, page, kv_heads, head_dim, device=device, dtype=torch.bfloat16)
        self.k_cache, self.v_cache = pool.to(getattr(torch, cache_dtype))
        if is_far:
            order = torch.randperm(named, device=device, dtype=torch.int32) + (num_pages - named)
        else:
            order = torch.randperm(num_pages, device=device, dtype=torch.int32)[:named]
        self.tables = torch.full((copies, len(lens), max(pages)), -1, device=device, dtype=torch.int32)
        for i, part in enumerate(order.split(pages * copies)):
            self.tables[i // len(lens), i % len(lens), : len(part)] = part
        self.q = torch.randn(len(lens) * queries, q_heads, head_dim, device=device, dtype=torch.bfloat16)
        self.context_lens = torch.tensor(lens, device=device, dtype=torch.int32)
        self.out = torch.empty_like(self.q)

    @property
    def launches(self) -> int:
        """Of a graph: some milliseconds."""
        return max(self.copies, int(3e-3 / (self.nbytes / 4.3e12 + 2e-6)))

    def make_plan(self, **options) -> torch.Tensor:
        """It lives as long as the inputs: graphs read both."""
        self.plan = pagedkv.plan_attention(self.q, self.k_cache, self.v_cache, self.tables[0], self.context_lens, **options)
        return self.plan

    def capture(self, **options) -> "torch.cuda.CUDAGraph | Loop":
        """Of all launches with these options of paged_attention_fwd."""
        def launch(i: int) -> None:
            pagedkv.paged_attention_fwd(self.q, self.k_cache, self.v_cache, self.tables[i % self.copies],
                                        self.context_lens, out=self.out, **options)

        return capture(launch, self.launches, self.q.device.type)


class Loop:
    """Stands for a graph on the CPU, where a benchmark is tried out."""

    def __init__(self, launch: Callable[[int], None], launches: int) -> None:
        self.launch, self.launches = launch, launches

    def replay(self) -> None:
        for i in range(self.launches):
            self.launch(i)


def capture(launch: Callable[[int], None], launches: int, device: str = "cuda") -> torch.cuda.CUDAGraph | Loop:
    launch(0)
    if device == "cpu":
        return Loop(launch, launches)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(launches):
            launch(i)
    return graph


def make_graphs(row, heads, head_dim, page, queries, cache_dtype, num_splits, device):
    """Captured graphs of many launches, overlapped, planned and neither, and what they read."""
    batch, context = ROWS[row] if row in ROWS else map(int, row.split("x"))
    lens = [context or random.Random(7 + i).randint(100, 2048) for i in range(batch)]
    inputs = Inputs(lens, heads, head_dim, page, queries=queries, cache_dtype=cache_dtype, device=device)
    plan, options = inputs.make_plan(num_splits=num_splits), dict(num_splits=num_splits)
    graphs = [inputs.capture(plan=a_plan, past_is_constant=is_constant, **options)
              for a_plan, is_constant in ((plan, True), (plan, False), (None, False))]
    return graphs, inputs


def time_us(graph: torch.cuda.CUDAGraph | Loop, launches: int, replays: int) -> float:
    if isinstance(graph, Loop):
        start = time.perf_counter()
        for _ in range(replays):
            graph.replay()
        return (time.perf_counter() - start) * 1e6 / replays / launches
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(replays):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / replays / launches


def burst_us(graph: torch.cuda.CUDAGraph | Loop, launches: int) -> list[float]:
    burst = []
    for _ in range(5):
        time.sleep(0.05)
        burst.append(time_us(graph, launches, 1))
    return burst


def measure(case, medians: dict, device: str = "cuda") -> dict:
    row, heads, head_dim, page, queries, cache_dtype, num_splits = case
    (graph, late, unplanned), inputs = make_graphs(*case, device)
    launches, nbytes = inputs.launches, inputs.nbytes
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
    parser = make_parser(__doc__)
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    args = parser.parse_args()
    results, medians = [], {}
    for case in CASES:
        if args.rows in case[0]:
            results.append(measure(case, medians))
            print(*(f"{name}={value}" for name, value in results[-1].items()), flush=True)
            torch.cuda.empty_cache()
    record_run(args, "attention-cuda-decode", results)


if __name__ == "__main__":
    main()
