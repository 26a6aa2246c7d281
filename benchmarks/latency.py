"""Latency of LLM where few requests run: random weights, medians of several requests with fresh prompts.

    python benchmarks/latency.py [--models 0.6B 8B] [--device cuda] [--parts one batch first prefix load]

one      a request alone, 128 tokens in, 512 out: tokens/s from submission to last token; a step of it by kernels
batch    a decode step of 32 sequences of 1,000 tokens, by kernels
first    the first token of a prompt of 128 tokens, on an idle engine
prefix   the first token of a prompt of 8,192 tokens and 32 of its own: cold, and with the 8,192 in the prefix cache
load     the first token of a prompt of 128 and of 8,192 tokens that arrives while 63 sequences of 1,000 tokens decode

Writes results/latency-<device>-<model>.json, one for each model.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from pathlib import Path

from peers import figures
from probe import print_table, probe
from record import make_parser, record_run

from pagedkv import LLM, SamplingParams
from pagedkv.cli import nano_bench
from pagedkv.engine import RequestOutputKind

PEER = figures("nano-vllm")
REPEATS = 4  # the first of them warms up
PARTS = ("one", "batch", "first", "prefix", "load")


class Latency:
    def __init__(self, llm: LLM) -> None:
        self.llm, self.rng = llm, random.Random(0)

    def prompt(self, length: int) -> list[int]:
        return [self.rng.randint(0, 10000) for _ in range(length)]

    def generate(self, prompts: list[list[int]], max_tokens: list[int]) -> list:
        outputs = self.llm.generate(prompts, [_params(n) for n in max_tokens], use_tqdm=False)
        for output in outputs:
            if output.error:
                raise output.error
        return outputs

    def first_token(self, prompt: list[int]) -> float:
        """Milliseconds."""
        seconds = self.generate([prompt], [1])[0].metrics.time_to_first_token
        return seconds * 1e3

    def one(self) -> list[float]:
        """Tokens a second, of several requests."""
        totals = [self.generate([self.prompt(128)], [512])[0].metrics.total_time for _ in range(REPEATS)]
        return [512 / seconds for seconds in totals[1:]]

    def first(self) -> float:
        return statistics.median([self.first_token(self.prompt(128)) for _ in range(4 * REPEATS)][REPEATS:])

    def prefix(self) -> tuple[float, float]:
        cold, warm = [], []
        for _ in range(REPEATS):
            shared = self.prompt(8192)
            cold.append(self.first_token(shared + self.prompt(32)))
            warm.append(self.first_token(shared + self.prompt(32)))
        return statistics.median(cold[1:]), statistics.median(warm[1:])

    def load(self, length: int) -> float:
        """Milliseconds, of a request that comes into the middle of a run of others."""
        llm, times = self.llm, []
        for _ in range(REPEATS):
            for _ in range(63):
                llm.add_request(self.prompt(1000), _params(100))
            for _ in range(40):  # steps, in the last of which all decode
                llm.step()
            late = llm.add_request(self.prompt(length), _params(1))
            while llm.has_unfinished_requests():
                for output in llm.step():
                    if output.request_id == late:
                        times.append(output.metrics.time_to_first_token * 1e3)
        return statistics.median(times[1:])


def _params(max_tokens: int) -> SamplingParams:
    kind = RequestOutputKind.FINAL_ONLY
    return SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens, output_kind=kind)


def measure(llm: LLM, model: str, device: str, parts: list[str]) -> dict:
    latency, row = Latency(llm), {"model": model}
    if "one" in parts:
        runs = latency.one()
        row |= {"one_tokens_per_second": statistics.median(runs), "one_runs": runs}
        one, theirs = row["one_tokens_per_second"], PEER["one_tokens_per_second"].get(model, "-")
        print(f"{model}: batch 1, 128 in, 512 out: {one:,.0f} tokens/s (nano-vllm {theirs})", flush=True)
    if "first" in parts:
        row["first_token_ms"] = latency.first()
        theirs = PEER["first_token_ms"].get(model, "-")
        print(f"{model}: first token of 128: {row['first_token_ms']:.2f} ms (nano-vllm {theirs})")
    if "prefix" in parts:
        row["prefix_cold_ms"], row["prefix_warm_ms"] = cold, warm = latency.prefix()
        share = f"({warm / cold:.0%})"
        print(f"{model}: first token of 8,192 + 32: {cold:.2f} ms cold, {warm:.2f} ms warm {share}", flush=True)
    if "load" in parts:
        row["first_token_under_load_ms"] = load = {length: latency.load(length) for length in (128, 8192)}
        times = ", ".join(f"{ms:.2f} ms of {length:,} tokens" for length, ms in load.items())
        budget = llm.scheduler.max_num_batched_tokens
        print(f"{model}: first token beside 63 decodes, {budget} tokens per step: {times}", flush=True)
    batches = {"batch": (32, 1000), "one": (1, 128)}
    columns = {
        f"batch {n}": probe(llm, [latency.prompt(context) for _ in range(n)], profile=device != "cpu")
        for part, (n, context) in batches.items()
        if part in parts
    }
    if columns:
        print_table(columns)
        row["decode_step"] = {name: column.row() for name, column in columns.items()}
    return row


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--models", nargs="+", default=["0.6B"], choices=nano_bench.SHAPES)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--parts", nargs="+", default=PARTS, choices=PARTS)
    args = parser.parse_args()
    for model in args.models:
        with tempfile.TemporaryDirectory() as scratch:
            folder = nano_bench.write_shape(model, Path(scratch))
            llm = LLM(folder, device=args.device, load_format="dummy", max_num_seqs=64, max_num_batched_tokens=2048,
                      max_model_len=16384)  # fmt: skip
        with llm:
            row = measure(llm, model, args.device, args.parts)
        record_run(args, f"latency-{args.device}-{model}", [row], args.device)


if __name__ == "__main__":
    main()
