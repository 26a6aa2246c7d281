"""Who guesses in tests: a drafter that knows the answers with a given probability, and times by which guesses always pay."""

from __future__ import annotations

import random

import numpy as np

from pagedkv import LLM
from pagedkv.engine.speculation.lengths import StepTimes


class Knowing:
    """Guesses the true next token with the probability `knowledge`, and another one else."""

    is_free, is_measurable = False, True

    def __init__(self, knowledge: float, seed: int = 0) -> None:
        self.knowledge, self.rng = knowledge, random.Random(seed)
        self.answers: dict[tuple[tuple[int, ...], int, int], list[int]] = {}  # by prompt, seed and index
        self.guessed: list[list[int]] = []

    def learn(self, requests, outputs) -> None:
        for (prompt, params), output in zip(requests, outputs, strict=True):
            for one in output.outputs:
                self.answers[tuple(prompt), params.seed, one.index] = one.token_ids

    def guess(self, sequences, counts):
        guesses = []
        for seq, count in zip(sequences, counts, strict=True):
            true = self.answers[tuple(seq.prompt), seq.params.seed, seq.index][len(seq.new_tokens) :][:count]
            guesses.append([token if self.rng.random() < self.knowledge else (token + 1) % 97 for token in true])
        self.guessed += guesses
        return guesses

    def take(self, sequences) -> None: ...

    def forget(self) -> None: ...


class AlwaysPays(StepTimes):
    """A step takes half as long with guesses."""

    def plain(self, num_seqs: int) -> float:
        return 2.0

    def guessing(self, num_seqs: int, count: int) -> np.ndarray:
        return np.ones(self.max_num_rows - num_seqs)


def always_guess(llm: LLM, drafter=None) -> LLM:
    """With this drafter, if any, in place of the engine's own. Steps whose guesses have no room are followed by no pause: in
    a small pool pauses may outlast the requests."""
    guesser = llm._core._guesser
    guesser.times, guesser._wait = AlwaysPays(llm._runner.plan.max_num_rows), lambda: None
    if drafter is not None:
        guesser.drafter = drafter
    return llm
