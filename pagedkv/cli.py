"""pagedkv {demo,generate,bench,info}: an error is one line on stderr, exit code 1 (2: wrong usage)."""

from __future__ import annotations

import argparse
import platform
import random
import statistics
import sys
import tempfile
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import NoReturn

import pagedkv
from pagedkv.engine.arguments import find_device

DEMO_MODEL = Path(__file__).parent / "data" / "demo_model"
DEVICE_HELP = "cpu, cuda, or auto: cuda where there is one (default: auto)"


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:  # argparse's own prints the usage first
        self.exit(2, f"{self.prog}: error: {message} (see --help)\n")


def main(argv: list[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        run: Callable[[argparse.Namespace], int] = args.run
        return run(args)
    except KeyboardInterrupt:
        return 130
    except (OSError, ValueError, NotImplementedError, MemoryError, ImportError, pagedkv.CudaError) as error:
        print(f"pagedkv {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _parser() -> Parser:
    parser = Parser(prog="pagedkv", description="A paged KV cache, paged attention and a Qwen3 engine.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="{demo,generate,bench,info}")

    demo = commands.add_parser("demo", help="add numbers with the model inside the package, and say how fast")
    demo.add_argument("--num-prompts", type=_at_least(1), default=32, help="sums in the batch (default: 32)")
    demo.add_argument("--seed", type=int, default=0, help="chooses the numbers (default: 0)")
    demo.add_argument("--device", default="cpu", help="cpu or cuda (default: cpu)")
    demo.set_defaults(run=run_demo)

    generate = commands.add_parser("generate", help="continue prompts with a Qwen3 model of your own")
    generate.add_argument("model", help="folder with config.json, *.safetensors and tokenizer.json")
    generate.add_argument("prompt", nargs="+", help="one or several texts, served as one batch")
    generate.add_argument("--max-tokens", type=_at_least(0), default=64, help="new tokens at most (default: 64)")
    generate.add_argument("--temperature", type=float, default=0.0, help="0 is greedy (default: 0)")
    generate.add_argument("--top-k", type=int, default=0, help="only the so many most likely tokens (default: all)")
    together = "only the most likely ones, of this probability together"
    generate.add_argument("--top-p", type=float, default=1.0, help=together)
    generate.add_argument("--min-p", type=float, default=0.0, help="only those so likely, times the most likely one")
    less = "above 1: tokens seen become less likely"
    generate.add_argument("--repetition-penalty", type=float, default=1.0, help=less)
    generate.add_argument("--seed", type=int, help="the same tokens again at temperature > 0")
    generate.add_argument("--ignore-eos", action="store_true", help="go on after an end-of-sequence token")
    generate.add_argument("--device", default="auto", help=DEVICE_HELP)
    generate.add_argument("--dtype", default="auto", help="auto, float32, float16 or bfloat16 (default: auto)")
    generate.add_argument("--block-size", type=_at_least(1), default=16, help="tokens in a page (default: 16)")
    generate.add_argument("--max-model-len", type=_at_least(1), help="prompt and new tokens of a request at most")
    generate.set_defaults(run=run_generate)

    bench = commands.add_parser("bench", help="nano-vllm's benchmark, 256 requests at once, beside the device's floor")
    shape = "a folder, or 0.6B, 1.7B, 4B, 8B: a Qwen3 of this size with random weights (default: 0.6B)"
    bench.add_argument("model", nargs="?", default="0.6B", help=shape)
    bench.add_argument("--device", default="auto", help=DEVICE_HELP)
    bench.add_argument("--kv-cache-dtype", default="auto", help="auto (the model's) or fp8 (default: auto)")
    bench.add_argument("--num-requests", type=_at_least(1), default=256, help="how many (default: 256)")
    runs = "of the workload, after a few tokens of it to warm up (default: 3)"
    bench.add_argument("--runs", type=_at_least(1), default=3, help=runs)
    bench.set_defaults(run=run_bench)

    info = commands.add_parser("info", help="versions, backends found and why not, threads, BLAS")
    info.set_defaults(run=run_info)
    return parser


def _at_least(lowest: int) -> Callable[[str], int]:
    def integer(text: str) -> int:
        value = int(text)
        if value < lowest:
            raise argparse.ArgumentTypeError(f"{value} is less than {lowest}")
        return value

    return integer


# --- generate


def run_generate(args: argparse.Namespace) -> int:
    names = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "max_tokens", "seed", "ignore_eos")
    params = pagedkv.SamplingParams(**{name: getattr(args, name) for name in names})
    options = {name: getattr(args, name) for name in ("dtype", "block_size", "max_model_len")}
    with pagedkv.LLM(args.model, device=args.device, **options) as llm:
        outputs = llm.generate(args.prompt, params, use_tqdm=sys.stderr.isatty())
    for output in outputs:
        if output.error is None:
            print(f"{output.prompt}{output.text}")
    errors = [output.error for output in outputs if output.error is not None]
    if errors:
        raise errors[0]
    return 0


# --- demo


def run_demo(args: argparse.Namespace) -> int:
    if not (DEMO_MODEL / "config.json").is_file():
        raise FileNotFoundError(f"{DEMO_MODEL}: the demo model is not in this installation")
    sums = _demo_sums(args.num_prompts, random.Random(args.seed))
    prompts = [f"{a}+{b}=" for a, b in sums]
    params = pagedkv.SamplingParams(temperature=0.0, max_tokens=8)
    # A token is a character here, so pages are small: sums with the same first number share its page.
    with pagedkv.LLM(DEMO_MODEL, device=args.device, block_size=4, num_blocks=1024) as llm:
        outputs = llm.generate(prompts, params)
        stats, pool = llm.counters, llm.manager.stats()

    num_right = 0
    lines = []
    for (a, b), output in zip(sums, outputs, strict=True):
        is_right = output.text == str(a + b) and output.finish_reason == "stop"
        num_right += is_right
        lines.append(f"{output.prompt}{output.text}" + ("" if is_right else f"  (wrong: {a + b})"))
    for row in range(0, len(lines), 4):
        print("   ".join(f"{line:<14}" for line in lines[row : row + 4]).rstrip())
    first = sorted(output.metrics.time_to_first_token or 0.0 for output in outputs)
    print(f"""
sums      {num_right} of {len(sums)} right
prefill   {stats.prefill_tokens} tokens, {stats.prefill_tokens / stats.prefill_seconds:,.0f} tokens/s
decode    {stats.decode_tokens} tokens, {stats.decode_tokens / stats.decode_seconds:,.0f} tokens/s
TTFT      {statistics.median(first) * 1e3:.1f} ms median, {first[-1] * 1e3:.1f} ms at most
pool      {stats.peak_used_blocks} of {pool["num_blocks"]} pages of {pool["block_size"]} tokens used at the peak, \
{stats.peak_shared_blocks} of them shared
cache     {pool["hit_tokens"]} of {pool["lookup_tokens"]} prompt tokens found""")
    return 0 if num_right == len(sums) else 1


def _demo_sums(count: int, rng: random.Random) -> list[tuple[int, int]]:
    """Pairs of numbers, four in a row with the same first one of three digits (a page with the '+')."""
    sums: list[tuple[int, int]] = []
    while len(sums) < count:
        first = rng.randrange(100, 1000)
        sums += [(first, rng.randrange(1000)) for _ in range(4)]
    return sums[:count]


# --- bench


def run_bench(args: argparse.Namespace) -> int:
    from pagedkv import bench

    device = find_device(args.device)
    workload = bench.nano_bench(args.num_requests)
    with tempfile.TemporaryDirectory() as scratch:
        is_shape = args.model in bench.SHAPES
        folder = bench.write_shape(args.model, Path(scratch)) if is_shape else Path(args.model)
        ceiling = bench.measure_ceiling(device, "bfloat16")
        options = {"load_format": "dummy" if is_shape else "auto", "kv_cache_dtype": args.kv_cache_dtype}
        llm = bench.make_llm(folder, workload, device=device, **options)
    with llm:
        floor = bench.floor_seconds(llm, workload, ceiling)
        print(f"""\
model     Qwen3 {args.model}, {llm.dtype}{", random weights" * is_shape}, KV {llm.kv_cache_dtype}, on {llm.device}
workload  {args.num_requests} requests at once: {workload.num_prompt_tokens:,} prompt and \
{workload.num_new_tokens:,} new tokens
device    {ceiling.bytes_per_second / 1e9:,.0f} GB/s and {ceiling.flops / 1e12:,.1f} TFLOP/s, measured
floor     {floor:.2f} s = {workload.num_new_tokens / floor:,.0f} tokens/s""")
        bench.warm_up(llm, workload)
        runs = [bench.run(llm, workload, use_tqdm=sys.stderr.isatty()) for _ in range(args.runs)]
    for run in runs:
        print(f"run       {run.seconds:.2f} s = {run.tokens_per_second:,.0f} tokens/s")
    median = statistics.median(run.seconds for run in runs)
    speed = workload.num_new_tokens / median
    print(f"median    {median:.2f} s = {speed:,.0f} tokens/s, {floor / median:.0%} of the floor's")
    return 0


# --- info


def run_info(args: argparse.Namespace) -> int:
    build = pagedkv.build_info()
    devices = build["cuda_devices"]
    rows = {
        "pagedkv": f"{pagedkv.__version__} in {Path(__file__).parent}, built by {build['compiler']}",
        "python": f"{platform.python_version()} on {platform.platform()}",
        "libraries": ", ".join(f"{name} {_version(name)}" for name in ("numpy", "tokenizers", "tqdm", "torch")),
        "cpu": f"yes, ISA {build['isa']}",
        "cuda": f"yes, {_gpus(devices)}" if devices else f"no: {build['cuda_problem']}",
        "threads": str(build["threads"]),
        "BLAS": build["blas"],
        "DLPack": build["dlpack"],
    }
    for name, value in rows.items():
        print(f"{name:<11}{value}")
    return 0


def _gpus(count: int) -> str:
    """What is free on each: the engine takes gpu_memory_utilization of a GPU's memory."""
    gpus = []
    for i in range(count):
        free, total = (num_bytes / 2**30 for num_bytes in pagedkv.memory_info(f"cuda:{i}"))
        gpus.append(f"cuda:{i} with {free:.1f} of {total:.1f} GiB free")
    return ", ".join(gpus)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(not installed)"
