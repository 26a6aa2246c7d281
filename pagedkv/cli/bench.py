"""pagedkv bench: nano-vllm's benchmark beside the device's floor."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path

from .options import Commands, add_engine_options, engine_options, integer, is_terminal, print_note

NUM_REQUESTS, NUM_RUNS = {"gpu": 256, "cpu": 4}, {"gpu": 3, "cpu": 1}  # with 256 a CPU would take hours


def add(commands: Commands) -> None:
    text = "nano-vllm's benchmark, 256 requests at once, beside the device's floor"
    bench = commands.add_parser("bench", help=text, description=f"{text}; on a CPU a few of them, once: some minutes")
    shape = "a folder, or 0.6B, 1.7B, 4B, 8B, 14B, 32B: a Qwen3 of this size with random weights (default: 0.6B)"
    bench.add_argument("model", nargs="?", default="0.6B", help=shape)
    many = f"how many (default: {NUM_REQUESTS['gpu']}; on a CPU {NUM_REQUESTS['cpu']})"
    bench.add_argument("--num-requests", type=integer, help=many)
    runs = f"of the workload, after a few tokens of it to warm up (default: {NUM_RUNS['gpu']}; on a CPU 1)"
    bench.add_argument("--runs", type=integer, help=runs)
    add_engine_options(bench, block_size=256)
    bench.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from pagedkv.engine.options import EngineOptions, find_device
    from pagedkv.models.hub import model_folder
    from pagedkv.models.registry import read_spec

    from . import nano_bench

    given = engine_options(args)
    options = EngineOptions(**given)  # raises for wrong ones
    device = find_device(options.device)
    kind = "cpu" if device == "cpu" else "gpu"
    num_requests, num_runs = args.num_requests or NUM_REQUESTS[kind], args.runs or NUM_RUNS[kind]
    with tempfile.TemporaryDirectory() as scratch:
        is_shape = args.model in nano_bench.SHAPES
        if is_shape:
            folder = nano_bench.write_shape(args.model, Path(scratch))
        else:
            folder = model_folder(args.model, options.revision)
        config = read_spec(folder)
        most = min(2 * nano_bench.MAX_LEN, options.max_model_len or config.max_position_embeddings)
        workload = nano_bench.make_workload(num_requests, max_len=most // 2, vocab_size=config.vocab_size)
        ceiling = nano_bench.measure_ceiling(device, config.dtype if options.dtype == "auto" else options.dtype)
        defaults = {"load_format": "dummy" if is_shape else "auto", "max_model_len": most}
        llm = nano_bench.make_llm(folder, workload, **defaults | given | {"device": device})
    with llm:
        floor = nano_bench.floor_seconds(llm, workload, ceiling)
        model = f"Qwen3 {args.model}" if is_shape else args.model
        quantised = f", {' and '.join(llm.config.quantization.stores)} weights" if llm.config.quantization else ""
        shorter = f", of up to {most // 2:,} tokens each" * (most < 2 * nano_bench.MAX_LEN)
        print(f"""\
model     {model}, {llm.dtype}{quantised}{", random weights" * is_shape}, KV {llm.kv_cache_dtype}, on {llm.device}
workload  {num_requests} requests at once: {workload.num_prompt_tokens:,} prompt and \
{workload.num_new_tokens:,} new tokens{shorter}
device    {ceiling.bytes_per_second / 1e9:,.0f} GB/s and {ceiling.flops / 1e12:,.1f} TFLOP/s, measured
floor     {floor:.2f} s = {workload.num_new_tokens / floor:,.0f} tokens/s""", flush=True)
        if num_runs * floor > 60:
            print_note(args, f"{num_runs} x {floor:,.0f} s at least; --num-requests and --runs make it shorter")
        nano_bench.warm_up(llm, workload)
        times = []
        for _ in range(num_runs):
            times.append(nano_bench.run(llm, workload, use_tqdm=is_terminal(sys.stderr))[1])
            print(f"run       {times[-1]:.2f} s = {workload.num_new_tokens / times[-1]:,.0f} tokens/s", flush=True)
    median = statistics.median(times)
    speed = workload.num_new_tokens / median
    print(f"median    {median:.2f} s = {speed:,.0f} tokens/s, {floor / median:.0%} of the floor's")
    return 0
