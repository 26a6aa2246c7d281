"""Host time of a decode step of LLM: schedule, fill the arrays, take the results; with the demo model, batch 64.

    python benchmarks/engine_step.py [--batch 64]

The model's own time is not of interest here (it is tiny); what is measured is what the host does beside it, which a
pipelined engine must hide behind the device.
"""

from __future__ import annotations

import argparse
import statistics
import time

from record import add_record_option, record

from pagedkv import LLM, SamplingParams, get_num_threads
from pagedkv.cli import DEMO_MODEL

NUM_TOKENS = 100


def timed(function, times: list[float]):
    def wrapper(*args):
        start = time.perf_counter()
        result = function(*args)
        times.append((time.perf_counter() - start) * 1e6)
        return result

    return wrapper


def measure(batch: int) -> dict[str, list[float]]:
    """Microseconds of every part of every step that only decodes, over several generations."""
    times: dict[str, list[float]] = {"schedule": [], "fill": [], "run": [], "update": []}
    with LLM(DEMO_MODEL, block_size=16, max_num_seqs=batch) as llm:
        llm.scheduler.schedule = timed(llm.scheduler.schedule, times["schedule"])
        llm.scheduler.update = timed(llm.scheduler.update, times["update"])
        for part in ("fill", "run"):
            setattr(llm._runner, part, timed(getattr(llm._runner, part), times[part]))
        params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
        prompts = [f"{i}+{i}=" for i in range(batch)]
        for _ in range(5):
            llm.generate(prompts, params, use_tqdm=False)
    step = NUM_TOKENS  # the first of each generation is the prefill; the first generation warms up
    return {part: [t for i, t in enumerate(values) if i >= step and i % step] for part, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64)
    add_record_option(parser)
    args = parser.parse_args()
    times = measure(args.batch)
    medians = {part: statistics.median(values) for part, values in times.items()}
    host = medians["schedule"] + medians["fill"] + medians["update"]
    print(f"decode step, batch {args.batch}, {get_num_threads()} threads, {len(times['run'])} steps: median us (p90)")
    for part, values in times.items():
        print(f"  {part:<10}{medians[part]:9.1f}  ({statistics.quantiles(values, n=10)[-1]:.1f})")
    print(f"  host      {host:9.1f}  without run: {host / args.batch:.2f} us a sequence")
    if not args.no_record:
        record("engine_step", [{"batch": args.batch, "host_us": host, **{f"{part}_us": t for part, t in medians.items()}}])


if __name__ == "__main__":
    main()
