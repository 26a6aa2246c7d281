"""pagedkv bench: nano-vllm's benchmark beside the device's floor."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from .options import Commands, add_device, at_least


def add(commands: Commands) -> None:
    bench = commands.add_parser("bench", help="nano-vllm's benchmark, 256 requests at once, beside the device's floor")
    shape = "a folder, or 0.6B, 1.7B, 4B, 8B: a Qwen3 of this size with random weights (default: 0.6B)"
    bench.add_argument("model", nargs="?", default="0.6B", help=shape)
    add_device(bench)
    bench.add_argument("--kv-cache-dtype", default="auto", help="auto (the model's) or fp8 (default: auto)")
    bench.add_argument("--num-requests", type=at_least(1), default=256, help="how many (default: 256)")
    runs = "of the workload, after a few tokens of it to warm up (default: 3)"
    bench.add_argument("--runs", type=at_least(1), default=3, help=runs)
    bench.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pagedkv.engine.arguments import find_device

    from . import nano_bench

    device = find_device(args.device)
    workload = nano_bench.make_workload(args.num_requests)
    with tempfile.TemporaryDirectory() as scratch:
        is_shape = args.model in nano_bench.SHAPES
        folder = nano_bench.write_shape(args.model, Path(scratch)) if is_shape else Path(args.model)
        ceiling = nano_bench.measure_ceiling(device, "bfloat16")
        options = {"load_format": "dummy" if is_shape else "auto", "kv_cache_dtype": args.kv_cache_dtype}
        llm = nano_bench.make_llm(folder, workload, device=device, **options)
    with llm:
        floor = nano_bench.floor_seconds(llm, workload, ceiling)
        print(f"""\
model     Qwen3 {args.model}, {llm.dtype}{", random weights" * is_shape}, KV {llm.kv_cache_dtype}, on {llm.device}
workload  {args.num_requests} requests at once: {workload.num_prompt_tokens:,} prompt and \
{workload.num_new_tokens:,} new tokens
device    {ceiling.bytes_per_second / 1e9:,.0f} GB/s and {ceiling.flops / 1e12:,.1f} TFLOP/s, measured
floor     {floor:.2f} s = {workload.num_new_tokens / floor:,.0f} tokens/s""")
        nano_bench.warm_up(llm, workload)
        times = [nano_bench.run(llm, workload, use_tqdm=sys.stderr.isatty())[1] for _ in range(args.runs)]
    num_tokens, median = workload.num_new_tokens, statistics.median(times)
    for seconds in times:
        print(f"run       {seconds:.2f} s = {num_tokens / seconds:,.0f} tokens/s")
    print(f"median    {median:.2f} s = {num_tokens / median:,.0f} tokens/s, {floor / median:.0%} of the floor's")
    return 0
