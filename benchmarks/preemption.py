"""A pool of 60 % of the pages that nano-vllm's workload uses: preemption by recomputing and by swapping, greedy.

    python benchmarks/preemption.py [--model 0.6B] [--device cuda] [--parts time tokens]

time    the model's shape in its own dtype: seconds beside a pool that holds everything
tokens  the same requests with two narrow layers in float32: how many have the same tokens as without preemption

Tokens are compared in float32 only. In bfloat16 the sums of a row are rounded in an order that depends on how many rows
a step has, and random weights have near-ties everywhere: there, half the seats, without any preemption, already give
most requests other tokens ("half the seats" prints how many).
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import nano_run
from record import make_parser, record_run

from pagedkv import SamplingParams
from pagedkv.cli import nano_bench

NARROW = (256, 512, 2, 4, 2, True)  # a shape of nano_bench
SHARE = 0.6
BLOCK_SIZE = 16  # with pages of 256 a request waits for its first ones, and none is preempted


def measure(shape: str, workload: nano_bench.Workload, **options) -> dict[str, dict]:
    """By kind of pool; every row beside "whole"."""
    rows: dict[str, dict] = {}
    tokens: dict[str, list[list[int]]] = {}
    used = page_bytes = 0

    def run(name: str, num_seqs: int = len(workload.prompts), **extra) -> None:
        nonlocal used, page_bytes
        with nano_bench.make_llm(folder, workload, load_format="dummy", block_size=BLOCK_SIZE, **options, **extra) as llm:
            llm.scheduler.max_num_seqs = num_seqs
            nano_bench.warm_up(llm, workload)
            swaps, llm.counters.peak_used_blocks = llm.scheduler.queues.num_swaps, 0
            result = nano_run.run(llm, workload)
            num_swaps = llm.scheduler.queues.num_swaps - swaps
            used, page_bytes = used or llm.counters.peak_used_blocks, llm._runner.caches.page_bytes
        tokens[name] = [output.token_ids for output in result.outputs]
        row = rows[name] = {
            "num_blocks": llm.manager.num_blocks,
            "seconds": result.seconds,
            "preemptions": result.num_preemptions,
            "swaps": num_swaps,
            "same_tokens": sum(a == b for a, b in zip(tokens[name], tokens["whole"], strict=True)),
        }
        row["slowdown"] = result.seconds / rows["whole"]["seconds"]
        print(
            f"{name:<16}{row['num_blocks']:>8} pages  {result.seconds:6.2f} s ({row['slowdown']:.2f} x)  "
            f"{result.num_preemptions:>4} preemptions, {num_swaps:>3} of them swaps; "
            f"{row['same_tokens']} of {len(workload.prompts)} requests have the same tokens",
            flush=True,
        )

    with tempfile.TemporaryDirectory() as scratch:
        folder = nano_bench.write_shape(shape, Path(scratch))
        run("whole")
        run("half the seats", len(workload.prompts) // 2)
        run("recompute", num_blocks=int(SHARE * used))
        run("swap", num_blocks=int(SHARE * used), swap_space=used * page_bytes)
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="0.6B", choices=nano_bench.SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", default=["time", "tokens"], choices=["time", "tokens"])
    parser.add_argument("--num-requests", type=int, default=256)
    args = parser.parse_args()
    workload = nano_bench.make_workload(args.num_requests)
    greedy = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=one.max_tokens) for one in workload.params]
    workload = nano_bench.Workload(workload.prompts, greedy)
    nano_bench.SHAPES["narrow"] = NARROW
    parts = {"time": (args.model, {}), "tokens": ("narrow", {"dtype": "float32"})}
    rows = []
    for part in args.parts:
        shape, options = parts[part]
        print(f"{part}: {shape}, {options.get('dtype', 'bfloat16')}")
        rows.append({"part": part, "shape": shape, **measure(shape, workload, device=args.device, **options)})
        record_run(args, f"preemption-{args.device}", rows, args.device)  # at once: what comes next may not end


if __name__ == "__main__":
    main()
