"""One model on one, two and more GPUs: random weights, bfloat16.

    python benchmarks/ranks.py [--models 0.6B 8B 32B] [--ranks 1 2] [--runs 2] [--parts one nano first]

one    tokens/s of a request alone: 128 tokens in, 512 out
nano   tokens/s of 256 requests at once (pagedkv/cli/nano_bench.py)
first  tokens/s of a prompt of 30,000 tokens, until its first token is there

Medians of the runs behind one that warms up, beside the figure of the first number of ranks. For `one` also the share of
the floor: the time in which each rank's share of the weights is read, at 4,540 GB/s. Writes results/ranks-<device>.json.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rates import LONG_PROMPT, Rates
from record import make_parser, record_run

from pagedkv.cli import nano_bench

PARTS = ("one", "nano", "first")
READ = 4540e9  # bytes a second of an H200
VOCABULARY = 151_936


def floor(size: str, num_ranks: int) -> float:
    """Tokens a second of one request, by the bytes of the weights alone."""
    hidden, intermediate, layers, q_heads, kv_heads, _ = nano_bench.SHAPES[size]
    layer = hidden * (2 * q_heads + 2 * kv_heads) * 128 + 3 * hidden * intermediate
    return READ * num_ranks / (2.0 * (layers * layer + VOCABULARY * hidden))


def rows(size: str, num_ranks: int, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as scratch:
        llm = nano_bench.make_llm(
            nano_bench.write_shape(size, Path(scratch)), nano_bench.make_workload(), device=args.device,
            load_format="dummy", tensor_parallel_size=num_ranks, max_model_len=LONG_PROMPT + 256,
        )  # fmt: skip
    with llm:
        rates = Rates(llm)
        for part in args.parts:
            found = [getattr(rates, part)() for _ in range(args.runs + 1)][1:]
            row = {"model": size, "ranks": num_ranks, "part": part, "tokens_per_second": statistics.median(found)}
            share = {"floor": floor(size, num_ranks)} if part == "one" else {}
            yield row | share | {"runs": found}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["0.6B", "8B", "32B"], choices=nano_bench.SHAPES)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=2, help="of each part, behind the first (default: 2)")
    args = parser.parse_args()
    found: list[dict[str, Any]] = []
    for size in args.models:
        alone: dict[str, float] = {}
        for num_ranks in args.ranks:
            for row in rows(size, num_ranks, args):
                speed = row["tokens_per_second"]
                times = speed / alone.setdefault(row["part"], speed)
                of_floor = f", {speed / row['floor']:.0%} of the floor" if "floor" in row else ""
                print(f"{size} on {num_ranks}, {row['part']}: {speed:,.1f} tokens/s, {times:.2f} times{of_floor}", flush=True)
                found.append(row)
    record_run(args, f"ranks-{args.device}", found, args.device)


if __name__ == "__main__":
    main()
