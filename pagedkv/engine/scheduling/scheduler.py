"""Which tokens the next step computes.

One ragged batch per step: first one token of every sequence that decodes, then chunks of prompts, oldest first, until
the token budget is used up. The scheduler works on lengths, so that a step can be planned while the one before it is
still computed and its tokens are not known. For every step, in this order:

    step = schedule()           # plans, and takes the pages that it writes
    (the step is launched)
    commit(step)                # later steps may read what this one writes
    update(step, tokens)        # when its tokens are known: at once, or after the next step was launched

Steps must run in the order of their launch: pages that a step reads may be given to others as soon as it is launched,
because a step that writes them runs after it. A sequence whose last token is being sampled frees its pages at the next
schedule(). A sequence that ends with a token which the host learns late is in one step too many; that token is dropped.

A step may guess tokens (see Step). Then the tokens of all steps before must be known when it is planned, and its own
when the next one is. Pages are taken for all guesses, but no sequence gives way for them, or waits. What is committed,
and so may be found in the prefix cache, are the tokens that turn out right.

Rules that keep it fair and alive:

- max_num_seqs bounds the sequences that hold pages, not only those of one step.
- check() refuses what could never run, so that no waiting sequence blocks the queue for ever.
- Sequences start in the order of queues.py. Where all places are taken, a sequence whose call has nothing running gets
  a place from a call that has several, and a lower priority value gets one from a higher.
- A prompt that needs several steps leaves a share of each step's tokens to the prompts of other calls.
- When no page is left, a sequence is preempted: of those with the highest priority value, the one admitted last. The
  oldest one with the lowest value always goes on. The KV of a preempted sequence is computed again later, or kept in
  host pages if there are enough. A sequence is admitted only if one page per running sequence stays free (the
  watermark), or nothing runs: else it would take back at once the pages that a preemption has freed.
- A prompt whose beginning another sequence is computing right now waits for it, and then finds it in the cache.
- A sequence whose adapter finds no slot, because others that run have theirs in all of them, waits until one is free.
  Sequences without an adapter may pass it, and no others. It takes nobody's place meanwhile.
- The other answers to a prompt (siblings) are forked when it is computed, as far as there are places. The rest wait,
  and find the prompt in the cache.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping

import numpy as np

from pagedkv import BlockManager, OutOfBlocks

from .guesses import NO_GUESSES, fit, keep_right, leave_pages, most_sampled
from .queues import Queues
from .sequence import Sequence
from .step import Step


class Scheduler:
    """Decides what the next step computes, by the rules above."""

    def __init__(
        self, manager: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int,
        max_loras: int = 0, max_num_rows: int | None = None,
    ) -> None:  # fmt: skip
        """max_num_rows: after so many tokens one is sampled in a step, at most; None: after one of each sequence"""
        self.manager = manager
        self.max_num_rows = max_num_seqs if max_num_rows is None else max_num_rows
        self.max_num_seqs = max_num_seqs
        self.max_num_batched_tokens = max_num_batched_tokens
        self.max_model_len = max_model_len
        self.queues = Queues(manager, max_num_batched_tokens, max_loras)
        self.step_number = 0
        self._last_step = Step()

    def max_tokens(self, num_prompt_tokens: int, wanted: int | None) -> int:
        """How many new tokens a sequence gets at most: those wanted, as far as max_model_len goes. None: as far as the
        pool goes, too. At least one, if any is wanted: check() refuses a prompt that leaves no room for it."""
        limit = self.max_model_len
        if wanted is None:
            limit = wanted = min(limit, self.manager.num_blocks * self.manager.block_size + 1)
        return min(wanted, max(limit - num_prompt_tokens, 1))

    def check(self, seq: Sequence) -> None:
        """Raises ValueError or OutOfBlocks where the sequence could never run."""
        if seq.num_prompt_tokens == 0:
            raise ValueError("the prompt is empty")
        if (seq.num_prompt_tokens if seq.wants_embedding else seq.max_num_tokens) > self.max_model_len:
            raise ValueError(f"{seq.wanted} exceed max_model_len={self.max_model_len}")
        self.check_pages(seq)

    def check_pages(self, seq: Sequence) -> None:
        """Raises OutOfBlocks where the pool is too small for the sequence alone."""
        num_pages = seq.most_pages(self.manager.block_size)
        if num_pages > self.manager.num_blocks:
            raise OutOfBlocks(
                f"{seq.wanted} need {num_pages} pages of {self.manager.block_size} tokens but the pool has "
                f"{self.manager.num_blocks}"
            )

    @property
    def has_work(self) -> bool:
        return bool(self.queues.num_waiting or self.queues.running)

    # --- schedule

    def schedule(self, guesses: Mapping[int, list[int]] = NO_GUESSES) -> Step:
        """Plans the next step and takes the pages that it writes. It may be empty: then there is nothing to launch.

        guesses: by id, of sequences that decode; which are cut to what fits and may still come.
        """
        self.step_number += 1
        swapped = self._preempt_for_waiting() if self.queues.num_waiting else None
        step = None if guesses else self._last_step.next_decodes(self.queues.running, self.manager)
        has_room = True
        if step is None:
            step = Step(swap_out=swapped)
            has_room = self._schedule_decodes(step, guesses)
        if step.known:
            known = [step.sequences[i] for i in step.known]
            self.manager.append_batch([seq.id for seq in known], [seq.new_tokens[-1] for seq in known])
        if self.queues.num_waiting or len(self.queues.running) > step.num_decodes:
            self._schedule_prompts(step, has_room)
        if step.sequences:
            if self.queues.adapters.num_slots:
                step.adapters = self.queues.adapters.take_writes()
                step.adapter_slots = self.queues.adapters.slots_of([seq.adapter for seq in step.sequences])
            step.come_after(self._last_step)
            self._last_step = step
        return step

    def _schedule_prompts(self, step: Step, has_room: bool) -> None:
        """Adds chunks of the running prompts, and new prompts after them, within the step's token budget."""
        budget = self.max_num_batched_tokens - step.num_decode_tokens
        # A sequence that decodes has a token more than its pages hold.
        prompts = [seq for seq in self.queues.running if seq.num_in_pages == seq.num_tokens]
        lengths, budget = self.queues.split_budget(prompts, budget)
        if has_room or not self.queues.running:
            budget = self._admit(step, budget)
        for seq, length in zip(prompts, lengths, strict=True):
            more = min(seq.num_tokens - seq.num_computed - length, budget)
            budget -= more
            if length + more:
                self._add_chunk(step, seq, length + more)

    def _add_chunk(self, step: Step, seq: Sequence, length: int) -> None:
        """Adds the next tokens of a prompt. After the last of them its siblings get a token, too."""
        if not step.add(seq, length) or not seq.siblings:
            return
        siblings, seq.siblings = seq.siblings, []
        num_places = self.max_num_seqs - len(self.queues.running)
        for child in siblings[:num_places]:
            step.fork(seq, child)
            self.queues.start(child)
        for child in siblings[num_places:]:
            self.queues.add(child)

    def _schedule_decodes(self, step: Step, guesses: Mapping[int, list[int]]) -> bool:
        """Adds the sequences that decode, with room for their newest tokens and guesses. Where there is none, guesses
        are left out, and then it preempts. Returns whether there was room for all."""
        self.queues.retire()
        decodes = [seq for seq in self.queues.running if seq.num_in_pages < seq.num_tokens]
        fitting = self._fitting(decodes, guesses) if guesses else []
        preempted = [] if step.swap_out is None else [step.swap_out]
        has_room = True
        while decodes:
            ids, ends = [seq.id for seq in decodes], [seq.num_tokens for seq in decodes]
            lengths = list(map(len, fitting)) or [0] * len(decodes)
            try:
                step.copies = self.manager.reserve_batch(ids, [end + n for end, n in zip(ends, lengths, strict=True)])
                break
            except OutOfBlocks:
                if fitting:
                    fitting = []
                    continue
                has_room = False
                victim = self.queues.victim()
                if victim.num_in_pages < victim.num_tokens:
                    decodes.remove(victim)
                pairs = self.queues.preempt(
                    victim,
                    "the pool had no page for the next token of a sequence that runs",
                    logging.WARNING,
                    "a larger pool (kv_cache_memory, num_blocks or, on a GPU, gpu_memory_utilization) or a smaller "
                    f"max_num_seqs than {self.max_num_seqs} avoids it, and swap_space keeps its KV in host memory",
                )
                preempted += [] if pairs is None else [pairs]
        if preempted:
            step.swap_out = np.concatenate(preempted)
        if decodes:
            step.add_decodes(decodes, ids, ends, fitting)
        return has_room

    def _fitting(self, decodes: list[Sequence], guesses: Mapping[int, list[int]]) -> list[list[int]]:
        """They leave half of the step's tokens to prompts, a row to each sequence that may be sampled, and its pages to
        the one that waits first."""
        room = (self.max_num_batched_tokens - len(decodes)) // 2
        room = min(room, self.max_num_rows - most_sampled(self.queues, self.max_num_seqs))
        fitting = fit(decodes, guesses, room)
        is_full = len(self.queues.running) >= self.max_num_seqs  # so that none is admitted
        return fitting if is_full or leave_pages(fitting, self.queues) else []

    def _preempt_for_waiting(self) -> np.ndarray | None:
        """Preempts a sequence if the next waiting one is to have its place. Returns which pages are to be copied to
        host pages, if any."""
        head = self.queues.peek()
        if not self._lacks_place(head) or head.num_known < head.num_tokens:
            return None
        if not self.queues.adapters.has_room(head.adapter):
            return None
        self.queues.retire()
        if not self._lacks_place(head):
            return None

        last = self.queues.victim_for(head)
        if last is None or self.queues.waits_for_prefix(head, self.step_number):
            return None
        why = "a lower priority" if last.priority > head.priority else "a call that had nothing running"
        knob = f"a larger max_num_seqs than {self.max_num_seqs} avoids it"
        return self.queues.preempt(last, f"{why} needed its place", logging.INFO, knob)

    def _admit(self, step: Step, budget: int) -> int:
        """Starts waiting sequences in their order, but skips those that wait for a prefix or for an adapter's slot.
        Returns the rest of the budget."""
        queues, passed, most = self.queues, list[Sequence](), self.max_num_seqs
        waits_for_slot = False
        while queues.num_waiting and budget and len(queues.running) < most and len(passed) < most:
            seq = queues.peek()
            if seq.num_known < seq.num_tokens or (queues.running and queues.was_refused(seq)):
                break  # its newest token is not known yet, or it did not fit
            lacks_slot = seq.adapter is not None and (waits_for_slot or not queues.adapters.has_room(seq.adapter))
            waits_for_slot = waits_for_slot or lacks_slot
            if lacks_slot or queues.waits_for_prefix(seq, self.step_number):
                passed.append(queues.pop())
                continue
            if not queues.find_pages(seq, step):
                break
            queues.pop()
            queues.start(seq)
            length = min(seq.num_tokens - seq.num_computed, budget)
            self._add_chunk(step, seq, length)
            budget -= length
        for seq in reversed(passed):
            queues.put_back(seq)
        return budget

    def _lacks_place(self, seq: Sequence) -> bool:
        return len(self.queues.running) >= self.max_num_seqs or self.queues.was_refused(seq)

    # --- after the launch

    def commit(self, step: Step) -> None:
        """Call it after the launch: steps that are launched later may read the KV that this one writes."""
        self.manager.commit_batch(step.ids, step.known_ends)
        for parent, child in step.forks:
            self.manager.fork(parent, child)

    def update(self, step: Step, tokens: list[int], now: float) -> list[Sequence]:
        """Takes what the step sampled, one token for each of step.sampled, and what Step.accept() has left of it;
        returns the finished sequences.

        The next step may have been scheduled before, but not the one after it.
        """
        if step.append_tokens(tokens, self.manager):
            return []
        finished: list[Sequence] = []
        ids, grown = [], []
        for seq, token in zip(step.receivers, tokens, strict=True):
            if seq.finish_reason is not None:
                continue  # it was in one step too many
            seq.append(token, now)
            step.num_new += 1
            if seq.finish_reason is not None:
                finished.append(seq)
            elif seq.num_known <= seq.num_in_pages:
                ids.append(seq.id)
                grown.append(token)
        if ids:
            self.manager.append_batch(ids, grown)
        if step.guesses:
            keep_right(step, self.manager)
        if finished:
            self.forget(finished)
        return finished

    def forget(self, finished: Iterable[Sequence]) -> None:
        """Drops finished sequences, whether they run, wait, or have left with their last token."""
        running = []
        for seq in finished:
            if seq.num_in_pages:
                running.append(seq)
            elif seq.num_tokens < seq.max_num_tokens:
                self.queues.remove(seq)
                if seq.is_swapped:
                    self.manager.free(seq.id)
        if running:
            self.queues.release(running)

    def restart(self, sequences: list[Sequence]) -> None:
        """After an error anywhere: frees all pages. These sequences, which must be all there are, begin again with the
        tokens that the host knows, once they are queued."""
        self.queues.clear()
        self._last_step = Step()
        self.manager.free_batch([seq.id for seq in sequences if seq.id in self.manager])
        for seq in sequences:
            seq.restart()
