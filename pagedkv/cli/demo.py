"""pagedkv demo: the model in the package adds numbers."""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from pathlib import Path

import pagedkv

from .options import Commands, add_engine_options, engine_options, integer

DEMO_MODEL = Path(pagedkv.__file__).parent / "data" / "demo_model"


def add(commands: Commands) -> None:
    text = "add numbers with the model inside the package, and say how fast"
    demo = commands.add_parser("demo", help=text, description=text)
    demo.add_argument("--num-prompts", type=integer, default=32, help="sums in the batch (default: 32)")
    demo.add_argument("--seed", type=int, default=0, help="chooses the numbers (default: 0)")
    add_engine_options(demo, "device")
    demo.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    if not (DEMO_MODEL / "config.json").is_file():
        raise FileNotFoundError(f"{DEMO_MODEL}: the demo model is not in this installation")
    sums = _demo_sums(args.num_prompts, random.Random(args.seed))
    prompts = [f"{a}+{b}=" for a, b in sums]
    params = pagedkv.SamplingParams(temperature=0.0, max_tokens=8)
    # A token is a character here, so pages are small: sums with the same first number share its page.
    with pagedkv.LLM(DEMO_MODEL, block_size=4, num_blocks=1024, **engine_options(args)) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=sys.stderr is not None)
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
