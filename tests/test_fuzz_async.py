"""AsyncEngine beside generate(): two event loops, tasks that leave, abort or are cancelled at any moment.

Each answer that ends by itself is compared with the one that the same request gets alone, and nothing is left over.
"""

from __future__ import annotations

import asyncio
import random
import sys
import threading
import time
from pathlib import Path

import pytest
from tiny_engine import settle

import pagedkv
from pagedkv import LLM, AsyncEngine, SamplingParams
from pagedkv.engine import RequestOutputKind

FOLDER = Path(pagedkv.__file__).parent / "data" / "demo_model"
SECONDS = 3
OPTIONS = {"device": "cpu", "dtype": "float32", "block_size": 4}


@pytest.fixture(scope="module")
def cases() -> list[tuple]:
    """Prompts and options, with the tokens and texts of their answers."""
    rng, cases = random.Random(5), []
    with LLM(FOLDER, num_blocks=400, enable_prefix_caching=False, **OPTIONS) as llm:
        for seed in range(30):
            prompt = [rng.randrange(2, 16) for _ in range(rng.randrange(1, 40))]
            options = {"temperature": rng.choice([0, 0.8]), "seed": seed, "max_tokens": rng.randrange(1, 40),
                       "ignore_eos": rng.random() < 0.5, "stop": ["12"] if rng.random() < 0.3 else ()}  # fmt: skip
            if options["temperature"] and rng.random() < 0.3:
                options["n"] = 2
            output = llm.generate([prompt], SamplingParams(**options), use_tqdm=False)[0]
            cases.append((prompt, options, {one.index: (one.token_ids, one.text) for one in output.outputs}))
    return cases


class Fuzz:
    def __init__(self, llm: LLM, cases: list[tuple]) -> None:
        self.llm, self.engine, self.cases = llm, AsyncEngine(llm), cases
        self.problems: list[object] = []
        self.num_compared = 0
        self.end = time.monotonic() + SECONDS

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end

    async def read(self, rng: random.Random) -> None:
        prompt, options, expected = rng.choice(self.cases)
        kind, fate, request_id = rng.choice(list(RequestOutputKind)), rng.random(), str(rng.random())
        found: dict[int, tuple[list[int], str]] = {}
        params = SamplingParams(**options, output_kind=kind)
        async for output in self.engine.generate(prompt, params, request_id):
            for one in output.outputs:
                tokens, text = found.get(one.index, ([], "")) if kind is RequestOutputKind.DELTA else ([], "")
                found[one.index] = tokens + one.token_ids, text + one.text
            if fate < 0.15:
                return
            if fate < 0.25:
                await self.engine.abort(request_id)
            elif output.finished:
                self.num_compared += 1
                if found != expected:
                    self.problems.append((kind, found, expected, output.error))

    async def loop(self, rng: random.Random) -> None:
        tasks: set[asyncio.Task] = set()
        while not self.is_over:
            if len(tasks) < 12:
                tasks.add(asyncio.create_task(self.read(rng)))
            if rng.random() < 0.1 and tasks:
                rng.choice(list(tasks)).cancel()
            await asyncio.sleep(rng.random() * 0.004)
            tasks = {task for task in tasks if not self.is_done(task)}
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 60)
        for task in tasks:
            self.is_done(task)

    def is_done(self, task: asyncio.Task) -> bool:
        if task.done() and not task.cancelled() and task.exception() is not None:
            self.problems.append(repr(task.exception()))
        return task.done()

    def batches(self, rng: random.Random) -> None:
        while not self.is_over:
            some = rng.sample(self.cases, 3)
            outputs = self.llm.generate([case[0] for case in some], [SamplingParams(**case[1]) for case in some], use_tqdm=False)
            for (_, _, expected), output in zip(some, outputs, strict=True):
                if {one.index: (one.token_ids, one.text) for one in output.outputs} != expected:
                    self.problems.append(("batch", output, expected))

    def run(self, target, *args) -> None:
        try:
            target(*args)
        except BaseException as error:
            self.problems.append(repr(error))


@pytest.mark.parametrize("behind", [0, 1])
def test_readers_that_come_and_go(cases, behind, seed):
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)
    try:
        with LLM(FOLDER, num_blocks=60, max_num_seqs=4, max_num_batched_tokens=16, swap_space=1 << 17, **OPTIONS) as llm:
            llm._runner.num_behind = behind
            fuzz = Fuzz(llm, cases)
            loops = [lambda number=number: asyncio.run(fuzz.loop(random.Random(seed + number))) for number in (1, 2)]
            jobs = [*loops, lambda: fuzz.batches(random.Random(seed))]
            threads = [threading.Thread(target=fuzz.run, args=(job,), daemon=True) for job in jobs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
            assert not any(thread.is_alive() for thread in threads), "a thread hangs"
            assert fuzz.problems == []
            settle(llm)
            assert not llm.manager.stats()["used"] and not len(llm._book) and not llm._book._by_id
            print(fuzz.num_compared, "answers compared")
            assert fuzz.num_compared > 3
    finally:
        sys.setswitchinterval(interval)
