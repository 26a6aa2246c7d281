"""LLM end to end: nano-vllm's workload beside the device's floor, where a decode step's time goes, a pool too small.

    python benchmarks/engine.py [--models 0.6B 8B] [--device cuda] [--parts nano steps pool] [--block-size 16]
                                [--kv-cache-dtype fp8]

nano   256 requests at once (pagedkv/bench.py), random weights: a run with other prompts to warm up, then others
steps  decode steps of 256 sequences of about 650 tokens and of one of 128: kernels by class (torch's profiler), idle
       time between two steps (events on the device), the host's parts
pool   the workload, greedy, in a pool of 60 % of the pages that it uses: preemption by recomputing and by swapping
"""

from __future__ import annotations

import argparse
import random
import statistics
import tempfile
from pathlib import Path

from probe import Probe, print_table, probe
from record import add_record_option, record

from pagedkv import LLM, SamplingParams, bench

# tokens/s of the peer on one H200 (PEERS.md: nano-vllm bb823b3 with FlashAttention-3)
PEER = {"0.6B": 18_897, "8B": 8_060}
BATCHES = (256, 630), (1, 128)  # sequences and tokens of each, as nano-bench has them and as one user has


def measure_nano(llm: LLM, model: str, ceiling: bench.Ceiling, num_runs: int) -> dict:
    workload = bench.nano_bench()
    floor = bench.floor_seconds(llm, workload, ceiling)
    bench.run(llm, bench.nano_bench(seed=1))
    runs = [bench.run(llm, workload) for _ in range(num_runs)]
    median = statistics.median_low(run.seconds for run in runs)
    run = next(run for run in runs if run.seconds == median)
    print(
        f"nano-bench {model}: {' '.join(f'{run.seconds:.3f}' for run in runs)} s, median "
        f"{run.tokens_per_second:,.0f} tokens/s; floor {floor:.2f} s ({floor / median:.0%} of it reached); "
        f"nano-vllm {PEER.get(model, 0):,}; prefill {run.prefill_seconds:.2f} s, decode {run.decode_seconds:.2f} s, "
        f"{run.num_steps} steps, host {run.host_seconds / run.num_steps * 1e6:.0f} us a step without launch, "
        f"{llm.stats.peak_used_blocks} pages used",
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
        "peer_tokens_per_second": PEER.get(model),
    }


def measure_steps(llm: LLM, device: str) -> dict:
    rng = random.Random(2)
    columns: dict[str, Probe] = {}
    for batch, context in BATCHES:
        prompts = [[rng.randint(0, 10000) for _ in range(context)] for _ in range(batch)]
        llm.generate(prompts, SamplingParams(max_tokens=2), use_tqdm=False)
        columns[f"batch {batch}"] = probe(llm, prompts, profile=device != "cpu")
    print_table(columns)
    for name, column in columns.items():
        print(f"  the longest kernels, {name}:")
        for kernel, us in list(column.names.items())[:14]:
            print(f"    {us:9.1f}  {kernel[:110]}")
    return {
        name: {"wall_us": p.wall, "idle_us": p.idle, "host_us": p.host, "kernels_us": p.kernels}
        for name, p in columns.items()
    }


def measure_pool(folder: Path, options: dict) -> dict:
    """Greedy, so that the tokens can be compared. Where the batch differs, sums may be rounded in another order: a
    token that is not the same is no error of preemption by itself, so it is counted beside an engine of few seats."""
    workload = bench.nano_bench()
    greedy = [SamplingParams(temperature=0, ignore_eos=True, max_tokens=one.max_tokens) for one in workload.params]
    workload = bench.Workload(workload.prompts, greedy)
    rows: dict[str, dict] = {}
    tokens: dict[str, list[list[int]]] = {}

    def measure(name: str, **extra) -> LLM:
        with bench.make_llm(folder, workload, **(options | extra)) as llm:
            llm.generate(workload.prompts[:8], greedy[:8], use_tqdm=False)
            run = bench.run(llm, workload)
            tokens[name] = [output.token_ids for output in run.outputs]
            rows[name] = {"seconds": run.seconds, "preemptions": run.num_preemptions}
            rows[name]["num_blocks"] = llm.manager.num_blocks
            rows[name]["slowdown"] = run.seconds / rows["whole"]["seconds"]
            same = sum(a == b for a, b in zip(tokens[name], tokens["whole"], strict=True))
            rows[name]["same"] = same
            print(
                f"pool {name:<12} {llm.manager.num_blocks:>7} pages: {run.seconds:.2f} s "
                f"({rows[name]['slowdown']:.2f} x), {run.num_preemptions} preemptions, {llm.scheduler.num_swaps} by "
                f"swapping; {same} of {len(greedy)} requests have the same tokens",
                flush=True,
            )
            return llm

    whole = measure("whole")
    num_blocks = int(0.6 * whole.stats.peak_used_blocks)
    measure("half seats", max_num_seqs=128)
    measure("recompute", num_blocks=num_blocks)
    swap_space = whole.stats.peak_used_blocks // 2 * whole._page_bytes(whole.manager.block_size)
    measure("swap", num_blocks=num_blocks, swap_space=swap_space)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["0.6B"], choices=bench.SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", default=["nano", "steps"], choices=["nano", "steps", "pool"])
    parser.add_argument("--block-size", type=int, default=16)
    parser.add_argument("--runs", type=int, default=3, help="of the workload (default: 3)")
    parser.add_argument("--kv-cache-dtype", default="auto", choices=["auto", "fp8"])
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    add_record_option(parser)
    parser.add_argument("--commit", help="where there is no git checkout")
    args = parser.parse_args()
    ceiling = bench.measure_ceiling(args.device, "bfloat16")
    print(f"{ceiling.bytes_per_second / 1e9:,.0f} GB/s, {ceiling.flops / 1e12:,.0f} TFLOP/s measured", flush=True)
    sizes = {"block_size": args.block_size, "kv_cache_dtype": args.kv_cache_dtype, "enforce_eager": args.eager}
    options = {"device": args.device, "load_format": "dummy"} | sizes
    rows = []
    for model in args.models:
        row = {"model": model} | sizes
        with tempfile.TemporaryDirectory() as scratch:
            folder = bench.write_shape(model, Path(scratch))
            if {"nano", "steps"} & set(args.parts):
                with bench.make_llm(folder, bench.nano_bench(), **options) as llm:
                    if "nano" in args.parts:
                        row["nano_bench"] = measure_nano(llm, model, ceiling, args.runs)
                    if "steps" in args.parts:
                        row["decode_step"] = measure_steps(llm, args.device)
            if "pool" in args.parts:
                row["small_pool"] = measure_pool(folder, options)
        rows.append(row)
    if not args.no_record:
        extra = {"commit": args.commit} if args.commit else {}
        name = f"engine-{args.device}" + ("-fp8" if args.kv_cache_dtype == "fp8" else "")
        record(name, rows, machine=device_name(args.device), ceiling=vars(ceiling), **extra)


def device_name(device: str) -> dict[str, str]:
    if device == "cpu":
        return {}
    import torch

    return {"gpu": torch.cuda.get_device_name()}


if __name__ == "__main__":
    main()
