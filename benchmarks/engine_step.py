"""Host time of a decode step of LLM: schedule, launch, commit, update; with the demo model, batch 256.

    python benchmarks/engine_step.py [--batch 256]

The model itself computes nothing here: what is measured is what the host does for a step, which must take less time
than the device needs for the step before.
"""

from __future__ import annotations

import statistics
import time

import numpy as np
from record import make_parser, record

from pagedkv import LLM, SamplingParams
from pagedkv.cli.demo import DEMO_MODEL

NUM_TOKENS = 100
PARTS = ("schedule", "launch", "commit", "update")


def timed(function, times: list[float]):
    def wrapper(*args):
        start = time.perf_counter()
        result = function(*args)
        times.append((time.perf_counter() - start) * 1e6)
        return result

    return wrapper


def measure(batch: int) -> dict[str, list[float]]:
    """Microseconds of every part of every step that only decodes, over several generations."""
    times: dict[str, list[float]] = {part: [] for part in PARTS}
    with LLM(DEMO_MODEL, block_size=16, max_num_seqs=batch) as llm:
        runner = llm._runner
        runner.num_behind = 1
        runner._compute = runner.sampler.sample = lambda inputs: None
        np.asarray(runner.sampler.sampled)[:] = 0  # every token
        for part in PARTS:
            owner = runner if part == "launch" else llm.scheduler
            setattr(owner, part, timed(getattr(owner, part), times[part]))
        params = SamplingParams(temperature=0.6, max_tokens=NUM_TOKENS, ignore_eos=True)
        prompts = [f"{i}+{i}=" for i in range(batch)]
        for _ in range(5):
            llm.generate(prompts, params, use_tqdm=False)
    return {part: decodes(values) for part, values in times.items()}


def decodes(values: list[float]) -> list[float]:
    """Without the first generation, which warms up, and the first and the last step of each: no decode, or no step."""
    step = len(values) // 5
    return [t for i, t in enumerate(values) if i >= step and 0 < i % step < NUM_TOKENS - 1]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--batch", type=int, default=256)
    args = parser.parse_args()
    times = measure(args.batch)
    medians = {part: statistics.median(values) for part, values in times.items()}
    host = sum(medians.values())
    print(f"decode step, batch {args.batch}, {len(times['launch'])} steps: median us (p90)")
    for part, values in times.items():
        print(f"  {part:<10}{medians[part]:9.1f}  ({statistics.quantiles(values, n=10)[-1]:.1f})")
    print(f"  host      {host:9.1f}  {host / args.batch:.2f} us per sequence")
    if not args.no_record:
        parts = {f"{part}_us": t for part, t in medians.items()}
        record("engine_step", [{"batch": args.batch, "host_us": host, **parts}])


if __name__ == "__main__":
    main()
