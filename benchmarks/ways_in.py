"""The ways into an engine, beside LLM.generate: nano-bench's 256 requests, and a first token among 256 that run.

    python benchmarks/ways_in.py [--model 0.6B] [--device cuda] [--runs 3] [--parts nano first host]

nano    output tokens/s of the same requests by LLM.generate, by Engine.add_request and step (one output at the end, and
        what is new after each step), by AsyncEngine (256 coroutines, the same two); in turn, medians
first   ms from LLM.stream's call to its first token while 256 sequences decode: with a place for it, and without one
        (a sequence of the batch is preempted); prompts of 128 tokens
host    what the host does, for want of a GPU: microseconds of all threads per step in the same ways, 256 sequences of
        100 tokens, on the demo model, which computes nothing here; without texts

Random weights. Writes results/ways-in-<device>-<model>.json.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from record import make_parser, record_run

from pagedkv import LLM, AsyncEngine, SamplingParams
from pagedkv.cli import nano_bench
from pagedkv.cli.demo import DEMO_MODEL
from pagedkv.engine import RequestOutputKind

NUM_SEQS = 256
KINDS = {"at the end": RequestOutputKind.FINAL_ONLY, "streamed": RequestOutputKind.DELTA}


def by_generate(llm: LLM, workload: nano_bench.Workload) -> int:
    return sum(len(output.token_ids) for output in llm.generate(workload.prompts, workload.params, use_tqdm=False))


def by_steps(llm: LLM, workload: nano_bench.Workload) -> int:
    for prompt, params in zip(workload.prompts, workload.params, strict=True):
        llm.add_request(prompt, params)
    num_tokens = 0
    while llm.has_unfinished_requests():
        num_tokens += sum(len(output.token_ids) for output in llm.step())
    return num_tokens


def by_coroutines(llm: LLM, workload: nano_bench.Workload) -> int:
    async def one(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> int:
        return sum([len(output.token_ids) async for output in engine.generate(prompt, params)])

    async def everyone() -> int:
        engine = AsyncEngine(llm)
        requests = zip(workload.prompts, workload.params, strict=True)
        return sum(await asyncio.gather(*(one(engine, *request) for request in requests)))

    return asyncio.run(everyone())


def ways(workload: nano_bench.Workload) -> dict[str, Callable[[LLM], int]]:
    found = {"LLM.generate": lambda llm: by_generate(llm, workload)}
    for name, kind in KINDS.items():
        same = nano_bench.Workload(workload.prompts, [replace(one, output_kind=kind) for one in workload.params])
        found[f"Engine.step, {name}"] = lambda llm, same=same: by_steps(llm, same)
        found[f"AsyncEngine, {name}"] = lambda llm, same=same: by_coroutines(llm, same)
    return found


def measure_ways(folder: Path, device: str, num_runs: int) -> list[dict]:
    workload = nano_bench.make_workload(NUM_SEQS)
    times: dict[str, list[float]] = {name: [] for name in ways(workload)}
    with nano_bench.make_llm(folder, workload, device=device, load_format="dummy") as llm:
        nano_bench.warm_up(llm, workload)
        for _ in range(num_runs):
            for name, way in ways(workload).items():
                llm.manager.reset_prefix_cache()
                start = time.perf_counter()
                assert way(llm) == workload.num_new_tokens
                times[name].append(time.perf_counter() - start)
    rows = []
    for name, seconds in times.items():
        rate = workload.num_new_tokens / statistics.median(seconds)
        rows.append({"part": "nano", "way": name, "tokens_per_second": rate, "seconds": seconds})
        share = rate / rows[0]["tokens_per_second"]
        print(f"{name:<26}{rate:>10,.0f} tok/s  {share:.3f} of LLM.generate", flush=True)
    return rows


def measure_first(folder: Path, device: str, num_runs: int) -> list[dict]:
    rows = []
    prompt = nano_bench.make_workload(1, seed=7).prompts[0][:100] + list(range(28))
    for name, num_places in {"a place is free": NUM_SEQS + 1, "all places are taken": NUM_SEQS}.items():
        options = {"device": device, "load_format": "dummy", "max_num_seqs": num_places, "max_model_len": 4096}
        with LLM(folder, **options, max_num_batched_tokens=16384) as llm:
            batch = nano_bench.make_workload(NUM_SEQS).prompts
            params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=200 + 40 * num_runs)
            thread = threading.Thread(target=llm.generate, args=(batch, params), kwargs={"use_tqdm": False})
            thread.start()
            while len(llm.scheduler.queues.running) < NUM_SEQS or llm.counters.num_steps < 40:
                time.sleep(0.01)
            times = []
            for i in range(num_runs + 1):
                start = time.perf_counter()
                stream = llm.stream([*prompt, i], SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=4))
                next(stream)
                times.append((time.perf_counter() - start) * 1e3)
                for _ in stream:
                    pass
                time.sleep(0.02)
            assert thread.is_alive(), "the batch was over too soon"
            steps, start = llm.counters.num_steps, time.perf_counter()
            time.sleep(0.2)
            step_ms = (time.perf_counter() - start) * 1e3 / (llm.counters.num_steps - steps)
            thread.join()
        rows.append({"part": "first", "case": name, "first_token_ms": statistics.median(times[1:]), "times_ms": times[1:],
                     "step_ms": step_ms})  # fmt: skip
        print(f"first token among {NUM_SEQS}, {name}: {rows[-1]['first_token_ms']:.2f} ms (a step: {step_ms:.2f})", flush=True)
    return rows


def measure_host(num_runs: int) -> list[dict]:
    params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=100, detokenize=False)
    workload = nano_bench.Workload([[i % 10, i // 10 % 10, i // 100] for i in range(NUM_SEQS)], [params] * NUM_SEQS)
    times: dict[str, list[float]] = {name: [] for name in ways(workload)}
    with LLM(DEMO_MODEL, device="cpu", max_num_seqs=NUM_SEQS) as llm:
        runner = llm._runner
        runner.num_behind = 1
        runner._compute = runner.sampler.sample = lambda inputs: None
        np.asarray(runner.sampler.sampled)[:] = 0  # every token
        for i in range(num_runs + 1):
            for name, way in ways(workload).items():
                num_steps, start = llm.counters.num_steps, time.process_time()
                assert way(llm) == workload.num_new_tokens
                if i:  # the first warms up
                    times[name].append((time.process_time() - start) * 1e6 / (llm.counters.num_steps - num_steps))
    for name, us in times.items():
        print(f"{name:<26}{statistics.median(us):>8,.0f} us per step", flush=True)
    return [{"part": "host", "way": name, "us_per_step": statistics.median(us), "all_us": us} for name, us in times.items()]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="0.6B", choices=nano_bench.SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--parts", nargs="+", choices=("nano", "first", "host"), default=["nano", "first"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder, rows = nano_bench.write_shape(args.model, Path(scratch)), []
        if "nano" in args.parts:
            rows += measure_ways(folder, args.device, args.runs)
        if "first" in args.parts:
            rows += measure_first(folder, args.device, 4 * args.runs)
        if "host" in args.parts:
            rows += measure_host(args.runs)
    record_run(args, f"ways-in-{args.device}-{args.model}", rows, args.device)


if __name__ == "__main__":
    main()
