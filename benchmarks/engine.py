"""LLM end to end: nano-vllm's workload beside the device's floor, and where a decode step's time goes.

    python benchmarks/engine.py [--models 0.6B 8B] [--device cuda] [--parts nano steps] [--block-size 256]
                                [--kv-cache-dtype fp8] [--runs 3]

nano   256 requests at once (pagedkv/cli/nano_bench.py), random weights: a few tokens of each to warm up, then the runs
steps  decode steps of 256 sequences of about 650 tokens and of one of 128: kernels by class (torch's profiler), time in
       which the device computes nothing of a step, the host's parts

Writes results/engine-<device>-<model>.json, one for each model, after a run of both parts.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path

import nano_run
from peers import figures
from probe import Probe, print_table, probe
from record import make_parser, record_run

from pagedkv import LLM, SamplingParams
from pagedkv.cli import nano_bench

BATCHES = (256, 630), (1, 128)  # sequences and tokens of each, as nano-bench has them and as one user has

PEER = figures("nano-vllm")
PEER_SPEED = PEER["nano_bench_tokens_per_second"]


def measure_nano(llm: LLM, model: str, ceiling: nano_bench.Ceiling, num_runs: int) -> dict:
    workload = nano_bench.make_workload()
    floor = nano_bench.floor_seconds(llm, workload, ceiling)
    nano_bench.warm_up(llm, workload)
    runs = [nano_run.run(llm, workload) for _ in range(num_runs)]
    median = statistics.median_low(run.seconds for run in runs)
    run = next(run for run in runs if run.seconds == median)
    print(
        f"nano-bench {model}: {' '.join(f'{run.seconds:.3f}' for run in runs)} s, median "
        f"{run.tokens_per_second:,.0f} tokens/s; floor {floor:.2f} s ({floor / median:.0%} of it reached); "
        f"nano-vllm {PEER_SPEED.get(model, 0):,}; prefill {run.prefill_seconds:.2f} s, decode {run.decode_seconds:.2f} s, "
        f"{run.num_steps} steps, host {run.host_seconds / run.num_steps * 1e6:.0f} us per step without launch, "
        f"{llm.counters.peak_used_blocks} pages used",
        flush=True,
    )
    return {
        "seconds": [run.seconds for run in runs],
        "tokens_per_second": run.tokens_per_second,
        "tokens": run.tokens,
        "floor_seconds": floor,
        "prefill_seconds": run.prefill_seconds,
        "decode_seconds": run.decode_seconds,
        "num_steps": run.num_steps,
        "peer_tokens_per_second": PEER_SPEED.get(model),
    }


def measure_steps(llm: LLM, model: str, device: str) -> dict:
    rng = random.Random(2)
    columns: dict[str, Probe] = {}
    for batch, context in BATCHES:
        prompts = [[rng.randint(0, 10000) for _ in range(context)] for _ in range(batch)]
        llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
        columns[f"batch {batch}"] = probe(llm, prompts, profile=device != "cpu")
    theirs = PEER["steps"].get(model, {})
    print_table(columns | {f"nano-vllm {batch}": Probe.of_row(row) for batch, row in theirs.items()})
    for name, column in columns.items():
        print(f"  the longest kernels, {name}:")
        for kernel, us in list(column.names.items())[:14]:
            print(f"    {us:9.1f}  {kernel[:110]}", flush=True)
    return {name: column.row() for name, column in columns.items()}


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["0.6B"], choices=nano_bench.SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", default=["nano", "steps"], choices=["nano", "steps"])
    parser.add_argument("--block-size", type=int, default=nano_bench.BLOCK_SIZE, help="tokens in a page")
    parser.add_argument("--runs", type=int, default=3, help="of the workload (default: 3)")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"])
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--batch-invariant", action="store_true", help="with that option of the engine")
    args = parser.parse_args()
    ceiling = nano_bench.measure_ceiling(args.device, "bfloat16")
    print(f"{ceiling.bytes_per_second / 1e9:,.0f} GB/s, {ceiling.flops / 1e12:,.0f} TFLOP/s measured", flush=True)
    sizes = {"block_size": args.block_size, "kv_cache_dtype": args.kv_cache_dtype, "enforce_eager": args.eager}
    sizes |= {"batch_invariant": True} if args.batch_invariant else {}
    for model in args.models:
        row = {"model": model} | sizes
        with tempfile.TemporaryDirectory() as scratch:
            folder = nano_bench.write_shape(model, Path(scratch))
            llm = nano_bench.make_llm(folder, nano_bench.make_workload(), device=args.device, load_format="dummy", **sizes)
        with llm:
            row["memory"] = llm.memory
            for part in args.parts:
                if part == "nano":
                    row["nano_bench"] = measure_nano(llm, model, ceiling, args.runs)
                else:
                    row["decode_step"] = measure_steps(llm, model, args.device)
        args.no_record |= not {"nano_bench", "decode_step"} <= row.keys()
        name = f"engine-{args.device}-{model}" + ("-fp8" if args.kv_cache_dtype == "fp8" else "")
        name += "-invariant" if args.batch_invariant else ""
        record_run(args, name, [row], args.device, ceiling=vars(ceiling))


if __name__ == "__main__":
    main()
