"""The time of one decode step of LLM at every number of sequences, and whether tokens per second ever fall.

    python benchmarks/batch_sizes.py [--models 0.6B 8B] [--kv-cache-dtype fp8] [--contexts 640 1128] [--every 1]
                                     [--most 256] [--device cuda]

A step of n sequences is what the engine launches for n: padded to one of its batch sizes, as one CUDA graph. All
sequences have the same context: 640 tokens are 512 in and half of 256 out, 1,128 are 1,000 in and half of 256 out. The
cache holds random numbers instead of prompts' keys, which is the same work. A step's time is by events of the device
over several replays of its graph; all n are measured in order, several times, and the median counts.

Three things must hold (checks.py). A step of more sequences takes at most 2 % longer and the time of reading the added
keys. Tokens per second never fall by more than 1 % below those of fewer sequences. And between 32, 64, 128 and 256
sequences the step's time is said as a share above the line through these points.

Writes results/batch-sizes-<device>-<model>.json (-fp8), one for each model.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import checks
import numpy as np
from probe import replay_us, step_graph
from record import make_parser, record_run

from pagedkv import LLM, SamplingParams, ops
from pagedkv.cli import nano_bench
from pagedkv.engine.cache.pool import KVCaches
from pagedkv.engine.runner.model_runner import ModelRunner
from pagedkv.engine.scheduling.sequence import Sequence
from pagedkv.engine.scheduling.step import Step
from pagedkv.models import ITEM_BYTES

BORDERS = 1, 32, 33, 64, 65, 128, 129  # measured with --every, too: kernels change there
PARAMS = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=1 << 20, detokenize=False)


def counts(most: int, every: int) -> list[int]:
    """Of sequences, in order."""
    return sorted({*range(1, most + 1, every), *(n for n in BORDERS if n <= most), most})


def fill_pool(caches: KVCaches, num_blocks: int) -> None:
    """The same random numbers in all pages: zeros would take less power, and so less time."""
    nbytes = caches.page_bytes // caches.num_caches
    numbers = np.random.default_rng(0).standard_normal(nbytes // ITEM_BYTES[caches.dtype], np.float32)
    page = ops.asarray(numbers, caches.dtype).view(-1, "uint8").numpy().reshape(1, nbytes)
    caches.write(np.zeros(1, np.int32), [page] * caches.num_caches)
    each = [cache for pair in caches.layers for cache in pair]
    filled = 1
    while filled < num_blocks:
        copied = np.arange(min(filled, num_blocks - filled), dtype=np.int32)
        ops.copy_blocks(each, np.stack((copied, copied + filled), axis=1))
        filled += len(copied)
    ops.synchronize(caches.device)


def make_step(num_seqs: int, context: int) -> Step:
    """The decode of the last of so many tokens of each sequence; BlockManager has room for them by the same ids."""
    sequences = []
    for i in range(num_seqs):
        seq = Sequence(i, [0] * (context - 1), PARAMS, i, frozenset(), 0.0)
        seq.new_tokens, seq.num_tokens = [i], context
        sequences.append(seq)
    step = Step()
    step.add_decodes(sequences, list(range(num_seqs)), [context] * num_seqs)
    return step


def step_us(runner: ModelRunner, step: Step, replays: int) -> float:
    """As the engine runs it. Without graphs (on the CPU): with the host's part, once."""
    begin = time.perf_counter()
    runner.launch(step)
    step.tokens()
    seconds = time.perf_counter() - begin
    graph = step_graph(runner, len(step.sequences), max(step.ends))
    return seconds * 1e6 if graph is None else replay_us(graph, runner.stream, replays)


def measure(llm: LLM, context: int, sizes: list[int], passes: int, replays: int) -> dict:
    """The times of all numbers of sequences with this context."""
    runner, manager = llm._runner, llm.manager
    ids = list(range(sizes[-1]))
    manager.allocate_batch(ids, [[i] * context for i in ids])
    times: dict[int, list[float]] = defaultdict(list)
    for _ in range(passes):
        for n in sizes:
            times[n].append(step_us(runner, make_step(n, context), replays))
    manager.free_batch(ids)
    medians = {n: round(statistics.median(each), 2) for n, each in times.items()}
    key_bytes = runner.caches.page_bytes / manager.block_size
    sequence_us = checks.read_us(context * key_bytes)
    return {
        "context": context,
        "block_size": manager.block_size,
        "sequence_us": round(sequence_us, 3),
        "step_us": medians,
        "step_us_least": {n: round(min(each), 2) for n, each in times.items()},
        "step_us_most": {n: round(max(each), 2) for n, each in times.items()},
    }


def show(name: str, row: dict) -> None:
    print(f"{name}, {row['context']} tokens each: sequences, us, tokens/s")
    for n, us in row["step_us"].items():
        print(f"  {n:4} {us:10.1f} {n / us * 1e6:10,.0f}")
    found = checks.batch_sizes(row["step_us"], row["sequence_us"])
    print(f"  too long: {found['too_long'] or 'none'}; the worst {found['longest']}")
    print(f"  tokens/s fall at {found['falls'] or 'none'}; the worst {found['deepest']}")
    for span, share in found["above_line"].items():
        print(f"  {span} above the line: {share['most']:.1%} at {share['at']}, {share['mean']:.1%} on average", flush=True)


def make_llm(model: str, args: argparse.Namespace) -> LLM:
    longest = max(args.contexts)
    with tempfile.TemporaryDirectory() as scratch:
        return LLM(
            nano_bench.write_shape(model, Path(scratch)), device=args.device, load_format="dummy",
            kv_cache_dtype=args.kv_cache_dtype, block_size=args.block_size, max_num_seqs=args.most,
            max_num_batched_tokens=max(2048, args.most), max_model_len=longest + 1, enable_prefix_caching=False,
            num_blocks=args.most * -(-longest // args.block_size),
        )  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["0.6B"], choices=nano_bench.SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"])
    parser.add_argument("--block-size", type=int, default=nano_bench.BLOCK_SIZE, help="tokens in a page")
    parser.add_argument("--contexts", nargs="+", type=int, default=[640], help="tokens of each sequence (default: 640)")
    parser.add_argument("--most", type=int, default=256, help="sequences (default: 256)")
    parser.add_argument("--every", type=int, default=1, help="of the numbers of sequences, each so many-th")
    parser.add_argument("--passes", type=int, default=3, help="over all numbers of sequences (default: 3)")
    parser.add_argument("--replays", type=int, default=3, help="of a step's graph in a pass (default: 3)")
    args = parser.parse_args()
    for model in args.models:
        name = f"batch-sizes-{args.device}-{model}" + ("-fp8" if args.kv_cache_dtype == "fp8" else "")
        rows = []
        with make_llm(model, args) as llm:
            fill_pool(llm._runner.caches, llm.manager.num_blocks)
            for context in args.contexts:
                rows.append({"model": model, "kv_cache_dtype": llm.kv_cache_dtype}
                            | measure(llm, context, counts(args.most, args.every), args.passes, args.replays))
                show(name, rows[-1])
                record_run(args, name, rows, args.device)  # at once: what comes next may not end


if __name__ == "__main__":
    main()
