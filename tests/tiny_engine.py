"""LLM with a tiny random model and a small pool, on any device and with its host on time or a step behind."""

from __future__ import annotations

import time
from contextlib import contextmanager

from pagedkv import LLM, Engine, SamplingParams
from pagedkv.engine import RequestOutput

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@contextmanager
def engine(folder, place, **options):
    device, behind = place
    options = {"block_size": 4, "num_blocks": 200, "max_num_seqs": 8, "seed": 0} | options
    with LLM(folder, device=device, **options) as llm:
        llm._runner.num_behind = behind
        yield llm


def settle(llm: Engine) -> None:
    """Waits until the engine's thread has done what it was asked for before."""
    llm._core.call(lambda: None)


def slow(llm: Engine, seconds: float) -> None:
    """From now on each step takes so much longer, until full_speed(): a test can do what it has to do while requests run."""
    full_speed(llm)
    core, step = llm._core, llm._core.step
    core.step = lambda: (time.sleep(seconds), step())


def full_speed(llm: Engine) -> None:
    vars(llm._core).pop("step", None)


def by_hand(llm: Engine) -> Engine:
    """From now on the test's own thread makes the steps: step() makes one, and returns what is new after it."""
    core = llm._core
    core.stop()
    core._is_closed = core._is_stopping = False

    def call(action):
        core.take_messages()
        return action()

    def step():
        core.step()
        return news_of(llm)

    core.call, core.close, llm.step = call, lambda: core._is_closed or core._close(), step
    return llm


def news_of(llm: Engine) -> list[RequestOutput]:
    """What requests made by add_request() have been told, without waiting."""
    return [] if llm._mailbox._updates.empty() else llm._mailbox.receive()


def generate(llm: LLM, prompts, params=None):
    return llm.generate(prompts, params, use_tqdm=False)
