"""Interrupts at random moments in the main thread, while other threads are served by the same engine.

    python tests/fuzz_interrupts.py --seconds 1800 --seed 1

A timer presses Ctrl-C in the main thread, in the middle of generate(), stream(), step(), and AsyncEngine's event loop,
where asyncio.run() makes a cancelled task of it. Other threads compare each of their answers (tokens, text, log
probabilities) with the one that the same request gets alone. It prints one JSON object; test_fuzz_interrupts.py runs it for some seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
import json
import os
import random
import signal
import threading
import time
from collections import Counter
from pathlib import Path

import numpy as np

import pagedkv
from pagedkv import LLM, AsyncEngine, SamplingParams

FOLDER = Path(pagedkv.__file__).parent / "data" / "demo_model"
VOCAB_SIZE = 16
HANGS_AFTER = 120  # seconds: a call in the main thread takes less than one
OPTIONS = {"device": "cpu", "dtype": "float32", "block_size": 4}


def alternate(request, tokens):
    """Forbids one token, which depends on all before: a token too many or too few changes the rest."""
    mask = np.ones(VOCAB_SIZE, np.bool_)
    mask[(sum(tokens) + len(tokens)) % VOCAB_SIZE] = False
    return mask


def draw_cases() -> list[tuple]:
    """Prompts and options, with the answers that they get alone: (tokens, text, which tokens have log probabilities)."""
    rng, cases = random.Random(5), []
    with LLM(FOLDER, num_blocks=400, enable_prefix_caching=False, **OPTIONS) as llm:
        for seed in range(30):
            prompt = [rng.randrange(2, VOCAB_SIZE) for _ in range(rng.randrange(1, 40))]
            params = SamplingParams(
                temperature=rng.choice([0, 0.8]), seed=seed, max_tokens=rng.randrange(1, 40), ignore_eos=True,
                logprobs=rng.choice([None, None, 2]), prompt_logprobs=rng.choice([None, None, None, 1]),
                mask=alternate if rng.random() < 0.2 else None, stop=["12"] if rng.random() < 0.3 else (),
                frequency_penalty=rng.choice([0, 0, 0.5]),
            )  # fmt: skip
            cases.append((prompt, params, seen(llm.generate([prompt], params, use_tqdm=False))))
    return cases


def seen(outputs) -> tuple:
    """What the outputs of one request say together; each holds what is new."""
    tokens = [token for output in outputs for token in output.token_ids]
    text = "".join(output.text for output in outputs)
    logprobs = [list(each) for output in outputs for each in output.logprobs or ()]
    scored = outputs[-1].prompt_logprobs
    return tokens, text, logprobs, scored and [each and list(each) for each in scored], outputs[-1].finish_reason


class Fuzz:
    def __init__(self, seed: int, seconds: float, cases: list[tuple]) -> None:
        self.seed, self.end, self.cases = seed, time.monotonic() + seconds, cases
        self.counts: Counter[str] = Counter()
        self.problems: list[str] = []
        self.llm = LLM(
            FOLDER, num_blocks=60, max_num_seqs=5, max_num_batched_tokens=16, swap_space=1 << 18, seed=0, **OPTIONS
        )
        self.llm._runner.num_behind = seed % 2

    @property
    def is_over(self) -> bool:
        return time.monotonic() > self.end

    # --- threads that nobody interrupts

    def ask(self, number: int) -> None:
        rng = random.Random(self.seed * 100 + number)
        while not self.is_over:
            prompt, params, expected = rng.choice(self.cases)
            try:
                if rng.random() < 0.5:
                    found = seen(self.llm.generate([prompt], params, use_tqdm=rng.random() < 0.2))
                else:
                    found = seen(list(self.llm.stream(prompt, params)))
            except BaseException as error:
                found = repr(error)
            self.counts["answers"] += 1
            if found != expected:
                self.problems.append(f"thread {number}: {found} but alone {expected}")

    # --- the main thread

    def batch(self, rng: random.Random) -> None:
        some = rng.sample(self.cases, rng.randrange(1, 5))
        self.llm.generate([case[0] for case in some], [case[1] for case in some], use_tqdm=rng.random() < 0.5)

    def stream(self, rng: random.Random) -> None:
        prompt, params, _ = rng.choice(self.cases)
        for _ in self.llm.stream(prompt, params):
            if rng.random() < 0.05:
                break

    def step(self, rng: random.Random) -> None:
        for prompt, params, _ in rng.sample(self.cases, 2):
            request_id = self.llm.add_request(prompt, params)
        while self.llm.has_unfinished_requests():
            self.llm.step()
            if rng.random() < 0.05:
                self.llm.abort(request_id)

    def event_loop(self, rng: random.Random) -> None:
        engine = AsyncEngine(self.llm)

        async def read(prompt, params):
            async for _ in engine.generate(prompt, params):
                pass

        async def main():
            await asyncio.gather(*(read(prompt, params) for prompt, params, _ in rng.sample(self.cases, 3)))

        asyncio.run(main())

    def interrupt(self) -> None:
        rng = random.Random(self.seed)
        while not self.is_over:
            way = rng.choice([self.batch, self.batch, self.stream, self.stream, self.step, self.event_loop])
            faulthandler.dump_traceback_later(HANGS_AFTER, exit=True)
            try:
                # After an interrupt at its very end, asyncio.run() leaves its own handler in place. The next
                # asyncio.run() then does not handle Ctrl-C itself, and an interrupt in its loop may lose the wakeup of
                # a task.
                signal.signal(signal.SIGINT, signal.default_int_handler)
                signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.0002, 0.03))
                way(rng)
                signal.setitimer(signal.ITIMER_REAL, 0)
                self.counts["calls that ended by themselves"] += 1
            except (KeyboardInterrupt, asyncio.CancelledError):  # asyncio.run() does not always make one of the other
                self.counts["interrupts"] += 1
            except BaseException as error:
                self.problems.append(f"{way.__name__} in the main thread: {error!r}")

    def run(self) -> dict:
        threads = [threading.Thread(target=self.ask, args=(number,), daemon=True) for number in range(3)]
        for thread in threads:
            thread.start()
        signal.signal(signal.SIGALRM, press_ctrl_c)
        self.interrupt()
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        faulthandler.cancel_dump_traceback_later()
        for thread in threads:
            thread.join(60)
        if any(thread.is_alive() for thread in threads):
            faulthandler.dump_traceback(all_threads=True)
            self.problems.append("a thread hangs")
        else:
            self.look_after()
        return {"seed": self.seed, **self.counts, "problems": self.problems}

    def look_after(self) -> None:
        """Nothing is left of what was interrupted, but requests that the main thread had queued and not taken."""
        for _ in range(600):
            if not len(self.llm._book):
                break
            time.sleep(0.1)
        self.llm.manager.check()
        if self.llm.manager.stats()["used"] or self.llm._book._by_id:
            self.problems.append(f"left: {self.llm.manager.stats()}, {list(self.llm._book._by_id)}")
        self.llm.close()


def press_ctrl_c(*_) -> None:
    signal.raise_signal(signal.SIGINT)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=10)
    args = parser.parse_args()
    start = time.monotonic()
    result = Fuzz(args.seed, args.seconds, draw_cases()).run()
    print(json.dumps(result | {"seconds": round(time.monotonic() - start)}), flush=True)
    os._exit(bool(result["problems"]))  # threads that hang must not keep it


if __name__ == "__main__":
    main()
