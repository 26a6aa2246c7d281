"""Routes a trace's requests over simulated replicas: what is found in their caches, how evenly they work, and how long
the first token takes, by pagedkv's Router and by three that know less.

A replica is a real BlockManager and a clock that jumps: it computes prompts one after another at a fixed rate, and
answers beside them at a fixed time for each token. The trace arrives so fast that the replicas would be at work all the
time if nothing were found, however many there are. The trace is JSON lines as in traces.py; without one a small
generated trace is replayed and nothing is recorded.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from array import array
from bisect import bisect
from contextlib import aclosing
from pathlib import Path
from typing import Any

import numpy as np
import traces
from record import make_parser, record

from pagedkv import BlockManager, OutOfBlocks, SamplingParams
from pagedkv.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagedkv.replicas import Replica, ReplicaDied, Router
from pagedkv.replicas.prefixes import spans_of

TOKEN_SECONDS = 0.01


class VirtualLoop(asyncio.SelectorEventLoop):
    """Where nothing is left to do until a timer, its clock jumps there."""

    def __init__(self) -> None:
        super().__init__()
        self._now, select = 0.0, self._selector.select

        def jump(timeout: float | None) -> list:
            if timeout is None:
                raise RuntimeError("everybody waits for somebody else")
            self._now += max(timeout, 0)
            return select(0)

        self._selector.select = jump

    def time(self) -> float:
        return self._now


class SimulatedReplica(Replica):
    def __init__(self, pool_tokens: int, *, tokens_per_second: float = 30_000, block_size: int = 16) -> None:
        self._size, self._rate = (pool_tokens // block_size, block_size), tokens_per_second
        self.computed = self.hits = self.starts = 0
        self._ids = itertools.count()

    async def start(self) -> None:
        self.starts += 1
        self.manager, self._prefill = BlockManager(*self._size), asyncio.Lock()
        self._death = asyncio.get_running_loop().create_future()

    def die(self) -> None:
        self._death.set_result(None)

    async def _sleep(self, death: asyncio.Future, seconds: float) -> None:
        await asyncio.wait({death}, timeout=seconds)
        if death.done():
            raise ReplicaDied("it was told to")

    async def match(self, token_ids: array, salt: bytes) -> int:
        if self._death.done():
            raise ReplicaDied("it was told to")
        return sum(self.manager.match(token_ids, salt=salt))

    async def generate(self, prompt: Any, params: SamplingParams, request_id: str, *, priority: int = 0, salt: bytes = b""):
        ids, number, manager, death = prompt["prompt_token_ids"], next(self._ids), self.manager, self._death
        async with self._prefill:
            while True:
                await self._sleep(death, 0)
                try:
                    hits = manager.allocate(number, ids, salt=salt)
                    break
                except OutOfBlocks:  # until an answer ends
                    await self._sleep(death, 0.01)
            await self._sleep(death, (len(ids) - hits) / self._rate)
            manager.commit(number, len(ids))
            self.computed, self.hits = self.computed + len(ids) - hits, self.hits + hits
        try:
            yield _output(request_id, hits, is_last=False)
            await self._sleep(death, params.max_tokens * TOKEN_SECONDS)
        finally:
            manager.free(number)
        yield _output(request_id, hits, is_last=True)

    async def close(self) -> None:
        pass


def _output(name: str, hits: int, is_last: bool) -> RequestOutput:
    answer = CompletionOutput(0, None, [], None, None, "length" if is_last else None, None)
    return RequestOutput(name, None, [], None, [answer], is_last, None, hits, RequestMetrics(None, 0.0, None, 0))


class RandomRouter(Router):
    random = random.Random(0)

    async def _choose(self, ids, spans, salt):
        return self.random.choice(list(self._living)), len(ids)


class RoundRobin(Router):
    turn = -1

    async def _choose(self, ids, spans, salt):
        self.turn += 1
        return list(self._living)[self.turn % len(self._living)], len(ids)


class ConsistentHashing(Router):
    """By the first 512 tokens, on a ring on which every replica has 100 places."""

    async def _choose(self, ids, spans, salt):
        lives = list(self._living)
        ring = sorted((spans_of(array("i", [i] * 64), b"%d" % place)[0], i) for i in range(len(lives)) for place in range(100))
        self._choose = lambda *prompt: self._on(ring, lives, *prompt)
        return await self._choose(ids, spans, salt)

    async def _on(self, ring, lives, ids, spans, salt):
        key = (spans or [b""])[: traces.ID_TOKENS // 64][-1]
        return lives[ring[bisect(ring, (key, 0)) % len(ring)][1]], len(ids)


ROUTERS = {"random": RandomRouter, "round robin": RoundRobin, "consistent hashing": ConsistentHashing, "pagedkv": Router}


def simulate(router: type[Router], trace: list[traces.Request], count: int, pool_tokens: int, **options: Any) -> dict:
    """What becomes of a trace by this router with so many replicas; the options are SimulatedReplica's."""
    replicas = [SimulatedReplica(pool_tokens, **options) for _ in range(count)]
    total = sum(request.input_length for request in trace)
    per_second = count * replicas[0]._rate / total * trace[-1].seconds  # of the trace in a second of the replicas
    waits: list[float] = []

    async def serve(front: Router, request: traces.Request) -> None:
        loop = asyncio.get_running_loop()
        arrival = request.seconds / per_second
        await asyncio.sleep(arrival)
        prompt = array("i", traces.expand(request.input_length, request.hash_ids).tobytes())
        async with aclosing(front.generate(prompt, SamplingParams(max_tokens=request.output_length))) as outputs:
            await anext(outputs)
            waits.append(loop.time() - arrival)
            async for _ in outputs:
                pass

    async def run() -> None:
        async with router(replicas, table_tokens=pool_tokens) as front, asyncio.TaskGroup() as group:
            for request in trace:
                group.create_task(serve(front, request))

    start = time.perf_counter()
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
    computed = [each.computed for each in replicas]
    return {
        "replicas": count, "pool_tokens": pool_tokens, "prompt_tokens": total,
        "hit_rate": sum(each.hits for each in replicas) / total,
        "busiest_to_mean": max(computed) * count / sum(computed),
        "first_token_mean_s": float(np.mean(waits)), "first_token_p99_s": float(np.percentile(waits, 99)),
        "ran_for_s": time.perf_counter() - start,
    }  # fmt: skip


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("trace", type=Path, nargs="?", help="JSON lines, see traces.py")
    parser.add_argument("--replicas", type=int, nargs="+", default=[1, 4, 16, 64], help="how many")
    parser.add_argument("--pool-tokens", type=int, default=500_000, help="the size of each one's pool, in tokens")
    args = parser.parse_args()

    rng = np.random.default_rng(0)
    trace = traces.load_requests(args.trace) if args.trace else traces.generate_requests(rng, 500)
    rows = []
    print("replicas  router              hit rate  busiest/mean  first token: mean  p99 (s)")
    for count, (name, router) in itertools.product(args.replicas, ROUTERS.items()):
        row = {"router": name} | simulate(router, trace, count, args.pool_tokens)
        rows.append(row)
        print(
            f"{count:8}  {name:18} {row['hit_rate']:9.1%} {row['busiest_to_mean']:13.2f} {row['first_token_mean_s']:18.2f} "
            f"{row['first_token_p99_s']:8.1f}   ({row['ran_for_s']:.1f} s)", flush=True,
        )  # fmt: skip
    if args.trace and not args.no_record:
        record("replicas_trace", rows, trace=args.trace.name, requests=len(trace))


if __name__ == "__main__":
    main()
