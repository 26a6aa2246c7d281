"""Guesses of a step: which of them fit into it, and what becomes of their pages."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from pagedkv import BlockManager

from .queues import Queues
from .sequence import Sequence
from .step import Step

NO_GUESSES: Mapping[int, list[int]] = MappingProxyType({})


def num_guessable(seq: Sequence) -> int:
    """How many tokens may be guessed of a sequence that decodes: with one more, which is sampled after them, it is
    complete."""
    return max(seq.max_num_tokens - seq.num_tokens - 1, 0)


def most_sampled(queues: Queues, max_num_seqs: int) -> int:
    """How many sequences a step may sample: those that run or wait, and the other answers to their prompts."""
    num_seqs = len(queues.running) + sum(len(seq.siblings) for seq in queues.running) + queues.num_waiting
    if num_seqs < max_num_seqs:
        num_seqs += sum(len(seq.siblings) for seq in queues.waiting())
    return min(num_seqs, max_num_seqs)


def fit(decodes: list[Sequence], guesses: Mapping[int, list[int]], room: int) -> list[list[int]]:
    """Those of each, by its id, as far as there is room, for so many; empty where there is none."""
    fitting = list[list[int]]()
    for seq in decodes:
        fitting.append(guesses.get(seq.id, [])[: max(min(room, num_guessable(seq)), 0)])
        room -= len(fitting[-1])
    return fitting if any(fitting) else []


def leave_pages(fitting: list[list[int]], queues: Queues) -> bool:
    """False: the sequence that waits first may get its pages in this step, but not beside those of these guesses."""
    if not queues.num_waiting or queues.was_refused(queues.peek()):
        return True
    manager, counts = queues.manager, (queues.peek().num_tokens, *map(len, fitting))
    num_pages = sum(-(-count // manager.block_size) for count in counts)
    # Two pages more for each running sequence: one for its newest token, one of the watermark.
    return num_pages + 2 * len(queues.running) <= manager.num_free_blocks


def keep_right(step: Step, manager: BlockManager) -> None:
    """After the tokens of the step went to their sequences: the KV of right guesses counts as computed, and pages for
    wrong ones are given back."""
    for seq, guesses in zip(step.sequences, step.guesses, strict=False):
        right = seq.num_known - seq.num_tokens  # not those after an end
        if right > 0:
            manager.append(seq.id, seq.new_tokens[-1 - right : -1])
            seq.num_tokens += right
            seq.num_computed = seq.num_in_pages = seq.num_tokens - 1
            manager.commit(seq.id, seq.num_computed)
        if right < len(guesses):
            manager.truncate(seq.id, seq.num_computed)
