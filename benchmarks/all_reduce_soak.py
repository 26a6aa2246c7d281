"""Replays of a graph of 72 all_reduces, as many as 36 layers have, by ranks that are late at random: no hang, the same bits.

    python benchmarks/all_reduce_soak.py [--devices 0 1] [--replays 1000000] [--memory auto] [--seconds 500]

Each rank captures a few graphs of the same calls, of 1 to 64 rows, with copies of random sizes between them that the other
ranks do not have, and replays one or the other, after a pause now and then. Each sum is the next one's residual, so a word that
was late or of another turn changes all that follows. The end of the chain is compared by its bits after every hundredth
replay, on all ranks, with NumPy's. Stops after so many seconds. Writes results/all-reduce-soak.json.
"""

from __future__ import annotations

import argparse
import json
import time

import numpy as np
from gpu_ranks import add_rank_options, machine, run_ranks
from record import make_parser, record

from pagedkv import Graph, Stream, asarray, empty, ops

CALLS, WIDTH, GRAPHS, LOOK = 72, 4096, 4, 100
ROWS = [1, 2, 4, 16, 64]
MOST_COPIED = 1 << 22  # bytes, which take some microseconds


def rounded(x: np.ndarray) -> np.ndarray:
    """To bfloat16, to the nearest, ties to even; finite numbers."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) & 0xFFFF0000).view(np.float32)


def parts(rank: int) -> list[np.ndarray]:
    """What a rank adds in each call, which every rank can make for all."""
    rng = np.random.default_rng([7, rank])
    return [rounded(rng.standard_normal((ROWS[-1], WIDTH), np.float32)) for _ in range(CALLS)]


def expected(size: int, rows: list[int]) -> np.ndarray:
    of_ranks = [parts(rank) for rank in range(size)]
    chain = np.zeros((ROWS[-1], WIDTH), np.float32)
    for i, count in enumerate(rows):
        total = np.zeros((count, WIDTH), np.float32)
        for each in of_ranks:
            total += each[i][:count]
        chain[:count] = rounded(total + chain[:count])
    return chain


class Rank:
    def __init__(self, comm: ops.Communicator) -> None:
        self.comm, self.rng = comm, np.random.default_rng([8, comm.rank])
        self.stream = Stream(comm.device)
        rows = np.random.default_rng(9).choice(ROWS, CALLS).tolist()
        self.wanted = expected(comm.size, rows)
        own = zip(parts(comm.rank), rows, strict=True)
        self.parts = [asarray(each[:count], "bfloat16", comm.device) for each, count in own]
        self.chain = empty((ROWS[-1], WIDTH), "bfloat16", comm.device)
        self.zeros = asarray(np.zeros((ROWS[-1], WIDTH), np.float32), "bfloat16", comm.device)
        self.copied = [empty((MOST_COPIED,), "uint8", comm.device) for _ in range(2)]
        with self.stream:
            self.calls(late=False)  # what is loaded at the first use
            self.graphs = [self.capture() for _ in range(GRAPHS)]

    def calls(self, late: bool) -> None:
        self.chain.copy_(self.zeros)
        for part in self.parts:
            if late and self.rng.random() < 0.1:
                count = int(self.rng.integers(1, MOST_COPIED))
                self.copied[0][:count].copy_(self.copied[1][:count])
            ops.all_reduce(part, self.comm, residual=self.chain[: len(part)], out=self.chain[: len(part)])

    def capture(self) -> Graph:
        graph = Graph()
        with graph.capture(self.stream):
            self.calls(late=True)
        return graph

    def replay(self, count: int, seconds: float) -> int:
        """How many there were. All ranks stop at the same one, because the first one's clock is sent around."""
        end, done = time.monotonic() + seconds, 0
        clock = empty((1, 1), "float32", self.comm.device)
        with self.stream:
            while done < count:
                for graph in self.rng.choice(GRAPHS, LOOK).tolist():
                    if self.rng.random() < 0.02:
                        time.sleep(self.rng.random() * 1e-3)
                    self.graphs[graph].replay()
                done += LOOK
                found = asarray(asarray(self.chain, device="cpu"), "float32").numpy()
                self.comm.check()
                if not (found == self.wanted).all():
                    raise SystemExit(f"rank {self.comm.rank}: other bits after {done} replays")
                is_over = float(self.comm.rank == 0 and time.monotonic() > end)
                clock.copy_(asarray(np.full((1, 1), is_over, np.float32)))
                if asarray(ops.all_reduce(clock, self.comm), device="cpu").numpy()[0, 0]:
                    break
        return done


def run_rank(args: argparse.Namespace) -> None:
    device = f"cuda:{args.devices[args.rank]}"
    comm = ops.Communicator(args.rank, len(args.devices), args.file, device, join_timeout=60, memory=args.memory)
    rank = Rank(comm)
    start = time.monotonic()
    done = rank.replay(args.replays, args.seconds)
    if args.rank == 0:
        seconds = time.monotonic() - start
        print(json.dumps({
            "ranks": comm.size, "memory": comm.memory, "replays": done, "calls": CALLS * done, "other_bits": 0,
            "us_per_call": round(seconds / done / CALLS * 1e6, 2),
        }))  # fmt: skip
    comm.close()


def run_all(args: argparse.Namespace) -> None:
    options = "--replays", args.replays, "--seconds", args.seconds, "--memory", args.memory
    said = run_ranks(__file__, args.devices, *options)
    if not args.no_record:
        record("all-reduce-soak", [json.loads(said)], machine=machine(args.devices))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--replays", type=int, default=1_000_000)
    parser.add_argument("--seconds", type=float, default=500)
    parser.add_argument("--memory", default="auto", choices=["auto", "host"])
    add_rank_options(parser)
    args = parser.parse_args()
    run_all(args) if args.rank is None else run_rank(args)


if __name__ == "__main__":
    main()
