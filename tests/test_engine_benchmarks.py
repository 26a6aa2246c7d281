"""Benchmarks that reach into an engine: what they wrap is still called as they think. On the CPU, with the demo model."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import numpy as np
import pytest

from pagedkv import LLM
from pagedkv.cli.demo import DEMO_MODEL

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import probe
import speculation


def test_where_the_time_of_a_step_goes():
    with LLM(DEMO_MODEL, device="cpu") as llm:
        found = probe.probe(llm, [[1, 2, 3, 4]] * 4, profile=False)
    assert found.host.keys() == set(probe.HOST_PARTS) and 0 < sum(found.host.values()) < found.wall


@pytest.mark.parametrize("method", ["suffix", "draft_model"])
def test_scripted_answers(capsys, seed, method):
    """All guesses are right that are to be, and a draft model counts them as its own: it computes no token twice."""

    def script(batch: int, length: int, seed: int):
        rng = random.Random(seed)
        prompts = [[i, *(rng.randrange(15) for _ in range(20))] for i in range(batch)]
        return prompts, speculation.Script({i: [rng.randrange(15) for _ in range(length)] for i in range(batch)})

    config = {"method": method, "num_speculative_tokens": 3} | ({"model": str(DEMO_MODEL)} if method == "draft_model" else {})
    with LLM(DEMO_MODEL, device="cpu", speculative_config=config) as llm:
        bench = speculation.Bench(llm, 40)
        model = bench.drafter if method == "draft_model" else None
        prompts, answers = script(2, 40, seed)
        guesser = speculation.Speculation(None, 3, 8)
        guesser._chance, guesser.drafter = 1.0, speculation.Replay(answers, 1.0, 0, model)
        guesser.times.plain, guesser.times.guessing = lambda seqs: 1e3, lambda seqs, count: np.full(8, 1.0)  # they always pay
        rate, right, per_step = bench.rate(prompts, answers, guesser)
    assert rate > 0 and right == 1 and per_step > 2
