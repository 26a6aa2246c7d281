"""One step of the engine: what is computed together."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagedkv import BlockManager, OutOfBlocks, Tensor
from pagedkv.models.spec import Batch

from .sequence import Sequence


@dataclass(slots=True)
class Step:
    """The plan of a step: it computes the KV of tokens [starts[i], ends[i]) of sequences[i], lengths[i] of them.

    Pages are moved before anything is computed: first swap_out, then swap_in, then copies.
    """

    sequences: list[Sequence] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)  # of the sequences
    starts: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    receivers: list[Sequence] = field(default_factory=list)  # which get the token of each sampled row, and ...
    sampled: list[int] = field(default_factory=list)  # ... after which of `sequences`, by index
    # Ids of sequences: after this step the second shares the pages of the first.
    forks: list[tuple[int, int]] = field(default_factory=list)
    num_decodes: int = 0  # the first num_decodes sequences compute one token each, which was sampled
    # The rows of what the step before sampled that hold the tokens of the decodes, ...
    sources: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    known: list[int] = field(default_factory=list)  # ... except of these, whose tokens are in Sequence.new_tokens
    is_same_batch: bool = False  # the sequences of the step before in the same order, and all of them decode
    # This step and the next, which is planned, only decode, the same batch: only one of end_ids ends a sequence.
    goes_on: bool = False
    end_ids: frozenset[int] | None = None  # tokens that may end a decode, -1 (no token) among them; None: ask each
    num_left: int = 0  # of a step that only decodes: the least tokens that each of its sequences may get after it
    swap_out: np.ndarray | None = None  # int32 [n, 2]: page, host page
    swap_in: np.ndarray | None = None  # int32 [n, 2]: host page, page
    copies: np.ndarray | None = None  # int32 [n, 2]: page, page

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def only_decodes(self) -> bool:
        return self.num_decodes == len(self.sequences)

    def add(self, seq: Sequence, length: int) -> bool:
        """Adds a chunk of the sequence's tokens. True if it is the last one, after which a token is sampled."""
        self.starts.append(seq.num_computed)
        self.lengths.append(length)
        seq.num_computed += length
        self.ends.append(seq.num_computed)
        is_last = seq.num_computed == seq.num_tokens
        if is_last:
            self._sample(seq, len(self.sequences))
        self.sequences.append(seq)
        self.ids.append(seq.id)
        return is_last

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Has a token sampled for the child, which has the same prompt, after the chunk that was just added."""
        child.num_computed = child.num_in_pages = parent.num_computed
        child.num_cached = parent.num_cached
        self._sample(child, len(self.sequences) - 1)
        self.forks.append((parent.id, child.id))

    def _sample(self, seq: Sequence, index: int) -> None:
        seq.source = len(self.sampled)
        seq.num_tokens += 1
        self.sampled.append(index)
        self.receivers.append(seq)

    def add_decodes(self, decodes: list[Sequence], ids: list[int], ends: list[int]) -> None:
        """Adds the next token of each of these as the first of the step; `ends` are their num_tokens."""
        self._plan(decodes, ids, ends)
        self.starts = [end - 1 for end in ends]
        self.sources = np.array([seq.source for seq in decodes], np.int32)
        self.known = [i for i, (seq, end) in enumerate(zip(decodes, ends, strict=True)) if seq.num_known == end]
        for row, seq in enumerate(decodes):
            seq.source = row

    def go_on(self, last: Step, ends: list[int]) -> None:
        """The same after a step that only decoded, for its sequences."""
        self._plan(last.sequences.copy(), last.ids.copy(), ends)
        self.starts = last.ends.copy()
        self.sources = np.arange(self.num_decodes, dtype=np.int32)
        self.known = self.sampled.copy() if self.sequences[0].num_known == ends[0] else []

    def _plan(self, decodes: list[Sequence], ids: list[int], ends: list[int]) -> None:
        self.num_decodes = len(decodes)
        self.sequences, self.ids, self.ends = decodes, ids, ends
        self.lengths, self.sampled = [1] * len(decodes), list(range(len(decodes)))
        self.receivers = decodes.copy()
        for seq, end in zip(decodes, ends, strict=True):
            seq.num_computed = seq.num_in_pages = end
            seq.num_tokens = end + 1


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arrays of a step on the device. The next step overwrites them."""

    batch: Batch  # token ids may be negative: -1 - r is the token in row r of the step before
    last_tokens: Tensor | None  # [num_rows] tokens after which one is sampled; None: all
    temperatures: Tensor  # [num_rows] float32
    seeds: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] of the tokens to be sampled
    needs_logits: bool  # whether logits are written before anything is sampled


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

    def remember(self, step: Step) -> None:
        """Keeps the planned step, and what it has in common with the one before."""
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
    def append_tokens(step: Step, tokens: list[int], manager: BlockManager) -> bool:
        """Appends the tokens, one for each sequence of the step, unless one may end a sequence. Whether it did."""
        if not step.goes_on or step.end_ids is None or not step.end_ids.isdisjoint(tokens):
            return False
        for seq, token in zip(step.sequences, tokens, strict=True):
            seq.new_tokens.append(token)
        manager.append_batch(step.ids, tokens)
        return True
