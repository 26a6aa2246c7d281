"""all_reduce between the GPUs of one machine, in a CUDA graph: microseconds a call, by rows and by the way that it takes.

    python benchmarks/all_reduce_cuda.py [--devices 0 1] [--width 4096] [--rows 1 16 64 256] [--no-record]

Each rank is a process with a GPU of its own. A graph of 200 calls (of 20 where a call takes long) is replayed 9 times; the
figure is the median of rank 0's times between two events, which holds what ranks wait for each other. `fused` adds the
residual and leaves the rows' sums of squares: what a decoder's layer does. GB/s is what leaves a GPU in one shot: x times
the other ranks. With one device given twice both ranks share it and take turns: that shows that it works, and no time.
"""

from __future__ import annotations

import argparse
import json
import statistics

import numpy as np
from gpu_ranks import add_rank_options, machine, run_ranks
from record import make_parser, record

from pagedkv import Event, Graph, Stream, asarray, empty, ops

WAYS = ["one-shot", "two-shots", "simple"]
REPLAYS = 9


def timed(comm: ops.Communicator, rows: int, width: int, fused: bool) -> float:
    """Microseconds of a call."""
    calls = 200 if rows <= 512 else 20
    stream, graph = Stream(comm.device), Graph()
    x, out = (empty((rows, width), "bfloat16", comm.device) for _ in range(2))
    ones = asarray(np.ones((rows, width), np.float32), "bfloat16", comm.device)
    squares = empty((rows, 1), "float32", comm.device)
    options = {"residual": ones, "out_squares": squares} if fused else {}
    with stream:
        x.copy_(ones)
        ops.all_reduce(x, comm, out=out, **options)  # what is loaded at the first use
        with graph.capture(stream):
            for _ in range(calls):
                ops.all_reduce(x, comm, out=out, **options)
        times = []
        for _ in range(REPLAYS + 2):
            start, end = Event(timing=True, device=comm.device), Event(timing=True, device=comm.device)
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            comm.check()
            times.append(start.elapsed_ms(end) * 1e3 / calls)
    expected = comm.size + fused
    if not (np.array(asarray(out, device="cpu").tolist()) == expected).all():
        raise SystemExit(f"{rows} rows: not {expected} everywhere")
    return statistics.median(times[2:])


def run_rank(args: argparse.Namespace) -> None:
    rank, size, way = args.rank, len(args.devices), args.way
    comm = ops.Communicator(rank, size, args.file, f"cuda:{args.devices[rank]}", way=way)
    for rows in args.rows:
        for fused in (False, True):
            us = timed(comm, rows, args.width, fused)
            sent = rows * args.width * 2 * (size - 1)
            row = {"way": way, "ranks": size, "rows": rows, "width": args.width, "fused": fused}
            if rank == 0:
                print(json.dumps(row | {"us": round(us, 2), "gb_s": round(sent / us / 1e3, 1)}), flush=True)
    comm.close()


def run_all(args: argparse.Namespace) -> None:
    found = []
    for way in WAYS:
        said = run_ranks(__file__, args.devices, "--way", way, "--width", args.width, "--rows", *args.rows)
        found += [json.loads(line) for line in said.splitlines()]
    if not args.no_record:
        record("all-reduce-cuda", found, machine=machine(args.devices))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 4, 16, 64, 128, 256, 2048, 8192])
    parser.add_argument("--way", choices=WAYS, help=argparse.SUPPRESS)
    add_rank_options(parser)
    args = parser.parse_args()
    run_all(args) if args.rank is None else run_rank(args)


if __name__ == "__main__":
    main()
