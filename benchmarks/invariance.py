"""Random schedules of an engine with batch_invariant=True: each request has the bits that it has alone.

    python benchmarks/invariance.py [--model 0.6B] [--device cuda] [--count 10000] [--first 0] [--seed 0] [--ranks 1]
                                    [--processes 8]

A set of requests is served alone first, one after the other, by an engine that keeps nothing: tokens and log probabilities.
A schedule is some of them at once, in random order and with random priorities, while others that nobody looks at come and
are aborted. Every 50 schedules another engine takes over, with a pool, pages, steps, swap space, graphs and prefix cache of
its own; its cache goes on from schedule to schedule. All is drawn from (--seed, number of the schedule), so a run may be
continued by --first, and one schedule be repeated: those of its engine before it come first.

A difference ends the run with exit status 1, and says where it is. Writes results/invariance-<device>.json.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from record import make_parser, record

import pagedkv
from pagedkv import LLM, SamplingParams
from pagedkv.cli import nano_bench
from pagedkv.engine import RequestOutput

NUM_REQUESTS, PER_ENGINE, MOST_TOKENS = 48, 50, 48
DEMO = Path(pagedkv.__file__).parent / "data" / "demo_model"
Answer = tuple[list[int], list[dict[int, float]] | None]


def max_len(args: argparse.Namespace) -> int:
    return 128 if args.model == "demo" else 512


def make_requests(rng: np.random.Generator, vocab_size: int, longest: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of 1 to `longest` tokens, many of which begin alike; a third of them says what its log probabilities are."""
    common, requests = rng.integers(0, vocab_size, longest).tolist(), []
    for i in range(NUM_REQUESTS):
        length = int(np.exp(rng.uniform(0, np.log(longest))))
        shared = int(rng.integers(0, length + 1)) if rng.random() < 0.6 else 0
        prompt = common[:shared] + rng.integers(0, vocab_size, length - shared).tolist()
        options: dict[str, Any] = {
            "temperature": float(rng.choice([0, 0.8])),
            "seed": i,
            "logprobs": [2, None, None][i % 3],
        }
        options |= [{}, {}, {"top_p": 0.9}, {}, {"top_k": 20}, {"repetition_penalty": 1.2}][i % 6]
        params = SamplingParams(**options, max_tokens=int(rng.integers(1, MOST_TOKENS + 1)), ignore_eos=True)
        requests.append((prompt, params))
    return requests


def answer_of(output: RequestOutput) -> Answer:
    if output.error:
        raise output.error
    return list(output.outputs[0].token_ids), output.outputs[0].logprobs


def engine(folder: Path, args: argparse.Namespace, **options: Any) -> LLM:
    given = {
        "device": args.device,
        "max_model_len": max_len(args),
        "seed": 0,
        "tensor_parallel_size": args.ranks,
    } | options
    return LLM(folder, load_format="auto" if args.model == "demo" else "dummy", batch_invariant=True, **given)


def sizes_of(rng: np.random.Generator, args: argparse.Namespace) -> dict[str, Any]:
    block_size = int(rng.choice([8, 16, 64, 256]))
    return {
        "block_size": block_size,
        "num_blocks": -(-max_len(args) // block_size) * int(rng.integers(1, 4)),
        "max_num_seqs": int(rng.integers(8, 65)),
        "max_num_batched_tokens": int(rng.integers(64, 1025)),
        "swap_space": int(rng.choice([0, 1 << 30])),
        "enable_prefix_caching": bool(rng.random() < 0.8),
        "enforce_eager": bool(rng.random() < 0.3),
    }


def run_schedule(llm: LLM, requests: list, rng: np.random.Generator, number: int) -> list[tuple[int, Answer]]:
    longest = max(len(prompt) for prompt, _ in requests) + 1
    chosen = rng.permutation(len(requests))[: int(len(requests) ** rng.uniform(0.3, 1))].tolist()
    noise = [f"noise {number}-{i}" for i in range(int(rng.integers(0, 5)))]
    for name in noise:
        prompt = rng.integers(0, llm.config.vocab_size, rng.integers(1, longest)).tolist()
        llm.add_request(
            prompt, SamplingParams(max_tokens=MOST_TOKENS, ignore_eos=True), name, priority=int(rng.integers(-1, 2))
        )
    priorities = rng.integers(-1, 2, len(chosen)).tolist()
    for i, priority in zip(chosen, priorities, strict=True):
        llm.add_request(*requests[i], f"{number}-{i}", priority=priority)
    answers: list[tuple[int, Answer]] = []
    while len(answers) < len(chosen):
        for output in llm.step():
            kind, _, last = output.request_id.partition("-")
            if output.finished and not kind.startswith("noise"):
                answers.append((int(last), answer_of(output)))
        if noise and rng.random() < 0.3:
            llm.abort(noise.pop())
    for name in noise:
        llm.abort(name)
    while llm.has_unfinished_requests():
        llm.step()
    return answers


def first_difference(got: Answer, expected: Answer) -> str:
    for at, (one, other) in enumerate(zip(got[0], expected[0], strict=True)):
        scores = None if got[1] is None or expected[1] is None else (got[1][at], expected[1][at])
        if one != other or (scores and scores[0] != scores[1]):
            return f"token {at}: {one} and alone {other}, log probabilities {scores}"
    return f"{got} and alone {expected}"


def run(args: argparse.Namespace, first: int, end: int) -> dict[str, Any]:
    """The schedules from `first` to before `end`."""
    start, num_answers, num_tokens, preemptions, number = time.perf_counter(), 0, 0, 0, first

    def is_in_time() -> bool:
        return time.perf_counter() - start < args.seconds

    with tempfile.TemporaryDirectory() as scratch:
        folder = DEMO if args.model == "demo" else nano_bench.write_shape(args.model, Path(scratch))
        alone = {"max_num_seqs": 1, "max_num_batched_tokens": 1024, "num_blocks": 64, "enable_prefix_caching": False}
        with engine(folder, args, **alone) as llm:
            requests = make_requests(
                np.random.default_rng(args.seed), llm.config.vocab_size, max_len(args) - MOST_TOKENS
            )
            expected = [answer_of(llm.generate([prompt], params, use_tqdm=False)[0]) for prompt, params in requests]
        while number < end and is_in_time():
            sizes = sizes_of(np.random.default_rng([args.seed, number // PER_ENGINE, 1]), args)
            with engine(folder, args, **sizes) as llm:
                last = min(end, (number // PER_ENGINE + 1) * PER_ENGINE)
                while number < last and is_in_time():
                    for i, got in run_schedule(llm, requests, np.random.default_rng([args.seed, number]), number):
                        num_answers, num_tokens = num_answers + 1, num_tokens + len(got[0])
                        if got != expected[i]:
                            difference = first_difference(got, expected[i])
                            raise AssertionError(f"schedule {number} {sizes}, request {i}: {difference}")
                    number += 1
                preemptions += llm.stats().num_preemptions
            print(
                f"{first} to {number - 1} in {time.perf_counter() - start:.0f} s: {num_answers:,} answers, "
                f"{num_tokens:,} tokens, {preemptions:,} preemptions, no difference",
                flush=True,
            )
    return {
        "model": args.model, "ranks": args.ranks, "seed": args.seed, "first": first, "schedules": number - first,
        "answers": num_answers, "tokens": num_tokens, "preemptions": preemptions, "differences": 0,
    }  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="0.6B", choices=["demo", *nano_bench.SHAPES])
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--count", type=int, default=10_000, help="schedules")
    parser.add_argument("--first", type=int, default=0, help="number of the first of them")
    parser.add_argument("--processes", type=int, default=1, help="that share the device, and have as many engines each")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="after which no other schedule begins")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    each = -(-args.count // (args.processes * PER_ENGINE)) * PER_ENGINE
    end = args.first + args.count
    parts = [(args, first, min(end, first + each)) for first in range(args.first, end, each)]
    with multiprocessing.get_context("spawn").Pool(len(parts)) as pool:
        try:
            rows = pool.starmap(run, parts)
        except AssertionError as difference:
            sys.exit(str(difference))
    print(f"{sum(row['schedules'] for row in rows):,} schedules, no difference")
    if not args.no_record:
        record(f"invariance-{args.device}", rows, device=args.device)


if __name__ == "__main__":
    main()
