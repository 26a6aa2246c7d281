"""The fast path: a batch that only decodes, and goes on unchanged from step to step.

Most steps are of this kind. They take from the step before what the two have in common, and if no token ends a
sequence, the tokens are appended without a look at each sequence.
"""

from __future__ import annotations

from pagedkv import BlockManager, OutOfBlocks

from .sequence import Sequence
from .step import Step


class SteadyBatch:
    """What is known of the step before."""

    def __init__(self) -> None:
        self._last = Step()
        self._last_receivers: list[Sequence] = []

    def next_step(self, running: list[Sequence], manager: BlockManager) -> Step | None:
        """Plans the next token of each sequence, if the step before only decoded, and decoded these sequences.

        None, and no change, if that is not so, or if there is no page for one of the tokens.
        """
        last = self._last
        if not last.num_left or running != last.sequences:
            return None
        ends, step = [end + 1 for end in last.ends], Step()
        try:
            step.copies = manager.reserve_batch(last.ids, ends)
        except OutOfBlocks:
            return None
        step.go_on(last, ends)
        return step

    def follow(self, step: Step) -> None:
        """Notes the planned step, and what it has in common with the one before."""
        last, only_decodes = self._last, step.only_decodes
        step.is_same_batch = only_decodes and step.sequences == self._last_receivers
        if step.is_same_batch and last.num_left:
            last.goes_on, step.end_ids, step.num_left = last.end_ids is not None, last.end_ids, last.num_left - 1
        elif only_decodes:
            # A token alone tells neither that a stop string is complete nor that a mask or another edit has failed.
            if all(seq.detokenizer is None and not seq.params.has_edits for seq in step.sequences):
                step.end_ids = frozenset([-1]).union(*(seq.end_ids for seq in step.sequences))
            step.num_left = min(seq.max_num_tokens - seq.num_tokens for seq in step.sequences)
        self._last, self._last_receivers = step, step.receivers

    @staticmethod
    def take(step: Step, tokens: list[int], manager: BlockManager) -> bool:
        """Appends the tokens, one for each sequence of the step, unless one may end a sequence. Whether it did."""
        if not step.goes_on or step.end_ids is None or not step.end_ids.isdisjoint(tokens):
            return False
        for seq, token in zip(step.sequences, tokens, strict=True):
            seq.new_tokens.append(token)
        manager.append_batch(step.ids, tokens)
        return True
