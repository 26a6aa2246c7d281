"""Engines of several ranks for tests, with what goes wrong in one of them, and counts of what a process holds."""

from __future__ import annotations

import gc
import os
import threading
import time
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np

from pagedkv import LLM, SamplingParams
from pagedkv.engine import RequestOutput
from pagedkv.engine.runner import plan
from pagedkv.parallel import watch

FAULTS = Path(__file__).parent / "rank_faults"
OPTIONS = {"device": "cpu", "block_size": 4, "num_blocks": 40, "max_num_seqs": 8, "seed": 0}
SIZES = {"vocab_size": 264, "num_key_value_heads": 4}
FOR_EIGHT = {"vocab_size": 1000, "num_attention_heads": 8, "num_key_value_heads": 4}  # ranks: each has a share


def inject(monkeypatch, fault: str = "") -> None:
    """What goes wrong in a rank of the next engine (see sitecustomize.py). Ranks wait for each other for a long time,
    because the machine may be busy, unless that is what the test waits for."""
    seconds = 3.0 if fault.endswith(("SIGSTOP", "hang")) else 30.0
    monkeypatch.syspath_prepend(str(FAULTS))
    monkeypatch.setenv("RANK_FAULT", fault)
    monkeypatch.setenv("RANK_SECONDS", str(seconds))
    monkeypatch.setattr(watch, "STEP_SECONDS", seconds)
    monkeypatch.setattr(watch, "STOPPED_SECONDS", seconds / 2)
    monkeypatch.setattr(plan, "STEP_SECONDS", seconds)


def traffic(
    rng: np.random.Generator, count: int = 12, vocab_size: int = SIZES["vocab_size"]
) -> list[tuple[list[int], SamplingParams]]:
    """Requests of all kinds: greedy and drawn, answers that fork, edits, filters, penalties, log probabilities."""
    requests = []
    for i in range(count):
        prompt = rng.integers(0, 97, rng.integers(1, 40)).tolist()
        options: dict = {"temperature": float(rng.choice([0, 0.9])), "seed": i, "max_tokens": int(rng.integers(2, 24))}
        options |= [{}, {"n": 2}, {"top_k": 7}, {"top_p": 0.9}, {"logprobs": 2}, {"prompt_logprobs": 2},
                    {"logit_bias": {3: 2.0}}, {"repetition_penalty": 1.3}, {"mask": partial(odd_tokens, vocab_size)}][i % 9]  # fmt: skip
        options |= {"temperature": 0.9} if "n" in options else {}
        requests.append((prompt, SamplingParams(**options, ignore_eos=True)))
    return requests


def odd_tokens(vocab_size: int, request, token_ids: list[int]) -> np.ndarray:
    """A mask: after an even number of tokens only odd ones may come."""
    allowed = np.ones(vocab_size, bool)
    if len(token_ids) % 2 == 0:
        allowed[::2] = False
    return allowed


def generate(llm: LLM, requests: list[tuple[list[int], SamplingParams]]) -> list[RequestOutput]:
    prompts, params = zip(*requests, strict=True)
    return llm.generate(list(prompts), list(params), use_tqdm=False)


def answers(outputs: list[RequestOutput]) -> list[list[tuple[int, list[int]]]]:
    return [sorted((one.index, one.token_ids) for one in output.outputs) for output in outputs]


def children() -> set[int]:
    """The processes of this one that are not reaped."""
    return {int(pid) for task in os.listdir("/proc/self/task") for pid in _children_of(task)}


def process_of(rank: int) -> int:
    """The pid of a rank, where there is one engine."""
    return next(pid for pid in children() if Path(f"/proc/{pid}/cmdline").read_text().split("\0")[6] == str(rank))


def _children_of(task: str) -> list[str]:
    try:
        return Path(f"/proc/self/task/{task}/children").read_text().split()
    except OSError:
        return []


def holdings() -> dict[str, object]:
    """What a process has, and what of it lies in shared memory."""
    gc.collect()
    maps = Path("/proc/self/maps").read_text()
    return {
        "files": len(os.listdir("/proc/self/fd")), "threads": threading.active_count(), "children": children(),
        "shared memory": sorted(os.listdir("/dev/shm")), "mapped": maps.count("memfd:pagedkv"),
    }  # fmt: skip


@contextmanager
def nothing_left():
    """What a process has is the same before and after."""
    before = holdings()
    yield
    end = time.monotonic() + 10
    while (after := holdings()) != before and time.monotonic() < end:
        time.sleep(0.05)
    assert after == before, (before, after)
