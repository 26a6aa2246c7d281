"""One step of the engine: what is computed together."""

from __future__ import annotations

from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedkv import BlockManager, Event, OutOfBlocks
from pagedkv.models.adapter import Adapter

from .sequence import Sequence


@dataclass(slots=True)
class Step:
    """The plan of a step: it computes the KV of tokens [starts[i], ends[i]) of sequences[i], lengths[i] of them.

    A decode may have guesses: tokens that may follow its newest one. They are computed, too, and a token is sampled
    after each, as if it were right. Once the tokens are known, accept() keeps those that follow right ones.

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
    num_decodes: int = 0  # the first num_decodes sequences compute one token each, which was sampled, and guesses
    guesses: list[list[int]] = field(default_factory=list)  # of each of the decodes; empty: none has any
    accepted: list[int] = field(default_factory=list)  # after accept(): how many of these were right
    num_new: int = 0  # tokens that update() has given to sequences
    # The rows of what the step before sampled that hold the tokens of the decodes, ...
    sources: np.ndarray = field(default_factory=lambda: np.empty(0, np.int32))
    known: list[int] = field(default_factory=list)  # ... except of these, whose tokens are in Sequence.new_tokens
    is_same_batch: bool = False  # the sequences of the step before in the same order, and all of them decode
    # The next step is planned. Both decode the same batch and nothing else: only a token of end_ids ends a sequence.
    goes_on: bool = False
    end_ids: frozenset[int] | None = None  # tokens that may end a decode, -1 (no token) among them; None: ask each
    num_left: int = 0  # of a step that only decodes: the least tokens that each of its sequences may get after it
    swap_out: np.ndarray | None = None  # int32 [n, 2]: page, host page
    swap_in: np.ndarray | None = None  # int32 [n, 2]: host page, page
    copies: np.ndarray | None = None  # int32 [n, 2]: page, page
    adapters: list[tuple[int, Adapter]] = field(default_factory=list)  # to be written into these slots first
    adapter_slots: list[int] | None = None  # of the sequences; None: no sequence has an adapter
    is_measurable: bool = True  # nothing took time that a step of its kind does not take: no graph was captured
    # What its launch leaves for the host (see ModelRunner.launch), which is there after the event; None: at once.
    event: Event | None = None
    sampled_tokens: Any = None  # int32 [num_rows]
    # Ids and log probabilities [num_rows, 1 + n] of the sampled token and the n best ones; n is the most that a row
    # asks for.
    best: tuple[np.ndarray, np.ndarray] | None = None
    prompt_outputs: Any = None  # of the prompts' own tokens: see PromptOutputs

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    @property
    def only_decodes(self) -> bool:
        return self.num_decodes == len(self.sequences)

    @property
    def num_decode_tokens(self) -> int:
        """Computed of the decodes, guesses among them: a token is sampled after each."""
        return self.num_decodes + sum(map(len, self.guesses))

    @property
    def num_decoded(self) -> int:
        """After accept(): tokens of the decodes."""
        return self.num_decodes + sum(self.accepted)

    @property
    def known_ends(self) -> list[int]:
        """As `ends`, without guesses."""
        if not self.guesses:
            return self.ends
        decodes = [end - len(guesses) for end, guesses in zip(self.ends, self.guesses, strict=False)]
        return decodes + self.ends[self.num_decodes :]

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

    def add_decodes(
        self, decodes: list[Sequence], ids: list[int], ends: list[int], guesses: SequenceOf[list[int]] = ()
    ) -> None:
        """Adds the next token of each of these as the first of the step; `ends` are their num_tokens. guesses: of each;
        the host must know the newest token of all then. Empty: there are none."""
        self._plan(decodes, ids, ends)
        self.starts = [end - 1 for end in ends]
        self.sources = np.array([seq.source for seq in decodes], np.int32)
        self.known = [i for i, (seq, end) in enumerate(zip(decodes, ends, strict=True)) if seq.num_known == end]
        for row, seq in enumerate(decodes):
            seq.source = row
        if guesses:
            assert len(self.known) == len(decodes), "the host knows what the guesses follow"
            self.guesses, self.lengths = list(guesses), [1 + len(each) for each in guesses]
            self.ends = [end + len(each) for end, each in zip(ends, guesses, strict=True)]
            self.sampled = [i for i, length in enumerate(self.lengths) for _ in range(length)]
            self.receivers = [decodes[i] for i in self.sampled]

    def next_decodes(self, running: list[Sequence], manager: BlockManager) -> Step | None:
        """The step after this one, if this one only decodes, and decodes what runs. None, and no change, if that is not
        so, or if there is no page for one of the tokens."""
        if not self.num_left or running != self.sequences:
            return None
        ends, step = [end + 1 for end in self.ends], Step()
        try:
            step.copies = manager.reserve_batch(self.ids, ends)
        except OutOfBlocks:
            return None
        step._plan(self.sequences.copy(), self.ids.copy(), ends)
        step.starts = self.ends.copy()
        step.sources = np.arange(step.num_decodes, dtype=np.int32)
        step.known = step.sampled.copy() if step.sequences[0].num_known == ends[0] else []
        return step

    def _plan(self, decodes: list[Sequence], ids: list[int], ends: list[int]) -> None:
        self.num_decodes = len(decodes)
        self.sequences, self.ids, self.ends = decodes, ids, ends
        self.lengths, self.sampled = [1] * len(decodes), list(range(len(decodes)))
        self.receivers = decodes.copy()
        for seq, end in zip(decodes, ends, strict=True):
            seq.num_computed = seq.num_in_pages = end
            seq.num_tokens = end + 1

    def come_after(self, last: Step) -> None:
        """Notes what the step, which is planned, has in common with the one before."""
        only_decodes = self.only_decodes and not self.guesses
        self.is_same_batch = only_decodes and not last.guesses and self.sequences == last.receivers
        if self.is_same_batch and last.num_left:
            last.goes_on, self.end_ids, self.num_left = last.end_ids is not None, last.end_ids, last.num_left - 1
        elif only_decodes:
            # A token alone tells neither that a stop string is complete nor that a mask or another edit has failed.
            if all(seq.detokenizer is None and not seq.params.has_edits for seq in self.sequences):
                self.end_ids = frozenset([-1]).union(*(seq.end_ids for seq in self.sequences))
            self.num_left = min(seq.max_num_tokens - seq.num_tokens for seq in self.sequences)

    def append_tokens(self, tokens: list[int], manager: BlockManager) -> bool:
        """Appends the tokens, one for each sequence, where none of them can end one. Returns whether it did."""
        if not self.goes_on or self.end_ids is None or not self.end_ids.isdisjoint(tokens):
            return False
        for seq, token in zip(self.sequences, tokens, strict=True):
            seq.new_tokens.append(token)
        manager.append_batch(self.ids, tokens)
        self.num_new = len(tokens)
        return True

    def accept(self, tokens: list[int]) -> list[int]:
        """Keeps of what was sampled after a decode's guesses what follows right ones, and drops the rows after the
        first token that is not its guess: they were sampled after a wrong one. Returns the tokens that are left, for
        what is left of `sampled`. A right guess is the token itself, so answers are those without guesses."""
        if not self.guesses:
            return tokens
        rows, first = list[int](), 0
        for guesses in self.guesses:
            right = 0
            while right < len(guesses) and tokens[first + right] == guesses[right]:
                right += 1
            self.accepted.append(right)
            rows += range(first, first + right + 1)
            first += 1 + len(guesses)
        rows += range(first, len(tokens))
        self.sampled, self.receivers = [self.sampled[i] for i in rows], [self.receivers[i] for i in rows]
        if self.best is not None:
            self.best = self.best[0][rows], self.best[1][rows]
        return [tokens[i] for i in rows]

    def tokens(self) -> list[int]:
        """The sampled tokens in the order of `sampled`; -1 where the logits gave none. Waits for them."""
        if self.event is not None:
            self.event.synchronize()
        tokens: list[int] = self.sampled_tokens.tolist()
        return tokens

    def report(self) -> None:
        """Hands what else is known of the tokens to their sequences, after tokens() has waited."""
        if self.prompt_outputs is not None:
            self.prompt_outputs.report()
        if self.best is None:
            return
        for seq, row_ids, row in zip(self.receivers, self.best[0].tolist(), self.best[1].tolist(), strict=True):
            if seq.num_logprobs is not None and seq.finish_reason is None and row_ids[0] >= 0:
                end = 1 + seq.num_logprobs
                seq.logprobs.append(dict(zip(row_ids[:end], row[:end], strict=True)))
                seq.cumulative_logprob += row[0]
