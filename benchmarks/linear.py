"""`linear` on the CPU at Qwen3-0.6B's shapes against torch.nn.functional.linear, in one run.

    python benchmarks/linear.py [--threads 2] [--seconds 0.5] [--dtypes float32,bfloat16]

Weights are cold, as in a model: several copies are walked in turn, more than any cache holds. The two are measured in
alternating phases (never at once: both keep threads), each long enough for the other's threads to fall asleep. For few
rows the time is that of reading the weight, so GB/s of it stand beside what plain reading reaches here.
"""

from __future__ import annotations

import statistics
import time

import torch
from record import make_parser, record, version

import pagedkv
from pagedkv import ops

SHAPES = [(4096, 1024, "qkv"), (1024, 2048, "o"), (6144, 1024, "gate and up"), (1024, 3072, "down")]
ROWS = (1, 4, 16, 64, 512)
LM_HEAD = (151_936, 1024, "LM head")
COLD_BYTES = 256 << 20
PHASES = 3


def read_bandwidth() -> float:
    """GB/s of torch's sum over cold memory in huge pages; the best of 12."""
    ones = torch.from_dlpack(pagedkv.empty((COLD_BYTES // 4,))).fill_(1)

    def once() -> float:
        start = time.perf_counter()
        ones.sum()
        return ones.nbytes / (time.perf_counter() - start) / 1e9

    return max(once() for _ in range(12))


def phase(function, weights, seconds: float) -> list[float]:
    """Seconds of every call for so long; the first call of a phase wakes the threads and is left out."""
    function(weights[0])
    times, end, i = [], time.perf_counter() + seconds, 0
    while not times or time.perf_counter() < end:
        i += 1
        start = time.perf_counter()
        function(weights[i % len(weights)])
        times.append(time.perf_counter() - start)
    return times


def measure(outputs: int, size: int, rows: int, dtype: str, seconds: float) -> dict:
    torch_dtype = getattr(torch, dtype)
    count = max(2, COLD_BYTES // (outputs * size * torch_dtype.itemsize))
    weights = [torch.randn(outputs, size).to(torch_dtype) for _ in range(min(count, 4))]
    weights += [weights[i % 4].clone() for i in range(count - len(weights))]
    x, out = torch.randn(rows, size).to(torch_dtype), torch.empty(rows, outputs, dtype=torch_dtype)
    contestants = {
        "pagedkv": lambda w: ops.linear(x, w, out=out),
        "torch": lambda w: torch.nn.functional.linear(x, w),
    }
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(PHASES):
        for name, function in contestants.items():
            times[name] += phase(function, weights, seconds / PHASES)
    row = {"out_features": outputs, "in_features": size, "rows": rows, "dtype": dtype}
    weight_bytes, flops = outputs * size * torch_dtype.itemsize, 2 * outputs * size * rows
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        row |= {f"{name}_us": median * 1e6, f"{name}_us_quartiles": [low * 1e6, high * 1e6],
                f"{name}_best_us": min(values) * 1e6, f"{name}_gb_s": weight_bytes / median / 1e9,
                f"{name}_gflop_s": flops / median / 1e9}  # fmt: skip
    return row | {"speedup": row["torch_us"] / row["pagedkv_us"]}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--threads", type=int, default=ops.get_num_threads())
    parser.add_argument("--seconds", type=float, default=0.5, help="for each contestant and case")
    parser.add_argument("--dtypes", default="float32,bfloat16")
    args = parser.parse_args()
    ops.set_num_threads(args.threads)
    torch.set_num_threads(args.threads)
    bandwidth, info = read_bandwidth(), ops.build_info()
    print(f"{args.threads} threads, {info['isa']}, BLAS: {info['blas']}; reading memory: {bandwidth:.1f} GB/s")
    print(f"{'weight':<14}{'':13}{'rows':>5} {'dtype':<9}{'median us':>9} {'quartiles':>15}{'GB/s':>7}{'of read':>8}"
          f"{'GFLOP/s':>9}{'torch us':>10}{'speedup':>9}")  # fmt: skip
    cases = [(*shape, rows) for shape in SHAPES for rows in ROWS] + [(*LM_HEAD, 1)]
    results = []
    for dtype in args.dtypes.split(","):
        for outputs, size, name, rows in cases:
            r = measure(outputs, size, rows, dtype, args.seconds)
            r |= {"weight": name, "share_of_read_bandwidth": r["pagedkv_gb_s"] / bandwidth}
            results.append(r)
            low, high = r["pagedkv_us_quartiles"]
            print(f"{f'{outputs} x {size}':<14}{name:<13}{rows:>5} {dtype:<9}{r['pagedkv_us']:>9.0f} "
                  f"{f'{low:.0f}-{high:.0f}':>15}{r['pagedkv_gb_s']:>7.1f}{r['share_of_read_bandwidth']:>8.0%}"
                  f"{r['pagedkv_gflop_s']:>9.0f}{r['torch_us']:>10.0f}{r['speedup']:>9.2f}", flush=True)  # fmt: skip
    if not args.no_record:
        record("linear-cpu", results, machine={"threads": args.threads, "isa": info["isa"], "read_gb_s": bandwidth},
               versions={"torch": version("torch"), "blas": info["blas"]})  # fmt: skip


if __name__ == "__main__":
    main()
