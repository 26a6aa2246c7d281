"""Clients of serve_http.py and serve_load.py, in a process of their own: raw sockets, which cost less than what they
measure.

A JSON object comes from stdin: address ([host, port]); bodies, of POST /v1/completions, a connection each; `wait`, the
seconds until all are sent at once; `at`: when each is sent instead, in seconds after that, from which its times count;
`in_turn`: each when the one before has ended; `gaps`: the seconds between chunks are reported. A JSON object goes to
stdout: for each stream the seconds until its first chunk and its end, and how many tokens, chunks and reads there were.
ask() starts such processes.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time

END = b"data: [DONE]\n\n"


class Stream(asyncio.Protocol):
    def __init__(self, body: dict, has_gaps: bool) -> None:
        content = json.dumps(body | {"stream": True, "stream_options": {"include_usage": True}}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self.request, self.times, self.has_gaps = head.encode() + content, [], has_gaps
        self.num_reads, self.num_chunks, self.tail = 0, 0, b""
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport) -> None:
        self.transport = transport

    def start(self, due: float | None) -> None:
        self.begin = time.perf_counter() if due is None else due
        self.transport.write(self.request)

    def data_received(self, data: bytes) -> None:
        now = time.perf_counter()
        if not self.num_reads and not data.startswith(b"HTTP/1.1 200"):
            self.done.set_exception(RuntimeError(data.decode(errors="replace")))
        chunks = data.count(b"data: ")
        if self.has_gaps or not self.num_chunks:
            self.times += [now] * chunks
        self.num_chunks += chunks
        self.num_reads += 1
        self.tail = (self.tail + data)[-1000:]
        if END in self.tail:
            self.end = now
            self.transport.close()
            self.done.set_result(None)

    def connection_lost(self, error) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(f"the server has left: {error}; {self.tail!r}"))

    def result(self) -> dict:
        usage = json.loads(self.tail.split(END)[0].rpartition(b"data: ")[2].partition(b"\n")[0])["usage"]
        gaps = [later - earlier for earlier, later in zip(self.times, self.times[1:])] if self.has_gaps else []
        return {"first": self.times[0] - self.begin, "last": self.end - self.begin, "tokens": usage["completion_tokens"],
                "chunks": self.num_chunks, "reads": self.num_reads, "gaps": gaps}  # fmt: skip


def ask(address: tuple[str, int], bodies: list[dict], num_processes: int, **how) -> list[dict]:
    """All streams of all client processes."""
    command = [sys.executable, __file__]
    processes = [subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(num_processes)]
    for i, process in enumerate(processes):
        process.stdin.write(json.dumps({"address": address, "bodies": bodies[i::num_processes], **how}))
        process.stdin.close()
    results = [json.loads(process.stdout.read()) for process in processes]
    if any(process.wait() for process in processes):
        raise RuntimeError("a client failed")
    return [stream for result in results for stream in result["streams"]]


async def main() -> None:
    work = json.load(sys.stdin)
    loop = asyncio.get_running_loop()
    streams = [Stream(body, work.get("gaps", False)) for body in work["bodies"]]
    await asyncio.gather(*(loop.create_connection(lambda each=each: each, *work["address"]) for each in streams))
    await asyncio.sleep(work.get("wait", 0.5))
    start = time.perf_counter()
    for each, seconds in zip(streams, work.get("at") or [None] * len(streams), strict=True):
        if seconds is not None:
            await asyncio.sleep(max(start + seconds - time.perf_counter(), 0))
        each.start(None if seconds is None else start + seconds)
        if work.get("in_turn", False):
            await each.done
    await asyncio.gather(*(each.done for each in streams))
    seconds = time.perf_counter() - start
    print(json.dumps({"seconds": seconds, "cpu": time.process_time(), "streams": [each.result() for each in streams]}))


if __name__ == "__main__":
    asyncio.run(main())
