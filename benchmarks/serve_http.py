#!/usr/bin/env python3
"""What HTTP costs: `pagedkv serve` beside the engine alone.

    python benchmarks/serve_http.py --parts front              # a CPU is enough: no model, 27,000 tokens/s of a stand-in

front: CPU time of a front end, and of the engine's process for it, by token: 256 streams, each of which gets a token in
    every step of a stand-in for the engine
load: tokens/s of 256 streaming clients beside LLM.generate with the same requests
one: the first token and the time between tokens of one client, beside AsyncEngine in the client's process
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace

from record import add_record_option, record_run

import pagedkv
from pagedkv import SamplingParams
from pagedkv.engine.outputs import EngineCounters, EngineStats
from pagedkv.engine.requests.request import Update
from pagedkv.serve import children, wire
from pagedkv.serve.front_end import READY, STOP, Options
from pagedkv.serve.host import EngineHost
from pagedkv.serve.lifecycle import bind
from pagedkv.serve.remote import Facts

DEMO = Path(pagedkv.__file__).parent / "data" / "demo_model"
CLIENTS = Path(__file__).parent / "http_clients.py"
STREAMS, RATE, NUM_TOKENS = 256, 27_000, int(os.environ.get("NT", "300"))
TICK = os.sysconf("SC_CLK_TCK")


def cpu_seconds(process: int) -> float:
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def ask(address: tuple[str, int], bodies: list[dict], num_processes: int, **how) -> list[dict]:
    """All streams of all client processes."""
    command = [sys.executable, str(CLIENTS)]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(num_processes)]
    for i, process in enumerate(processes):
        process.stdin.write(json.dumps({"address": address, "bodies": bodies[i::num_processes], **how}))
        process.stdin.close()
    results = [json.loads(process.stdout.read()) for process in processes]
    if any(process.wait() for process in processes):
        raise RuntimeError("a client failed")
    return [stream for result in results for stream in result["streams"]]


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
    listener = bind("127.0.0.1", 0)
    process = await children.start("pagedkv.serve.front_end", theirs.fileno(), engine_end.fileno(), listener.fileno())
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=("front", "load", "one"), default=["load", "one"])
    parser.add_argument("--rate", type=float, default=RATE, help="tokens/s of the stand-in (default: %(default)s)")
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--clients", type=int, default=2, help="processes of clients (default: %(default)s)")
    add_record_option(parser)
    args = parser.parse_args()
    rows = []
    if "front" in args.parts:
        rows += asyncio.run(measure_front(args.rate, args.streams, args.clients))


if __name__ == "__main__":
    main()
