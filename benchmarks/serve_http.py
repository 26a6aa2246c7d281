#!/usr/bin/env python3
"""What HTTP costs: `pagedkv serve` beside the engine alone.

    python benchmarks/serve_http.py                            # on a GPU: 0.6B with random weights
    python benchmarks/serve_http.py --parts front              # no model: 27,000 tokens/s of a stand-in
    python benchmarks/serve_http.py --model demo --device cpu

front: CPU time of a front end, and of the engine's process for it, by token: 256 streams, each of which gets a token in
    every step of a stand-in for the engine
load: tokens/s of 256 streaming clients beside LLM.generate with the same requests
one: the first token and the time between tokens of one client, beside AsyncEngine in the client's process
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

from http_clients import ask
from record import make_parser, record_run

import pagedkv
from pagedkv import LLM, AsyncEngine, SamplingParams
from pagedkv.cli import nano_bench
from pagedkv.engine.outputs import EngineCounters, EngineStats
from pagedkv.engine.requests.request import Update
from pagedkv.engine.sampling_params import RequestOutputKind
from pagedkv.serve import children, wire
from pagedkv.serve.front_end import READY, STOP, Options
from pagedkv.serve.gate import shared_counts
from pagedkv.serve.host import EngineHost
from pagedkv.serve.lifecycle import bind
from pagedkv.serve.remote import Facts

DEMO = Path(pagedkv.__file__).parent / "data" / "demo_model"
STREAMS, RATE, NUM_TOKENS = 256, 27_000, 300
TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


# --- front: a stand-in for the engine


class Clock:
    """Has the interface of Engine that EngineHost uses. Every `seconds` each request gets a token."""

    def __init__(self, seconds: float) -> None:
        self.seconds, self._core, self._requests = seconds, self, {}
        threading.Thread(target=self._run, daemon=True).start()

    def _prepare(self, prompt, params, receiver, **options):
        return SimpleNamespace(receiver=receiver, left=params.max_tokens, key=None)

    def submit(self, requests) -> None:
        self._requests.update({id(each): each for each in requests})

    def abort(self, requests) -> None:
        for each in requests:
            self._requests.pop(id(each), None)

    def health(self) -> float | None:
        return 0.0 if self._requests else None

    def stats(self) -> EngineStats:
        pool = {"used": 0, "num_blocks": 1, "lookup_tokens": 0, "hit_tokens": 0}
        return EngineStats(len(self._requests), 0, 0, 0, EngineCounters(), pool, {}, {}, {})

    def _run(self) -> None:
        due = time.perf_counter()
        while True:
            due = max(due + self.seconds, time.perf_counter() - self.seconds)
            time.sleep(max(due - time.perf_counter(), 0))
            now, wakers = time.perf_counter(), {}
            for request in list(self._requests.values()):
                request.left -= 1
                is_last = request.left == 0
                update = Update(
                    request.key, 0, b"\x03\0\0\0", " word", None, 0.0, "length" if is_last else None, None, is_last, None,
                    now, now, now, 0, 0, None, None,
                )  # fmt: skip
                if wake := request.receiver.put(update):
                    wakers[wake] = None
                if is_last:
                    self.abort([request])
            for wake in wakers:
                wake()


async def start_front_end(host: EngineHost, control: socket.socket) -> tuple:
    facts = Facts(DEMO, SamplingParams(), 1 << 20, 16)
    ours, theirs = socket.socketpair()
    engine, engine_end = socket.socketpair()
    (listener,) = bind("127.0.0.1", 0)
    with shared_counts(1) as counts:
        descriptors = (each.fileno() for each in (theirs, engine_end, counts, listener))
        process = await children.start("pagedkv.serve.front_end", *descriptors)
    socket.send_fds(control, [b"+"], [engine.fileno()])
    for each in (theirs, engine, engine_end):
        each.close()
    ours.sendall(wire.to_bytes(Options(["clock"], facts)))
    ours.setblocking(False)
    assert await asyncio.get_running_loop().sock_recv(ours, 1) == READY
    return process, ours, listener.getsockname()


async def measure_front(rate: float, num_streams: int, num_processes: int) -> list[dict]:
    control, host_end = socket.socketpair()
    host = EngineHost(Clock(num_streams / rate), host_end)
    beats = asyncio.create_task(host.run())
    process, ours, address = await start_front_end(host, control)
    body = {"prompt": [3], "max_tokens": NUM_TOKENS}
    for _ in range(2):  # the first warms up
        before, own = cpu_seconds(process.pid), time.process_time()
        start = time.perf_counter()
        streams = await asyncio.to_thread(ask, address, [body] * num_streams, num_processes)
        seconds = time.perf_counter() - start
        front, own = cpu_seconds(process.pid) - before, time.process_time() - own
    beats.cancel()
    ours.send(STOP)
    await process.wait()
    count = sum(each["tokens"] for each in streams)
    assert count == NUM_TOKENS * num_streams
    took = statistics.median(each["last"] for each in streams)
    row = {
        "part": "front", "rate": rate, "streams": num_streams, "tokens_per_second": count / took, "seconds": seconds,
        "front_us_per_token": front * 1e6 / count, "engine_us_per_token": own * 1e6 / count,
        "tokens_per_chunk": count / sum(each["chunks"] - 3 for each in streams),
    }  # fmt: skip
    print(f"{num_streams} streams at {rate:,.0f} tokens/s: {row['tokens_per_second']:,.0f} tokens/s arrive; a token takes "
          f"{row['front_us_per_token']:.1f} us of the front end, {row['engine_us_per_token']:.1f} us of the engine's process; "
          f"{row['tokens_per_chunk']:.2f} tokens a chunk", flush=True)  # fmt: skip
    return [row]


# --- load and one: the server beside the engine


def write_model(size: str, folder: Path) -> dict:
    """A model's folder, and options of the engine: Qwen3 of this size with random weights and a vocabulary of random
    words; or "demo", the model in the package, with room for long answers."""
    if size == "demo":
        shutil.copytree(DEMO, folder, dirs_exist_ok=True)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 4096}))
        return {"max_num_seqs": STREAMS, "max_model_len": 2048}
    import tokenizers

    nano_bench.write_shape(size, folder)
    count = json.loads((folder / "config.json").read_text())["vocab_size"]
    rng = random.Random(0)
    words = dict.fromkeys(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    while len(words) < count:
        words["\u0120" * rng.randrange(2) + "".join(rng.choices("abcdefghijklmnopqrstuvwxyz", k=rng.randrange(2, 9)))] = None
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={word: i for i, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return {"load_format": "dummy", "max_model_len": 4096, "max_num_seqs": STREAMS, "max_num_batched_tokens": 16384}


@contextmanager
def server(folder: Path, options: dict, *more: str):
    """The address of `pagedkv serve`, and the ids of its processes."""
    words = [word for name, value in options.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    command = [sys.executable, "-m", "pagedkv", "serve", str(folder), "--port", "0", *words, *more]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            line = process.stdout.readline()
            host, port = line.split()[2].removeprefix("http://").split(":")
            children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
            yield (host, int(port)), list(map(int, children))
        finally:
            process.terminate()


def measure_load(folder: Path, options: dict, workload: nano_bench.Workload, args: argparse.Namespace) -> list[dict]:
    times = []
    with LLM(folder, **options) as llm:
        for _ in range(args.runs + 1):  # the first warms up
            start = time.perf_counter()
            llm.generate(workload.prompts, workload.params, use_tqdm=False)
            times.append(time.perf_counter() - start)
    rows = [{"part": "load", "way": "LLM.generate", "tokens_per_second": workload.num_new_tokens / statistics.median(times[1:])}]
    bodies = [{"prompt": prompt, "max_tokens": length, "ignore_eos": True, "temperature": 0.6, "top_p": 1, "top_k": 0}
              for prompt, length in zip(workload.prompts, workload.lengths)]  # fmt: skip
    for count in args.front_ends:
        times, cpu = [], []
        with server(folder, options, "--front-ends", str(count)) as (address, processes):
            for _ in range(args.runs + 1):
                before = [cpu_seconds(each) for each in processes]
                streams = ask(address, bodies, args.clients)
                cpu.append([cpu_seconds(each) - was for each, was in zip(processes, before)])
                times.append(max(each["last"] for each in streams))
        assert sum(each["tokens"] for each in streams) == workload.num_new_tokens
        chunks = sum(each["chunks"] for each in streams)
        rows.append({
            "part": "load", "way": f"HTTP, {count} front end{'s' * (count > 1)}",
            "tokens_per_second": workload.num_new_tokens / statistics.median(times[1:]),
            "tokens_per_chunk": workload.num_new_tokens / chunks, "cpu_seconds": cpu[1:], "seconds": times[1:],
        })  # fmt: skip
    for row in rows:
        share = row["tokens_per_second"] / rows[0]["tokens_per_second"]
        print(f"{row['way']:<22}{row['tokens_per_second']:>10,.0f} tokens/s  {share:.3f} of LLM.generate; "
              f"{row.get('tokens_per_chunk', float('nan')):.2f} tokens a chunk", flush=True)  # fmt: skip
    return rows


def measure_one(folder: Path, options: dict, vocab_size: int, num_requests: int) -> list[dict]:
    rng = random.Random(1)
    prompts = [[rng.randrange(3, vocab_size) for _ in range(128)] for _ in range(num_requests + 2)]
    params = SamplingParams(temperature=0.6, max_tokens=200, ignore_eos=True, output_kind=RequestOutputKind.DELTA)

    async def alone(engine: AsyncEngine) -> list[dict]:
        streams = []
        for prompt in prompts:
            start, times = time.perf_counter(), []
            async for _ in engine.generate(prompt, params):
                times.append(time.perf_counter())
            streams.append({"first": times[0] - start, "gaps": [b - a for a, b in itertools.pairwise(times)]})
        return streams

    found = {}
    with LLM(folder, **options) as llm:
        found["AsyncEngine"] = asyncio.run(alone(AsyncEngine(llm)))
    with server(folder, options) as (address, _):
        how = {"max_tokens": 200, "ignore_eos": True, "temperature": 0.6}
        found["HTTP"] = ask(address, [{"prompt": prompt, **how} for prompt in prompts], 1, gaps=True, in_turn=True)
    rows = []
    for way, streams in found.items():
        first = [each["first"] * 1e3 for each in streams[2:]]
        gaps = [gap * 1e3 for each in streams[2:] for gap in each["gaps"][:-2]]  # [DONE] and the usage come with the last
        rows.append({"part": "one", "way": way, "first_token_ms": statistics.median(first), "between_tokens_ms": statistics.median(gaps),
                     "mean_between_tokens_ms": statistics.fmean(gaps), "first_tokens_ms": first})  # fmt: skip
        print(f"{way:<12} first token {rows[-1]['first_token_ms']:.2f} ms; between tokens {rows[-1]['between_tokens_ms']:.3f} ms "
              f"(mean {rows[-1]['mean_between_tokens_ms']:.3f})", flush=True)  # fmt: skip
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--parts", nargs="+", choices=("front", "load", "one"), default=["load", "one"])
    parser.add_argument("--model", default="0.6B", choices=(*nano_bench.SHAPES, "demo"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--front-ends", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--clients", type=int, default=4, help="processes of clients (default: %(default)s)")
    parser.add_argument("--rate", type=float, default=RATE, help="tokens/s of the stand-in (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=STREAMS, help="of the stand-in (default: %(default)s)")
    args = parser.parse_args()
    rows = []
    if "front" in args.parts:
        rows += asyncio.run(measure_front(args.rate, args.streams, args.clients))
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        options = write_model(args.model, folder) | {"device": args.device}
        vocab_size = json.loads((folder / "config.json").read_text())["vocab_size"]
        if "load" in args.parts:
            size = {"max_len": 200, "vocab_size": vocab_size} if args.model == "demo" else {}
            rows += measure_load(folder, options, nano_bench.make_workload(STREAMS, **size), args)
        if "one" in args.parts:
            rows += measure_one(folder, options, vocab_size, 5 * args.runs)
    record_run(args, f"serve-http-{args.device}-{args.model}", rows, args.device)


if __name__ == "__main__":
    main()
