"""Which tokens the next step computes.

One ragged batch a step: first one token of every sequence that decodes, then chunks of prompts, oldest first, until
the token budget is used up. The scheduler works on lengths, so that a step can be planned while the one before it is
computed and its tokens are not known. For every step, in this order:

    step = schedule()           # plans, and takes the pages that it writes
    (the step is launched)
    commit(step)                # later steps may read what this one writes
    update(step, tokens)        # when its tokens are known: at once, or after the next step was launched

Steps must run in the order of their launch: pages that a step reads are given away as soon as it is launched, and a
step that writes them comes behind it. A sequence whose last token is being sampled leaves with its pages at the next
schedule(). One that ends with a token that the host learns late is in one step too many, whose token is dropped.

Rules that keep it fair and alive:

- max_num_seqs bounds the sequences that hold pages, not only those of one step.
- check() refuses what could never run, so that nothing which waits can block the queue for ever.
- Without room to grow, the sequence admitted last gives its pages back; the oldest one always goes on. It is computed
  again later, or, where there are host pages enough, kept there meanwhile. A sequence is admitted only where a
  watermark of pages stays free, one for each that runs, or nothing runs: else the pages that a preemption freed would
  be taken back at once.
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
    """A plan: sequences[i] computes the KV of tokens [starts[i], ends[i]), lengths[i] of them.

    Pages are moved before anything is computed: first swap_out, then swap_in, then copies.
    """

    sequences: list[Sequence] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # theirs
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    sampled: list[int] = field(default_factory=list)  # indices of the sequences that get a token
    num_decodes: int = 0  # the first so many compute one token that was sampled
    sources: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))  # of the decodes: their tokens are in
    # these rows of what the step before sampled
    known: list[int] = field(default_factory=list)  # but those of these decodes are known, and in Sequence.new_tokens
    is_same_batch: bool = False  # the sequences of the step before in the same order, and all of them decode
    goes_on: bool = False  # the step and the next, which is planned, only decode and are the same batch: nothing but
    # one of end_ids ends one of the sequences
    end_ids: frozenset[int] = frozenset()  # tokens that end one of its decodes; -1 stands for none
    num_left: int = 0  # of a step that only decodes: tokens that each of its sequences may get behind it at least
    swap_out: np.ndarray | None = None  # int32 [n, 2]: page, host page
    swap_in: np.ndarray | None = None  # int32 [n, 2]: host page, page
    copies: np.ndarray | None = None  # int32 [n, 2]: page, page

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def add(self, seq: Sequence, length: int) -> None:
        """A chunk of the sequence's tokens; behind the last of them one is sampled."""
        self.starts.append(seq.num_computed)
        self.lengths.append(length)
        seq.num_computed += length
        self.ends.append(seq.num_computed)
        if seq.num_computed == seq.num_tokens:
            seq.source = len(self.sampled)
            seq.num_tokens += 1
            self.sampled.append(len(self.sequences))
        self.sequences.append(seq)
        self.ids.append(seq.id)

    def add_decodes(self, decodes: list[Sequence], ids: list[int], ends: list[int]) -> None:
        """The next token of each, as the first of the step; `ends` are their num_tokens."""
        self._plan(decodes, ids, ends)
        self.starts = [end - 1 for end in ends]
        self.sources = np.array([seq.source for seq in decodes], np.int32)
        self.known = [i for i, (seq, end) in enumerate(zip(decodes, ends, strict=True)) if seq.num_known == end]
        for row, seq in enumerate(decodes):
            seq.source = row

    def go_on(self, last: Step, ends: list[int]) -> None:
        """The same behind a step that decoded nothing but these sequences."""
        self._plan(last.sequences.copy(), last.ids.copy(), ends)
        self.starts = last.ends.copy()
        self.sources = np.arange(self.num_decodes, dtype=np.int32)
        self.known = self.sampled.copy() if self.sequences[0].num_known == ends[0] else []

    def _plan(self, decodes: list[Sequence], ids: list[int], ends: list[int]) -> None:
        self.num_decodes = len(decodes)
        self.sequences, self.ids, self.ends = decodes, ids, ends
        self.lengths, self.sampled = [1] * len(decodes), list(range(len(decodes)))
        for seq, end in zip(decodes, ends, strict=True):
            seq.num_computed = seq.num_in_pages = end
            seq.num_tokens = end + 1


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
        self.num_swaps = 0  # preemptions that kept the KV in host pages
        self._refused: tuple[Sequence, int] | None = None  # who did not fit, and how many pages were free then
        self._last = Step()  # the step before
        self._last_sampled: list[Sequence] = []  # by it, in order

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
        """Plans the next step and takes the pages that it writes. It may be empty: then there is nothing to launch."""
        self.step_number += 1
        step = Step()
        has_room = self._go_on(step) or self._grow(step)
        budget = self.max_num_batched_tokens - step.num_decodes
        if len(self.running) > step.num_decodes:
            for seq in self.running:
                is_prompt = seq.num_in_pages == seq.num_tokens  # one that decodes samples a token without room yet
                if is_prompt and budget:
                    length = min(seq.num_tokens - seq.num_computed, budget)
                    step.add(seq, length)
                    budget -= length
        if has_room or not self.running:
            self._admit(step, budget)
        if step.sequences:
            self._follow(step)
        return step

    def _follow(self, step: Step) -> None:
        """What the step has in common with the one before need not be done again."""
        last, only_decodes = self._last, step.num_decodes == len(step.sequences)
        step.is_same_batch = only_decodes and step.sequences == self._last_sampled
        if step.is_same_batch and last.num_left:
            last.goes_on, step.end_ids, step.num_left = True, last.end_ids, last.num_left - 1
        elif only_decodes:
            step.end_ids = frozenset([-1]).union(*(seq.eos_token_ids for seq in step.sequences))
            step.num_left = min(seq.max_num_tokens - seq.num_tokens for seq in step.sequences)
        self._last = step
        self._last_sampled = step.sequences if step.is_same_batch else [step.sequences[i] for i in step.sampled]

    def _go_on(self, step: Step) -> bool:
        """As _grow() does, where the step before only decoded and nothing has happened to its sequences; or nothing."""
        last = self._last
        if not last.num_left or self.running != last.sequences:
            return False
        ends = [end + 1 for end in last.ends]
        try:
            step.copies = self.manager.reserve_batch(last.ids, ends)
        except OutOfBlocks:
            return False
        step.go_on(last, ends)
        self._append_known(step)
        return True

    def _retire(self) -> None:
        """Sequences whose last token is sampled need no page any more."""
        ended = [seq for seq in self.running if seq.num_tokens == seq.max_num_tokens]
        if ended:
            self._release(ended)

    def _release(self, sequences: list[Sequence]) -> None:
        """Takes sequences that run out of the running set, and gives their pages back."""
        self.manager.free_batch([seq.id for seq in sequences])
        for seq in sequences:
            seq.num_in_pages = 0
        self.running = [seq for seq in self.running if seq.num_in_pages]

    def _grow(self, step: Step) -> bool:
        """Adds the sequences that decode, with room for their newest token, preempting where there is none.

        Returns whether all had room.
        """
        self._retire()
        decodes = [seq for seq in self.running if seq.num_in_pages < seq.num_tokens]
        preempted: list[np.ndarray] = []
        has_room = True
        while decodes:
            ids, ends = [seq.id for seq in decodes], [seq.num_tokens for seq in decodes]
            try:
                step.copies = self.manager.reserve_batch(ids, ends)
                break
            except OutOfBlocks:
                has_room = False
                if self._preempt_last(preempted) is decodes[-1]:
                    decodes.pop()
        if preempted:
            step.swap_out = np.concatenate(preempted)
        if decodes:
            step.add_decodes(decodes, ids, ends)
            self._append_known(step)
        return has_room

    def _append_known(self, step: Step) -> None:
        if step.known:
            known = [step.sequences[i] for i in step.known]
            self.manager.append_batch([seq.id for seq in known], [seq.new_tokens[-1] for seq in known])

    def _preempt_last(self, swapped: list[np.ndarray]) -> Sequence:
        seq = self.running.pop()
        try:
            swapped.append(self.manager.swap_out(seq.id))
            seq.is_swapped = True
            self.num_swaps += 1
        except OutOfBlocks:  # of host pages
            self.manager.free(seq.id)
            seq.num_computed = 0
        seq.num_in_pages = 0
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)
        return seq

    def _admit(self, step: Step, budget: int) -> None:
        """Starts waiting sequences, first come first served, but passes over those that wait for a prefix."""
        passed: list[Sequence] = []
        while self.waiting and budget and len(self.running) < self.max_num_seqs and len(passed) < self.max_num_seqs:
            seq = self.waiting[0]
            if seq.num_known < seq.num_tokens or self._was_refused(seq):
                break  # its newest token is not known yet, or it did not fit
            if self._waits_for_prefix(seq):
                passed.append(self.waiting.popleft())
                continue
            if not self._find_pages(seq, step):
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
        if not self.running or seq.is_swapped:
            return False
        if seq.retry_step > self.step_number:
            return True
        _, num_pending = self.manager.match(seq.tokens)
        # All of it takes so many steps at least (a page may be computed but for one token already): looking again
        # earlier would only hash the prompt again.
        num_missing = num_pending - self.manager.block_size + 1
        seq.retry_step = self.step_number + max(-(-num_missing // self.max_num_batched_tokens), 1)
        return num_pending > 0

    def _find_pages(self, seq: Sequence, step: Step) -> bool:
        """Takes the pages of all known tokens; False, and nothing changes, where they do not fit."""
        self.manager.watermark_blocks = len(self.running)
        try:
            if seq.is_swapped:
                self._swap_in(seq, step)
            else:
                self._allocate(seq)
        except OutOfBlocks:
            if not self.running:
                raise  # somebody else holds pages of the pool: there is nothing to wait for
            self._refused = seq, self.manager.num_free_blocks
            return False
        seq.num_in_pages = seq.num_tokens
        return True

    def _allocate(self, seq: Sequence) -> None:
        num_hits = self.manager.allocate(seq.id, seq.tokens)
        seq.num_computed = min(num_hits, seq.num_tokens - 1)  # the last token is computed for its logits, cached or not
        if seq.num_cached < 0:
            seq.num_cached = num_hits

    def _swap_in(self, seq: Sequence, step: Step) -> None:
        """Back to pages, with room for the token that was sampled meanwhile."""
        num_pages = -(-seq.num_tokens // self.manager.block_size)
        if self.running and num_pages > self.manager.num_free_blocks - len(self.running):
            raise OutOfBlocks
        pairs = self.manager.swap_in(seq.id)
        self.manager.append(seq.id, seq.tokens[self.manager.num_tokens(seq.id) :])
        step.swap_in = pairs if step.swap_in is None else np.concatenate((step.swap_in, pairs))
        seq.is_swapped = False

    # --- after the launch

    def commit(self, step: Step) -> None:
        """The step is launched: steps launched later may read the KV that it writes."""
        self.manager.commit_batch(step.ids, step.ends)

    def update(self, step: Step, tokens: list[int], now: float) -> list[Sequence]:
        """Takes what the step sampled, one token for each of step.sampled; returns the sequences that are finished.

        The next step may have been scheduled meanwhile, but no further one.
        """
        if step.goes_on and step.end_ids.isdisjoint(tokens):
            for seq, token in zip(step.sequences, tokens, strict=True):
                seq.new_tokens.append(token)
            self.manager.append_batch(step.ids, tokens)
            return []
        sequences = step.sequences
        if len(step.sampled) < len(sequences):
            sequences = [sequences[index] for index in step.sampled]
        finished: list[Sequence] = []
        ids, grown = [], []
        for seq, token in zip(sequences, tokens, strict=True):
            if seq.finish_reason is not None:
                continue  # it was in one step too many
            seq.append(token, now)
            if seq.finish_reason is not None:
                finished.append(seq)
            elif seq.num_known <= seq.num_in_pages:
                ids.append(seq.id)
                grown.append(token)
        if ids:
            self.manager.append_batch(ids, grown)
        if finished:
            self._forget(finished)
        return finished

    def _forget(self, finished: list[Sequence]) -> None:
        """Sequences that ended, wherever they are: running, preempted meanwhile, or gone with their last token."""
        running = []
        for seq in finished:
            if seq.num_in_pages:
                running.append(seq)
            elif seq.num_tokens < seq.max_num_tokens:
                self.waiting.remove(seq)
                if seq.is_swapped:
                    self.manager.free(seq.id)
        if running:
            self._release(running)

    def abort(self, sequences: Iterable[Sequence]) -> None:
        """Forgets these sequences, which must be all, and gives their pages back; safe after an error anywhere."""
        self.running.clear()
        self.waiting.clear()
        self._refused = None
        self._last, self._last_sampled = Step(), []
        self.manager.free_batch([seq.id for seq in sequences if seq.id in self.manager])
