"""The engine on the CPU beside torch: a prompt of 512 tokens, 16 requests that decode at once, and one.

    python benchmarks/cpu_engine.py [--isas native avx2] [--onednn FOLDER] [--rounds 6]

The model is a Qwen3-0.6B of random bfloat16 weights. The engine takes whole steps, from the schedule to the sampled
tokens. torch computes the same weights' products and the attention of as many tokens and nothing else: no norm, no
rotation, no activation, no sampling; in bfloat16, and in float32, which has twice the weights and is what torch is fast
with where a CPU has no instructions for bfloat16. All take turns, each in phases with a sleep before them, in which the
other's threads fall asleep. Decodes are held against a plain read of the weights as well, by two threads, in the same
turns.

Each instruction set is a process of its own (torch is held to it, too). With --onednn, the folder of a libdnnl.so.3
(lib of the unpacked wheel onednn-cpu-gomp), the native one runs a second time with oneDNN, which pagedkv takes only on
AMD's CPUs with AVX512_BF16.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from record import make_parser, record, version

from pagedkv import LLM, SamplingParams, ops
from pagedkv.cli import nano_bench

PROMPT, CONTEXT, BATCH = 512, 64, 16  # tokens of the prompt; where decodes begin; requests at once
Q_HEADS, KV_HEADS, HEAD_DIM = 16, 8, 128
STEPS = 8  # of a phase of decodes
LONG = 0.5  # seconds of a call that is a phase of its own
SLEEP = 0.2  # seconds after which no thread of the other side spins
ABSENT = 0x77  # a byte
CASES = ["prompt", "batch", "one"]
TORCH = {"torch": torch.bfloat16, "torch_float32": torch.float32}
ENVIRONMENTS = {"native": {}, "avx2": {"PAGEDKV_CPU_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2",
                                       "ONEDNN_MAX_CPU_ISA": "AVX2"}}  # fmt: skip


class Ours:
    """An engine, and its steps one by one."""

    def __init__(self, folder: Path) -> None:
        self.llm = LLM(nano_bench.write_shape("0.6B", folder), device="cpu", load_format="dummy", max_num_seqs=BATCH,
                       max_num_batched_tokens=1024, max_model_len=1024, enable_prefix_caching=False)  # fmt: skip
        self.rng = random.Random(0)
        model = self.llm._runner.model
        pairs = [(layer.attention, layer.mlp) for layer in model.layers]
        self.layers = [[torch.from_dlpack(w) for w in (a.qkv_weight, a.o_weight, m.gate_up_weight, m.down_weight)]
                       for a, m in pairs]  # fmt: skip
        self.head = torch.from_dlpack(model.head)
        self.weights = [*(weight for layer in self.layers for weight in layer), self.head]

    def add(self, length: int, max_tokens: int) -> str:
        prompt = [self.rng.randint(0, 10000) for _ in range(length)]
        return self.llm.add_request(prompt, SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=max_tokens))

    def prompt(self) -> None:
        self.add(PROMPT, 1)
        while self.llm.has_unfinished_requests():
            self.llm.step()

    @contextmanager
    def decoding(self, count: int) -> Iterator[Callable[[], None]]:
        """A step of so many requests that are past their prompts."""

        def step() -> None:
            before = self.llm.counters.decode_tokens
            self.llm.step()
            assert self.llm.counters.decode_tokens == before + count

        ids = [self.add(CONTEXT, 900) for _ in range(count)]
        before = self.llm.counters.decode_tokens
        while self.llm.counters.decode_tokens == before:
            self.llm.step()
        yield step
        for one in ids:
            self.llm.abort(one)


class Torch:
    """The products and the attention of a step, on the same weights; in float32 on copies of them."""

    def __init__(self, ours: Ours, dtype: torch.dtype) -> None:
        self.dtype, self.head = dtype, ours.head.to(dtype)
        self.layers = [[weight.to(dtype) for weight in weights] for weights in ours.layers]

    def step(self, num_seqs: int, num_queries: int, num_keys: int) -> Callable[[], None]:
        """Attention is the faster of torch's two ways to share KV heads."""
        functional, rows = torch.nn.functional, num_seqs * num_queries
        x = {size: torch.randn(rows, size).to(self.dtype) for size in (1024, 2048, 3072)}
        q = torch.randn(num_seqs, Q_HEADS, num_queries, HEAD_DIM).to(self.dtype)
        k = torch.randn(num_seqs, KV_HEADS, num_keys, HEAD_DIM).to(self.dtype)
        expanded = k.repeat_interleave(Q_HEADS // KV_HEADS, dim=1)
        causal = num_queries > 1
        ways = [lambda: functional.scaled_dot_product_attention(q, k, k, is_causal=causal, enable_gqa=True),
                lambda: functional.scaled_dot_product_attention(q, expanded, expanded, is_causal=causal)]  # fmt: skip
        attend = min(ways, key=lambda way: min(seconds(way) for _ in range(5)))

        def step() -> None:
            for weights in self.layers:
                functional.linear(x[1024], weights[0])
                attend()
                for weight in weights[1:]:
                    functional.linear(x[weight.shape[1]], weight)
            functional.linear(x[1024][:num_seqs], self.head)

        return step


def plain_reads(weights: list[torch.Tensor]) -> dict[str, Callable[[], object]]:
    """Ways to read the weights with two threads: torch's sum, and memchr for a byte that is not there."""
    flat = [weight.view(torch.float32) for weight in weights]
    find = ctypes.CDLL(None).memchr
    find.argtypes, find.restype = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t], ctypes.c_void_p
    for weight in weights:
        of_bytes = weight.view(torch.uint8)
        of_bytes[of_bytes == ABSENT] = ABSENT - 1

    def read(half: int) -> None:
        for weight in weights:
            size = weight.nbytes // 2
            assert find(weight.data_ptr() + half * size, ABSENT, size) is None

    def two_halves() -> None:
        other = threading.Thread(target=read, args=(1,))
        other.start()
        read(0)
        other.join()

    return {"sum": lambda: [weight.sum() for weight in flat], "memchr": two_halves}


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def in_turns(contestants: dict[str, tuple[Callable[[], object], int]], rounds: int) -> dict[str, list[float]]:
    """Seconds of each call. A contestant's phase is so many calls, and one before them that wakes its threads, unless
    one alone takes so long that it does not matter."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds):
        for name, (function, calls) in contestants.items():
            time.sleep(SLEEP)
            first = seconds(function)
            times[name] += [first] if first > LONG else [seconds(function) for _ in range(calls)]
    return times


def row_of(case: str, tokens: int, times: dict[str, list[float]]) -> dict:
    row: dict = {"case": case, "tokens": tokens}
    for name, values in times.items():
        low, median, high = statistics.quantiles(values, n=4) if len(values) > 1 else values * 3
        row[f"{name}_ms"] = {"median": median * 1e3, "best": min(values) * 1e3, "quartiles": [low * 1e3, high * 1e3]}
    for name in TORCH:
        for kind in ("median", "best"):
            row[f"times_{name}_{kind}"] = row[f"{name}_ms"][kind] / row["pagedkv_ms"][kind]
    return row


def read_share(row: dict, weight_bytes: int) -> dict:
    """Adds how much of the step's time a plain read of the weights takes, by the faster way to read."""
    for kind in ("median", "best"):
        read_ms = min(row[f"{name}_ms"][kind] for name in ("sum", "memchr"))
        row[f"read_gb_s_{kind}"] = weight_bytes / read_ms / 1e6
        row[f"read_share_{kind}"] = read_ms / row["pagedkv_ms"][kind]
    return row | {"weight_bytes": weight_bytes}


def measure(rounds: int, cases: list[str]) -> list[dict]:
    """In this process, by its instruction set and the libraries that it finds."""
    torch.set_num_threads(ops.get_num_threads())
    with tempfile.TemporaryDirectory() as folder:
        ours = Ours(Path(folder))
    theirs = {name: Torch(ours, dtype) for name, dtype in TORCH.items()}
    rows, reads = [], {name: (read, STEPS) for name, read in plain_reads(ours.weights).items()}
    with ours.llm:
        if "prompt" in cases:
            contestants = {"pagedkv": (ours.prompt, 1)}
            contestants |= {name: (each.step(1, PROMPT, PROMPT), 1) for name, each in theirs.items()}
            rows.append(row_of("prompt", PROMPT, in_turns(contestants, rounds)))
        for case, count in (("batch", BATCH), ("one", 1)):
            if case not in cases:
                continue
            keys = CONTEXT + STEPS * rounds // 2
            with ours.decoding(count) as step:
                contestants = {"pagedkv": (step, STEPS)}
                contestants |= {name: (each.step(count, 1, keys), STEPS) for name, each in theirs.items()}
                times = in_turns(contestants | reads, rounds)
            rows.append(read_share(row_of(case, count, times), sum(weight.nbytes for weight in ours.weights)))
    info = ops.build_info()
    blas = re.sub(r"\(\S*/", "(", info["blas"])  # its file without the folders, which are this machine's own business
    common = {"isa": info["isa"], "torch_isa": torch.backends.cpu.get_cpu_capability(), "blas": blas}
    return [common | row for row in rows]


def show(rows: list[dict]) -> None:
    for row in rows:
        ours = row["pagedkv_ms"]
        text = f"{row['variant']:16} {row['case']:7} {ours['median']:8.1f} ms (best {ours['best']:.1f})"
        for name in TORCH:
            theirs = row[f"{name}_ms"]
            text += f", {name} {theirs['median']:.1f} ({theirs['best']:.1f}): x {row[f'times_{name}_median']:.2f}"
        if "read_gb_s_best" in row:
            text += f", {row['read_share_median']:.0%} ({row['read_share_best']:.0%}) of a plain read's time at "
            text += f"{row['read_gb_s_median']:.1f} ({row['read_gb_s_best']:.1f}) GB/s"
        print(text, flush=True)


def run_variant(isa: str, onednn: str | None, args: argparse.Namespace) -> list[dict]:
    """By a process of its own."""
    environment = os.environ | ENVIRONMENTS[isa]
    if onednn:
        environment["LD_LIBRARY_PATH"] = onednn
    command = [sys.executable, __file__, "--child", "--rounds", str(args.rounds), "--cases", *args.cases]
    child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    rows = json.loads(child.stdout.splitlines()[-1])
    return [{"variant": isa + " with oneDNN" * bool(onednn)} | row for row in rows]


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--isas", nargs="*", choices=[*ENVIRONMENTS], default=[*ENVIRONMENTS])
    parser.add_argument("--cases", nargs="*", choices=CASES, default=CASES)
    parser.add_argument("--onednn", metavar="FOLDER", help="that holds a libdnnl.so.3")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(args.rounds, args.cases)))
        return
    rows = []
    for isa in args.isas:
        for onednn in dict.fromkeys((None, args.onednn if isa == "native" else None)):
            rows += (new := run_variant(isa, onednn, args))
            show(new)
    if not args.no_record:
        record("cpu-engine", rows, machine={"threads": ops.get_num_threads()}, versions={"torch": version("torch")})


if __name__ == "__main__":
    main()
