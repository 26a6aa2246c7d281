#!/usr/bin/env python3
"""Load on a server that runs, of pagedkv or of somebody else: the same clients and the same requests for each.

    pagedkv serve MODEL --max-num-seqs 256 &
    python benchmarks/serve_load.py localhost:8000 --name pagedkv
    python benchmarks/serve_load.py localhost:8000 --name pagedkv --trace mooncake_synthetic.jsonl

It asks for /v1/completions of prompts of token ids, as streams, and reports percentiles of the time to the first token
(TTFT), between two chunks (ITL), and from the first token to the last by token (TPOT).

streams: so many clients at once (--streams), each with a prompt and an answer of --lengths tokens; the first of --runs
    rounds warms up. One client asks ten times, one after the other.
trace: JSON lines as in traces.py. All of its first --requests requests at once tell the capacity; then they come at
    their own times, stretched so that --shares of the capacity are asked for. What the trace's prompts share is found in
    the cache, within a pass. A server that cannot take the longest gets --max-len, and longer requests are left out.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import subprocess
import time
import urllib.request
from pathlib import Path

import numpy as np
import traces
from http_clients import ask
from record import cores, cpu_name, make_parser, record

COMMON = {"ignore_eos": True, "temperature": 0.6, "top_p": 1}
SINGLE = 10  # requests of one client


def get(address: tuple[str, int], path: str) -> dict:
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}{path}") as answer:
        return json.load(answer)


def card() -> str | None:
    """The GPU's name. This process has nothing to do with it."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def percentiles(values: list[float]) -> dict[str, float]:
    """Milliseconds, of seconds."""
    return {f"p{p}": float(np.percentile(values, p)) * 1e3 for p in (50, 90, 99)}


def summary(streams: list[dict], seconds: float) -> dict:
    tokens, chunks = (sum(each[name] for each in streams) for name in ("tokens", "chunks"))
    gaps = [gap for each in streams for gap in each["gaps"][:-2]]  # the usage and [DONE] come with the last token
    per_token = [(each["last"] - each["first"]) / (each["tokens"] - 1) for each in streams if each["tokens"] > 1]
    return {
        "requests": len(streams), "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds,
        "tokens_per_chunk": tokens / (chunks - 2 * len(streams)), "ttft_ms": percentiles([each["first"] for each in streams]),
        "itl_ms": percentiles(gaps), "tpot_ms": percentiles(per_token),
    }  # fmt: skip


def show(row: dict) -> dict:
    named = {"TTFT": row["ttft_ms"], "ITL": row["itl_ms"], "TPOT": row["tpot_ms"]}
    times = "; ".join(f"{name} p50 {at['p50']:.2f} p99 {at['p99']:.2f} ms" for name, at in named.items())
    what = f"{row['streams']} streams" if row["part"] == "streams" else f"trace at {row['share']}"
    print(f"{what:<16}{row['tokens_per_second']:>9,.0f} tokens/s  {times}; {row['tokens_per_chunk']:.2f} tokens a chunk", flush=True)
    return row


def measure_streams(address: tuple[str, int], model: str, count: int, args: argparse.Namespace) -> dict:
    """The median round by its tokens per second."""
    num_prompt, num_new = args.lengths
    rows = []
    for run in range(args.runs + 1):
        rng = random.Random(1000 * count + run)
        prompts = [[rng.randrange(10, args.vocab_size) for _ in range(num_prompt)] for _ in range(SINGLE if count == 1 else count)]
        bodies = [COMMON | {"model": model, "prompt": prompt, "max_tokens": num_new} for prompt in prompts]
        streams = ask(address, bodies, min(args.clients, count), gaps=True, in_turn=count == 1)
        if {each["tokens"] for each in streams} != {num_new}:
            raise RuntimeError(f"answers should have {num_new} tokens: {sorted({each['tokens'] for each in streams})}")
        seconds = (sum if count == 1 else max)(each["last"] for each in streams)
        rows.append({"part": "streams", "streams": count, "lengths": args.lengths} | summary(streams, seconds))
    rows = sorted(rows[1:], key=lambda row: row["tokens_per_second"])
    return show(rows[len(rows) // 2] | {"rounds_tokens_per_second": [row["tokens_per_second"] for row in rows]})


def measure_trace(address: tuple[str, int], model: str, args: argparse.Namespace) -> list[dict]:
    requests = traces.load_requests(args.trace)[: args.requests]
    requests = [each for each in requests if each.input_length + each.output_length <= args.max_len]
    prompts = [traces.token_ids(request, args.vocab_size) for request in requests]
    num_prompt, rows, capacity = sum(map(len, prompts)), [], None
    salt = str(time.time())  # nothing of an earlier pass is found
    for share in (None, *args.shares):
        bodies = [
            COMMON | {"model": model, "prompt": prompt, "max_tokens": request.output_length, "cache_salt": f"{salt} {share}"}
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        at = [0.0] * len(requests)
        if share is not None:
            own = requests[-1].seconds - requests[0].seconds
            stretch = len(requests) / (share * capacity) / own
            at = [(each.seconds - requests[0].seconds) * stretch for each in requests]
        streams = ask(address, bodies, 1, gaps=True, at=at)
        seconds = max(start + each["last"] for start, each in zip(at, streams, strict=True))
        capacity = len(requests) / seconds if share is None else capacity
        rows.append({"part": "trace", "share": "once" if share is None else share, "prompt_tokens": num_prompt,
                     "requests_per_second": len(requests) / (at[-1] or seconds)} | summary(streams, seconds))  # fmt: skip
        show(rows[-1])
    return rows


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--name", required=True, help="of the server, for the record: serve-load-NAME.json")
    parser.add_argument("--streams", type=int, nargs="*", default=[256, 64, 1])
    parser.add_argument("--lengths", type=int, nargs=2, default=[512, 256], metavar=("PROMPT", "NEW"))
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--clients", type=int, default=4, help="processes of clients (default: %(default)s)")
    parser.add_argument("--vocab-size", type=int, default=10_000, help="prompts have ids below it (default: %(default)s)")
    parser.add_argument("--trace", type=Path, metavar="FILE")
    parser.add_argument("--requests", type=int, default=120, help="of the trace, from its start (default: %(default)s)")
    parser.add_argument("--max-len", type=int, default=40_960, help="of a prompt and its answer (default: %(default)s)")
    parser.add_argument("--shares", type=float, nargs="+", default=[0.5, 0.8, 1.0])
    args = parser.parse_args()
    host, _, port = args.address.rpartition(":")
    address = (host, int(port))
    model = get(address, "/v1/models")["data"][0]["id"]
    rows = [measure_streams(address, model, count, args) for count in args.streams]
    if args.trace is not None:
        rows += measure_trace(address, model, args)
    if not args.no_record:
        machine = {"cpu": cpu_name(), "cores": cores(), "gpu": card()}
        record(f"serve-load-{args.name}", rows, machine=machine, versions={args.name: get(address, "/version")["version"]},
               is_from_here=False, trace=args.trace and args.trace.name)  # fmt: skip


if __name__ == "__main__":
    main()
