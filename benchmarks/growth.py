"""How decode attention's time grows: with the keys of one sequence, with the number of short ones, and with the pool.

    python benchmarks/growth.py [--parts keys sequences pool] [--most-keys 2097152] [--most-sequences 4096]
                                [--device cuda] [--no-record]

keys       one sequence of 1,024, 2,048 ... 2M keys: from 32,768 on the time should be linear in bytes
sequences  1, 2, 4 ... 4,096 sequences of 16 keys: a launch, and then bytes
pool       32 sequences of 4,096 keys: in a pool of their own; at the far end of one with more than 2^31 elements a
           cache, where an offset of 32 bits would not reach; and spread over 10^6 pages

16/8 heads of 128, pages of 16, bfloat16. `us` has a plan that was made before, without past_is_constant; `unplanned_us`
is the plain call. Graphs of many launches, rotating tables and bursts are those of attention_cuda.py. The pool of 10^6
pages takes 66 GB; on a smaller card, leave `pool` out.

Writes results/growth-<device>.json.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator

import torch
from attention_cuda import Inputs, burst_us, time_us
from record import make_parser, record_run

HEADS, HEAD_DIM, PAGE = (16, 8), 128, 16
PAGE_ELEMENTS = PAGE * HEADS[1] * HEAD_DIM  # of a cache
SHORT = 16  # keys
POOL_ROW = 32, 4096  # sequences, keys
PARTS = ("keys", "sequences", "pool")


def doublings(first: int, last: int) -> list[int]:
    numbers = [first]
    while numbers[-1] * 2 <= last:
        numbers.append(numbers[-1] * 2)
    return numbers


def cases(args: argparse.Namespace) -> Iterator[tuple[str, str, int, int, dict]]:
    """Part, name, sequences, keys of each, options of Inputs."""
    if "keys" in args.parts:
        for keys in doublings(1024, args.most_keys):
            yield "keys", f"1x{keys}", 1, keys, {}
    if "sequences" in args.parts:
        for count in doublings(1, args.most_sequences):
            yield "sequences", f"{count}x{SHORT}", count, SHORT, {}
    if "pool" in args.parts:
        count, keys = args.pool_row
        far = args.far_elements // PAGE_ELEMENTS + 4 * count * keys // PAGE  # more than the tables name, beside the rest
        yield "pool", "pool of its own", count, keys, {}
        yield "pool", "far end", count, keys, {"num_pages": far, "is_far": True}
        yield "pool", "among many", count, keys, {"num_pages": args.most_pages}


def measure(part: str, name: str, count: int, keys: int, options: dict, device: str) -> dict:
    inputs = Inputs([keys] * count, HEADS, HEAD_DIM, PAGE, device=device, **options)
    row = {"part": part, "row": name, "sequences": count, "keys": keys, "bytes": inputs.nbytes,
           "pages": len(inputs.k_cache), "launches": inputs.launches}  # fmt: skip
    graphs = {"": inputs.capture(plan=inputs.make_plan()), "unplanned_": inputs.capture()}
    for call, graph in graphs.items():
        time_us(graph, inputs.launches, 1)
        burst = burst_us(graph, inputs.launches)
        us = statistics.median(burst)
        row |= {f"{call}us": round(us, 2), f"{call}us_min": round(min(burst), 2), f"{call}us_max": round(max(burst), 2),
                f"{call}gb_per_s": round(inputs.nbytes / us / 1e3, 1)}  # fmt: skip
    return row


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--most-keys", type=int, default=1 << 21)
    parser.add_argument("--most-sequences", type=int, default=4096)
    parser.add_argument("--pool-row", nargs=2, type=int, default=POOL_ROW, metavar=("SEQUENCES", "KEYS"))
    parser.add_argument("--far-elements", type=int, default=1 << 31, help="of a cache before the far end's pages")
    parser.add_argument("--most-pages", type=int, default=1_000_000, help="of the largest pool")
    args = parser.parse_args()
    rows = []
    for case in cases(args):
        rows.append(measure(*case, args.device))
        print(*(f"{name}={value}" for name, value in rows[-1].items()), flush=True)
        if args.device != "cpu":
            torch.cuda.empty_cache()
    record_run(args, f"growth-{args.device}", rows, args.device)


if __name__ == "__main__":
    main()
