"""Which tokens the next step computes.

One ragged batch a step: first one token of every sequence that decodes, then chunks of prompts, oldest first, until
the token budget is used up. The scheduler works on lengths: it needs a sampled token's value only to hand it to the
block manager. Rules that keep it fair and alive:

- max_num_seqs bounds the sequences that hold pages, not only those of one step.
- check() refuses what could never run, so that nothing which waits can block the queue for ever.
- Without room to grow, the sequence admitted last gives its pages back and is computed again later; the oldest one
  always goes on. A sequence is admitted only where a watermark of pages stays free, one for each that runs, or nothing
  runs: else the pages that a preemption freed would be taken back at once.
- A prompt whose beginning another sequence is computing right now waits for it and then finds it in the cache.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from pagedkv import BlockManager, OutOfBlocks

from .sequence import Sequence


@dataclass(slots=True)
class Step:
    """A plan: sequences[i] computes the KV of tokens [starts[i], starts[i] + lengths[i])."""

    sequences: list[Sequence] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)  # indices of the sequences that get a token
    num_decodes: int = 0  # the first so many compute one token that was sampled
    copies: np.ndarray | None = None  # int32 [n, 2]: pages to copy before anything else

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def add(self, seq: Sequence, length: int) -> None:
        self.starts.append(seq.num_computed)
        self.lengths.append(length)
        seq.num_computed += length
        if seq.num_computed == seq.num_tokens:
            self.sampled.append(len(self.sequences))
        self.sequences.append(seq)


class Scheduler:
    def __init__(
        self, manager: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
    ) -> None:
        self.manager = manager
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in the order of admission
        self.step_number = 0
        self.num_preemptions = 0
        self._refused: tuple[Sequence, int] | None = None  # who did not fit, and how many pages were free then

    def check(self, seq: Sequence) -> None:
        """Raises ValueError or OutOfBlocks where the sequence could never run."""
        num_total = seq.max_num_tokens
        wanted = f"{seq.num_prompt_tokens} prompt tokens and max_tokens={seq.params.max_tokens}"
        if seq.num_prompt_tokens == 0:
            raise ValueError("the prompt is empty")
        if num_total > self.max_model_len:
            raise ValueError(f"{wanted} exceed max_model_len={self.max_model_len}")
        num_pages = -(-(num_total - 1) // self.manager.block_size)  # the last token is sampled and never computed
        if num_pages > self.manager.num_blocks:
            raise OutOfBlocks(
                f"{wanted} need {num_pages} pages of {self.manager.block_size} tokens but the pool has "
                f"{self.manager.num_blocks}"
            )

    def add(self, seq: Sequence) -> None:
        """Queues a sequence that check() lets pass."""
        self.waiting.append(seq)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running)

    # --- schedule

    def schedule(self) -> Step:
        """Plans a step and takes the pages that it writes."""
        self.step_number += 1
        step = Step()
        decodes, step.copies, has_room = self._grow()
        for seq in decodes:
            step.add(seq, 1)
        step.num_decodes = len(decodes)
        budget = self.max_num_batched_tokens - len(decodes)
        for seq in self.running:
            remaining = seq.num_tokens - seq.num_computed
            if remaining and budget:  # decodes have nothing remaining any more
                length = min(remaining, budget)
                step.add(seq, length)
                budget -= length
        if has_room or not self.running:
            self._admit(step, budget)
        return step

    def _grow(self) -> tuple[list[Sequence], np.ndarray | None, bool]:
        """Room for the newest token of every sequence that decodes, preempting where there is none.

        Returns the sequences that decode, the pages to copy, and whether all had room.
        """
        decodes = [seq for seq in self.running if seq.num_in_pages < seq.num_tokens]
        has_room = True
        while decodes:
            try:
                copies = self.manager.append_batch([seq.id for seq in decodes], [seq.tokens[-1] for seq in decodes])
            except OutOfBlocks:
                has_room = False
                if self._preempt_last() is decodes[-1]:
                    decodes.pop()
                continue
            for seq in decodes:
                seq.num_in_pages += 1
            return decodes, copies, has_room
        return decodes, None, has_room

    def _preempt_last(self) -> Sequence:
        seq = self.running.pop()
        self.manager.free(seq.id)
        seq.num_computed = seq.num_in_pages = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)
        return seq

    def _admit(self, step: Step, budget: int) -> None:
        """Starts waiting sequences, first come first served, but passes over those that wait for a prefix."""
        passed: list[Sequence] = []
        while self.waiting and budget and len(self.running) < self.max_num_seqs and len(passed) < self.max_num_seqs:
            seq = self.waiting[0]
            if self._was_refused(seq):
                break
            if self._waits_for_prefix(seq):
                passed.append(self.waiting.popleft())
                continue
            if not self._allocate(seq):
                break
            self.running.append(self.waiting.popleft())
            length = min(seq.num_tokens - seq.num_computed, budget)
            step.add(seq, length)
            budget -= length
        self.waiting.extendleft(reversed(passed))

    def _was_refused(self, seq: Sequence) -> bool:
        """Whether it did not fit and nothing was freed since: the prompt need not be hashed again to know."""
        if self._refused is None or not self.running:
            return False
        refused, num_free = self._refused
        return refused is seq and self.manager.num_free_blocks <= num_free

    def _waits_for_prefix(self, seq: Sequence) -> bool:
        """Whether a sequence that runs is computing pages that this one begins with, too."""
        if not self.running:
            return False
        if seq.retry_step > self.step_number:
            return True
        _, num_pending = self.manager.match(seq.tokens)
        # All of it takes so many steps at least (a page may be computed but for one token already): looking again
        # earlier would only hash the prompt again.
        num_missing = num_pending - self.manager.block_size + 1
        seq.retry_step = self.step_number + max(-(-num_missing // self.max_num_batched_tokens), 1)
        return num_pending > 0

    def _allocate(self, seq: Sequence) -> bool:
        """Takes the pages of all known tokens; False, and nothing changes, where they do not fit."""
        self.manager.watermark_blocks = len(self.running)
        try:
            num_hits = self.manager.allocate(seq.id, seq.tokens)
        except OutOfBlocks:
            if not self.running:
                raise  # somebody else holds pages of the pool: there is nothing to wait for
            self._refused = seq, self.manager.num_free_blocks
            return False
        seq.num_in_pages = seq.num_tokens
        seq.num_computed = min(num_hits, seq.num_tokens - 1)  # the last token is computed for its logits, cached or not
        if seq.num_cached < 0:
            seq.num_cached = num_hits
        return True

    # --- update

    def update(self, step: Step, tokens: list[int], now: float) -> list[Sequence]:
        """Takes what the step sampled, one token for each of step.sampled; returns the sequences that are finished."""
        ends = [start + length for start, length in zip(step.starts, step.lengths, strict=True)]
        self.manager.commit_batch([seq.id for seq in step.sequences], ends)
        finished = []
        for index, token in zip(step.sampled, tokens, strict=True):
            seq = step.sequences[index]
            seq.append(token, now)
            if seq.finish_reason is not None:
                finished.append(seq)
        if finished:
            self.manager.free_batch([seq.id for seq in finished])
            self.running = [seq for seq in self.running if seq.finish_reason is None]
        return finished

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Forgets these sequences, which must be all, and gives their pages back; safe after an error anywhere."""
        self.running.clear()
        self.waiting.clear()
        self._refused = None
        self.manager.free_batch([seq.id for seq in sequences if seq.id in self.manager])
