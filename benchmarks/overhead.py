"""What a call costs around its work, beside calls that everybody knows: tiny shapes on the CPU.

    python benchmarks/overhead.py            prints a table and writes benchmarks/results/overhead-cpu.json

Nanoseconds are the median over `--repeats` samples of about 1 ms each, the loop itself subtracted; `best` is the
smallest, which a busy machine disturbs least. One thread: starting more is not what is measured. Taking a tensor is
measured in lists of 100: swap_blocks without pairs reads every tensor of both lists, checks it, and does nothing.
"""

import statistics
import time
from collections.abc import Callable

import numpy as np
from record import make_parser, record

import pagedkv
from pagedkv import ops


def measure(function: Callable[[], object], repeats: int) -> tuple[float, float]:
    """(median, best) ns of one call, with the cost of the empty loop subtracted."""

    def sample(call: Callable[[], object], rounds: range) -> float:
        start = time.perf_counter_ns()
        for _ in rounds:
            call()
        return (time.perf_counter_ns() - start) / len(rounds)

    once = max(sample(function, range(50)), 20)
    rounds = range(int(1e6 / once) + 1)
    samples = [sample(function, rounds) for _ in range(repeats)]
    return statistics.median(samples), min(samples)


class OnlyDLPack:
    """A producer that offers __dlpack__ and nothing faster."""

    def __init__(self, tensor: object):
        self.tensor = tensor

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, max_version: tuple[int, int]) -> object:
        return self.tensor.__dlpack__(max_version=max_version)


def calls() -> dict[str, Callable[[], object]]:
    x, weight, out = np.ones((1, 8), np.float32), np.ones(8, np.float32), np.ones((1, 8), np.float32)
    own = [pagedkv.asarray(a.copy()) for a in (x, weight, out)]
    shape, pairs = (1,), np.zeros((0, 2), np.int32)
    cache, v_cache = (np.ones((2, 4, 1, 8), np.float32) for _ in range(2))
    many = [pagedkv.asarray(cache.copy()) for _ in range(100)]
    key, slots = np.ones((1, 1, 8), np.float32), np.array([3])
    table, lens = np.array([[0]], np.int32), np.array([4], np.int32)
    rms_norm, add, empty, swap_blocks = ops.rms_norm, np.add, pagedkv.empty, pagedkv.swap_blocks
    get_num_threads = ops.get_num_threads
    found = {
        "nothing: ops.get_num_threads()": lambda: get_num_threads(),
        "numpy.add(x, y, out=z)": lambda: add(x, x, out=out),
        "empty(shape, dtype, device), no keyword": lambda: empty(shape, "float32", "cpu"),
        "empty(shape=, dtype=, device=), 3 keywords": lambda: empty(shape=shape, dtype="float32", device="cpu"),
        "rms_norm of pagedkv.Tensor, out given": lambda: rms_norm(own[0], own[1], out=own[2]),
        "rms_norm of NumPy, out given": lambda: rms_norm(x, weight, out=out),
        "rms_norm of NumPy, out allocated": lambda: rms_norm(x, weight),
        "store_kvcache, one token, NumPy": lambda: pagedkv.store_kvcache(key, key, cache, v_cache, slots),
        "paged_attention_fwd, one token, NumPy": lambda: pagedkv.paged_attention_fwd(key, cache, cache, table, lens),
        "100 pagedkv.Tensor": lambda: swap_blocks(many, many, pairs),
    }
    arrays = [cache.copy() for _ in range(100)]
    plain = [OnlyDLPack(t) for t in many]
    found["100 NumPy arrays by buffer"] = lambda: swap_blocks(arrays, many, pairs)
    found["100 tensors by __dlpack__ of pagedkv"] = lambda: swap_blocks(plain, many, pairs)
    try:
        import torch
    except ImportError:
        return found
    a, b, c = torch.ones(1, 8), torch.ones(8), torch.ones(1, 8)
    tensors = [torch.ones(2, 4, 1, 8) for _ in range(100)]
    plain_torch = [OnlyDLPack(t) for t in tensors]
    found |= {
        "torch.add(x, y, out=z)": lambda: torch.add(a, a, out=c),
        "rms_norm of torch, out given": lambda: rms_norm(a, b, out=c),
        "rms_norm of torch, out allocated": lambda: rms_norm(a, b),
        "100 torch tensors by exchange API": lambda: swap_blocks(tensors, many, pairs),
        "100 torch tensors by __dlpack__": lambda: swap_blocks(plain_torch, many, pairs),
        "torch.from_dlpack(pagedkv.Tensor)": lambda: torch.from_dlpack(own[0]),
        "pagedkv.from_dlpack(torch)": lambda: pagedkv.from_dlpack(a),
    }
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--repeats", type=int, default=200)
    options = parser.parse_args()
    repeats = options.repeats
    ops.set_num_threads(1)
    loop = measure(lambda: None, repeats)
    rows = []
    for name, call in calls().items():
        median, best = measure(call, repeats)
        rows.append({"call": name, "median_ns": round(median - loop[0], 1), "best_ns": round(best - loop[1], 1)})
    by_name = {row["call"]: row for row in rows}

    def difference(name: str, minuend: str, subtrahend: str, count: int) -> None:
        if minuend in by_name:
            of = {k: round((by_name[minuend][k] - by_name[subtrahend][k]) / count, 1) for k in ("median_ns", "best_ns")}
            rows.append({"call": name, **of})

    three, none = "empty(shape=, dtype=, device=), 3 keywords", "empty(shape, dtype, device), no keyword"
    difference("= 3 keywords instead of positions", three, none, 1)
    kinds = [name.removeprefix("100 ") for name in by_name if name.startswith("100 ") and name != "100 pagedkv.Tensor"]
    for kind in kinds:
        difference(f"= one of 100 {kind}, more than our own", f"100 {kind}", "100 pagedkv.Tensor", 100)
    for row in rows:
        print(f"{row['median_ns']:>10.1f} ns  (best {row['best_ns']:>9.1f})  {row['call']}")
    if not options.no_record:
        record("overhead-cpu", rows)


if __name__ == "__main__":
    main()
