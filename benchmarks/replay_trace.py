"""Replays a trace's prompts through BlockManager at several pool sizes: hit rate, evictions, time, of both evictions.

Every request is allocated, committed and freed before the next one, so that the hit rate is the prefix cache's alone.
The trace is JSON lines as in traces.py; a public one is mooncake_synthetic.jsonl of the Mooncake project. Without one a
small generated trace is replayed and nothing is recorded.
"""

import itertools
import time
from pathlib import Path

import numpy as np
import traces
from record import make_parser, record

from pagedkv import BlockManager, OutOfBlocks


def replay(prompts: list[np.ndarray], num_blocks: int, block_size: int, eviction: str) -> dict:
    manager = BlockManager(num_blocks, block_size, eviction=eviction)
    refused, times = 0, []
    for number, prompt in enumerate(prompts):
        start = time.perf_counter()
        try:
            manager.allocate(number, prompt)
            manager.commit(number, len(prompt))
            manager.free(number)
        except OutOfBlocks:
            refused += 1
        times.append(time.perf_counter() - start)
    stats = manager.stats()
    total = sum(len(prompt) for prompt in prompts)
    return {
        "block_size": block_size,
        "num_blocks": num_blocks,
        "eviction": eviction,
        "pool_tokens": num_blocks * block_size,
        "prompt_tokens": total,
        "hit_tokens": stats["hit_tokens"],
        "hit_rate": stats["hit_tokens"] / total,
        "evictions": stats["evictions"],
        "refused": refused,
        "seconds": sum(times),
        "median_request_us": float(np.median(times)) * 1e6,
        "p99_request_us": float(np.percentile(times, 99)) * 1e6,
        "pages_per_second": sum(-(-len(prompt) // block_size) for prompt in prompts) / sum(times),
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path, nargs="?", help="JSON lines, see traces.py")
    parser.add_argument("--block-size", type=int, nargs="+", default=[16, 256], help="token positions a page")
    parser.add_argument(
        "--pool-tokens", type=int, nargs="+", default=[250_000, 1_000_000, 4_000_000, 16_000_000],
        help="pool sizes in tokens; an unbounded pool is always measured too",
    )  # fmt: skip
    arguments = parser.parse_args()

    trace = traces.load(arguments.trace) if arguments.trace else traces.generate(np.random.default_rng(0), 1000)
    prompts = [traces.expand(*request) for request in trace]
    rows = []
    print(f"{len(prompts)} requests, {sum(map(len, prompts)):,} prompt tokens")
    print(" page  pool tokens  eviction  hit rate  evictions  refused  seconds  us/request")
    for block_size in arguments.block_size:
        reusable = traces.reusable_tokens(trace, block_size)
        unbounded = sum(-(-len(prompt) // block_size) for prompt in prompts)
        sizes = [*(tokens // block_size for tokens in arguments.pool_tokens), unbounded]
        for num_blocks, eviction in itertools.product(sizes, ("lru", "reuse")):
            row = replay(prompts, num_blocks, block_size, eviction) | {"is_unbounded": num_blocks == unbounded}
            row["share_of_reusable"] = row["hit_tokens"] / reusable if reusable else None
            rows.append(row)
            print(
                f"{block_size:5} {'unbounded' if row['is_unbounded'] else format(row['pool_tokens'], ','):>12} "
                f"{eviction:>9} {row['hit_rate']:9.2%} {row['evictions']:10,} {row['refused']:8} {row['seconds']:8.3f} "
                f"{row['median_request_us']:11.1f}"
            )
        if rows[-1]["hit_tokens"] != reusable:
            raise SystemExit(f"unbounded pool: {rows[-1]['hit_tokens']} hit tokens, but the ids say {reusable}")
    if arguments.trace and not arguments.no_record:
        record("replay_trace", rows, trace=arguments.trace.name, requests=len(prompts))


if __name__ == "__main__":
    main()
