"""How long a step is on its way from the first rank to another one.

    python benchmarks/lab/engine/ring.py [--ranks 2] [--interval 1.0]

Records of a step that decodes 256 sequences, with and without new block tables, one each `interval` milliseconds, during
which the writer computes, as an engine's thread does. A time begins before tell() and ends when the reader has a record's
arrays. The processes are a fork's: nothing of an engine runs here. NOTES.md has figures.
"""

from __future__ import annotations

import argparse
import os
import socket
import time

import numpy as np

from pagedkv.parallel.ring import Kind, Reader, Writer, memory_file, ring_bytes

NUM_SEQS, NUM_STEPS, TABLE_PAGES = 256, 2000, 128
STEP_BYTES = NUM_SEQS * (8 + 4 + 4 * 4)


def read(reader: Reader, name: str) -> None:
    times = []
    while (record := reader.receive()) is not None:
        times.append(time.monotonic_ns() - int(record.arrays[0][:8].view(np.int64)[0]))
        reader.done(record)
    percentiles = np.percentile(np.array(times[100:]) / 1e3, [10, 50, 90, 99])
    print(f"{name}: rank {reader.rank} has a step after", ", ".join(f"{us:.1f}" for us in percentiles), "us", flush=True)


def measure(num_ranks: int, interval: float, tables: np.ndarray, name: str) -> None:
    slot_bytes = 1 << 20
    fd = memory_file("ring", ring_bytes(num_ranks, slot_bytes))
    pairs = [socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(1, num_ranks)]
    for i, (_, bell) in enumerate(pairs):
        if os.fork() == 0:
            for ours, _ in pairs:
                ours.close()
            read(Reader(fd, bell, i + 1, num_ranks, slot_bytes), name)
            os._exit(0)
    writer = Writer(fd, [ours for ours, _ in pairs], slot_bytes, lambda seconds: None)
    arrays, took = np.zeros(STEP_BYTES, np.uint8), []
    for _ in range(NUM_STEPS):
        end = time.monotonic_ns() + int(interval * 1e6)
        while time.monotonic_ns() < end:
            sum(range(100))
        start = time.monotonic_ns()
        arrays[:8].view(np.int64)[0] = start
        writer.send(Kind.STEP, tuple(range(11)), arrays, tables)
        took.append(time.monotonic_ns() - start)
    for ours, theirs in pairs:
        ours.close()
        theirs.close()
    while True:
        try:
            os.wait()
        except ChildProcessError:
            break
    print(f"{name}: telling takes {np.median(took) / 1e3:.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--interval", type=float, default=1.0, help="milliseconds")
    args = parser.parse_args()
    measure(args.ranks, args.interval, np.empty(0, np.int32), "same tables")
    measure(args.ranks, args.interval, np.zeros((NUM_SEQS, TABLE_PAGES), np.int32), "new tables")


if __name__ == "__main__":
    main()
