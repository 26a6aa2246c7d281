"""The sequences that wait, and those that run, which hold pages: how one gets its pages, and how it loses them.

No caller waits for the whole batch of another. A call is what was asked for at once: a batch, or a single request.
Waiting sequences start in this order:

- a lower `priority` first;
- then those of a call that has nothing running, oldest call first;
- then the sequences of the other calls, one call after the other.

So a short request from one thread starts before the rest of another's batch, two batches share the engine evenly, and
single requests are served first come, first served. A batch cannot starve: once nothing of it runs, calls that come
later start after it.
"""

from __future__ import annotations

import logging
import time
from bisect import insort
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator

import numpy as np

from pagedkv import BlockManager, OutOfBlocks

from .adapter_slots import AdapterSlots
from .sequence import Sequence
from .step import Step

logger = logging.getLogger(__name__)


class Queues:
    """The sequences that wait, and those that run.

    tokens_per_step: the most tokens that a step computes; max_loras: adapters that running sequences may have
    """

    def __init__(self, manager: BlockManager, tokens_per_step: int, max_loras: int = 0) -> None:
        self.manager, self._tokens_per_step, self.adapters = manager, tokens_per_step, AdapterSlots(max_loras)
        self.running: list[Sequence] = []  # in the order of admission
        self.num_running: Counter[int] = Counter()  # by call
        self.num_waiting = 0
        self._priorities: list[int] = []  # those with waiting sequences, in order, and ...
        self._waiting: dict[int, OrderedDict[int, deque[Sequence]]] = {}  # ... those by call, the next one first
        self.num_preemptions = 0
        self.num_swaps = 0  # preemptions that kept the KV in host pages
        self._logged: set[int] = set()  # levels
        self.refused: Sequence | None = None  # the sequence that did not fit, and ...
        self._num_free = 0  # ... how many pages were free then

    # --- sequences that wait

    def waiting(self) -> Iterator[Sequence]:
        for priority in self._priorities:
            for sequences in self._waiting[priority].values():
                yield from sequences

    def add(self, seq: Sequence) -> None:
        """Queues it after the others of its call."""
        self._enter(seq).append(seq)

    def add_answers(self, sequences: list[Sequence]) -> None:
        """Queues those of a request that have not ended, but for those that are to be forked from another."""
        unforked = {child for seq in sequences for child in seq.siblings}
        for seq in sequences:
            if seq.finish_reason is None and seq not in unforked:
                self.add(seq)

    def put_back(self, seq: Sequence) -> None:
        """Queues it before the others of its call, which becomes the next in turn."""
        self._enter(seq).appendleft(seq)
        self._waiting[seq.priority].move_to_end(seq.call, last=False)

    def _enter(self, seq: Sequence) -> deque[Sequence]:
        """Where it is to wait, among those of its call."""
        self.num_waiting += 1
        if seq.priority not in self._waiting:
            insort(self._priorities, seq.priority)
            self._waiting[seq.priority] = OrderedDict()
        return self._waiting[seq.priority].setdefault(seq.call, deque())

    def peek(self) -> Sequence:
        """The next sequence. One must wait."""
        return self._next_call()[0]

    def pop(self) -> Sequence:
        """Removes and returns the next sequence."""
        sequences = self._next_call()
        seq = sequences.popleft()
        if sequences:  # the call's next sequence waits until the other calls have had their turn
            self._waiting[seq.priority].move_to_end(seq.call)
        self._leave(seq)
        return seq

    def remove(self, seq: Sequence) -> None:
        """Removes this sequence, which must wait."""
        self._waiting[seq.priority][seq.call].remove(seq)
        self._leave(seq)

    def _leave(self, seq: Sequence) -> None:
        self.num_waiting -= 1
        calls = self._waiting[seq.priority]
        if not calls[seq.call]:
            del calls[seq.call]
        if not calls:
            del self._waiting[seq.priority]
            self._priorities.remove(seq.priority)

    def _next_call(self) -> deque[Sequence]:
        calls = self._waiting[self._priorities[0]]
        return next((calls[call] for call in calls if not self.num_running[call]), None) or next(iter(calls.values()))

    # --- how a sequence begins to run

    def was_refused(self, seq: Sequence) -> bool:
        """Whether it did not fit and no page was freed since. Then its prompt need not be hashed again."""
        return self.refused is seq and self.manager.num_free_blocks <= self._num_free

    def waits_for_prefix(self, seq: Sequence, step_number: int) -> bool:
        """Whether a running sequence is computing pages that this one begins with."""
        if seq.is_swapped or not self.running:
            return False
        if seq.retry_step > step_number:
            return True
        _, num_pending = self.manager.match(seq.tokens, salt=seq.salt)
        if not num_pending:
            return False
        # They take at least this many steps (of one page all tokens but one may be computed already). An earlier look
        # would only hash the prompt again.
        num_missing = num_pending - self.manager.block_size + 1
        seq.retry_step = step_number + max(-(-num_missing // self._tokens_per_step), 1)
        return True

    def find_pages(self, seq: Sequence, step: Step) -> bool:
        """Takes pages for all known tokens. Where they do not fit, nothing changes and the result is False."""
        num_running = self.manager.watermark_blocks = len(self.running)
        try:
            if seq.is_swapped:
                self._swap_in(seq, step)
            else:
                num_hits = self.manager.allocate(seq.id, seq.tokens, salt=seq.salt)
                seq.num_computed = min(num_hits, seq.num_tokens - 1)  # the last one is computed for its logits
                seq.num_cached = num_hits if seq.num_cached < 0 else seq.num_cached
        except OutOfBlocks:
            if not num_running:
                raise  # pages are held outside of the engine: there is nothing to wait for
            self.refused, self._num_free = seq, self.manager.num_free_blocks
            return False
        seq.num_in_pages = seq.num_tokens
        return True

    def _swap_in(self, seq: Sequence, step: Step) -> None:
        """Brings its KV back to the device, with room for the tokens that its pages do not hold yet."""
        num_pages, num_running = -(-seq.num_tokens // self.manager.block_size), len(self.running)
        if num_running and num_pages > self.manager.num_free_blocks - num_running:
            raise OutOfBlocks
        pairs = self.manager.swap_in(seq.id)
        self.manager.append(seq.id, seq.tokens[self.manager.num_tokens(seq.id) :])
        step.swap_in = pairs if step.swap_in is None else np.concatenate((step.swap_in, pairs))
        seq.is_swapped = False

    def start(self, seq: Sequence) -> None:
        """Adds a sequence that has its pages to those that run. There must be room for its adapter."""
        if seq.adapter is not None:
            self.adapters.pin(seq.adapter)
        self.running.append(seq)
        self.num_running[seq.call] += 1
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = time.perf_counter()

    # --- how it stops

    def retire(self) -> None:
        """Releases sequences whose last token is being sampled: they need no page any more."""
        ended = [seq for seq in self.running if seq.num_tokens == seq.max_num_tokens]
        if ended:
            self.release(ended)

    def release(self, sequences: list[Sequence]) -> None:
        """Removes these sequences and frees their pages."""
        self.manager.free_batch([seq.id for seq in sequences])
        for seq in sequences:
            seq.num_in_pages = 0
            self._stop(seq)
        self.running = [seq for seq in self.running if seq.num_in_pages]

    def preempt(self, seq: Sequence, reason: str, level: int, remedy: str) -> np.ndarray | None:
        """Takes its pages away; returns which of them are to be copied to host pages, if any. The first time on each
        level is logged, with what the user can do."""
        if level not in self._logged:
            self._logged.add(level)
            text = "a sequence was preempted, because %s: %s (logged once; stats() counts them)"
            logger.log(level, text, reason, remedy)
        self.running.remove(seq)
        seq.preempted_for, pairs = reason, None
        try:
            pairs = self.manager.swap_out(seq.id)
            seq.is_swapped = True
            self.num_swaps += 1
        except OutOfBlocks:  # of host pages
            self.manager.free(seq.id)
            seq.num_computed = 0
        seq.num_in_pages = 0
        seq.num_preemptions += 1
        self._stop(seq)
        self.num_preemptions += 1
        self.put_back(seq)
        return pairs

    def _stop(self, seq: Sequence) -> None:
        if seq.adapter is not None:
            self.adapters.unpin(seq.adapter)
        self.num_running[seq.call] -= 1
        if not self.num_running[seq.call]:
            del self.num_running[seq.call]

    def victim(self) -> Sequence:
        """The sequence to preempt when there is no page: of the largest priority value, the one admitted last."""
        return max(reversed(self.running), key=lambda seq: seq.priority)

    def victim_for(self, head: Sequence) -> Sequence | None:
        """The sequence whose place the next waiting one (`head`) is to have: one that head's priority precedes, or,
        where nothing of head's call runs, one of a call that has several. Of equals the one admitted last."""

        def claim(seq: Sequence) -> tuple[int, int]:
            """How much rather than others this sequence must yield; (0, 0): not at all."""
            of_head, of_seq = self.num_running[head.call], self.num_running[seq.call]
            is_shared = seq.priority == head.priority and not of_head and of_seq > 1
            return max(seq.priority - head.priority, 0), of_seq if is_shared else 0

        last = max(reversed(self.running), key=claim, default=None)
        return None if last is None or claim(last) == (0, 0) else last

    def clear(self) -> None:
        """Forgets all sequences; their pages are freed elsewhere."""
        self.running, self.num_running, self.refused = [], Counter(), None
        self._priorities, self._waiting, self.num_waiting = [], {}, 0
        self.adapters.clear()

    # --- a step's tokens

    def split_budget(self, prompts: list[Sequence], budget: int) -> tuple[list[int], int]:
        """The least that each running prompt gets of the budget, oldest first, and what is left for others.

        Where the prompts need more than one step, each of their calls gets an equal share, and so does the next waiting
        call if it has nothing running.
        """
        lengths = [seq.num_tokens - seq.num_computed for seq in prompts]
        if sum(lengths) > budget:
            calls = {seq.call for seq in prompts}
            is_another_waiting = self.num_waiting > 0 and not self.num_running[self.peek().call]
            left = dict.fromkeys(calls, budget // (len(calls) + is_another_waiting))
            for i, seq in enumerate(prompts):
                lengths[i] = min(lengths[i], left[seq.call])
                left[seq.call] -= lengths[i]
        return lengths, budget - sum(lengths)
