"""Whether a waiting sequence gets its pages, and what is known of the one that did not."""

from __future__ import annotations

import numpy as np

from pagedkv import BlockManager, OutOfBlocks

from .sequence import Sequence
from .step import Step


class Admission:
    """tokens_per_step: the most tokens that a step computes."""

    def __init__(self, manager: BlockManager, tokens_per_step: int) -> None:
        self.manager = manager
        self.tokens_per_step = tokens_per_step
        self.refused: tuple[Sequence, int] | None = None  # who did not fit, and how many pages were free then

    def is_refused(self, seq: Sequence) -> bool:
        """Whether this sequence is the one that did not fit."""
        return self.refused is not None and self.refused[0] is seq

    def was_refused(self, seq: Sequence) -> bool:
        """Whether it did not fit and no page was freed since. Then its prompt need not be hashed again."""
        return self.refused is not None and self.is_refused(seq) and self.manager.num_free_blocks <= self.refused[1]

    def waits_for_prefix(self, seq: Sequence, step_number: int) -> bool:
        """Whether a running sequence is computing pages that this one begins with."""
        if seq.is_swapped:
            return False
        if seq.retry_step > step_number:
            return True
        _, num_pending = self.manager.match(seq.tokens, salt=seq.salt)
        if not num_pending:
            return False
        # They take at least this many steps (of one page all tokens but one may be computed already). An earlier look
        # would only hash the prompt again.
        num_missing = num_pending - self.manager.block_size + 1
        seq.retry_step = step_number + max(-(-num_missing // self.tokens_per_step), 1)
        return True

    def find_pages(self, seq: Sequence, step: Step, num_running: int) -> bool:
        """Takes pages for all known tokens. Where they do not fit, nothing changes and the result is False."""
        self.manager.watermark_blocks = num_running
        try:
            if seq.is_swapped:
                self._swap_in(seq, step, num_running)
            else:
                self._allocate(seq)
        except OutOfBlocks:
            if not num_running:
                raise  # pages are held outside of the engine: there is nothing to wait for
            self.refused = seq, self.manager.num_free_blocks
            return False
        seq.num_in_pages = seq.num_tokens
        return True

    def _allocate(self, seq: Sequence) -> None:
        num_hits = self.manager.allocate(seq.id, seq.tokens, salt=seq.salt)
        seq.num_computed = min(num_hits, seq.num_tokens - 1)  # the last token is computed for its logits, cached or not
        if seq.num_cached < 0:
            seq.num_cached = num_hits

    def _swap_in(self, seq: Sequence, step: Step, num_running: int) -> None:
        """Brings its KV back to the device, with room for the tokens that its pages do not hold yet."""
        num_pages = -(-seq.num_tokens // self.manager.block_size)
        if num_running and num_pages > self.manager.num_free_blocks - num_running:
            raise OutOfBlocks
        pairs = self.manager.swap_in(seq.id)
        self.manager.append(seq.id, seq.tokens[self.manager.num_tokens(seq.id) :])
        step.swap_in = pairs if step.swap_in is None else np.concatenate((step.swap_in, pairs))
        seq.is_swapped = False
