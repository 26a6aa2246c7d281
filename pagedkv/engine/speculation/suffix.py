"""Guesses what followed the same tokens earlier: in the prompt, in the answer, or in earlier requests."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from pagedkv.ops import SuffixIndex

from ..scheduling.sequence import Sequence

CAPACITY = 1 << 20  # tokens
PIECE = 4096  # tokens that are added at once: other threads wait meanwhile


class SuffixDrafter:
    """Texts of the same salt, and so of the same adapter, share one index."""

    is_free = is_measurable = True

    def __init__(self) -> None:
        self._index = SuffixIndex(CAPACITY)
        self._prompts: WeakKeyDictionary[object, int] = WeakKeyDictionary()  # their ends, by request

    def guess(self, sequences: list[Sequence], counts: list[int]) -> list[list[int]]:
        propose = self._index.propose
        return [propose(seq.draft.own[0], count)[0] for seq, count in zip(sequences, counts, strict=True)]

    def take(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            draft = seq.draft
            last, num_taken = (self._prompt(seq), 0) if draft.own is None else draft.own
            last = self._index.append(last, seq.new_tokens[num_taken:], hash(seq.salt))
            draft.own = last, len(seq.new_tokens)

    def _prompt(self, seq: Sequence) -> int:
        """The end of its prompt, which is added once for all answers."""
        if seq.request in self._prompts:
            return self._prompts[seq.request]
        last, salt = 0, hash(seq.salt)
        for start in range(0, len(seq.prompt), PIECE):
            last = self._index.append(last, seq.prompt[start : start + PIECE], salt)
        if seq.request is not None:
            self._prompts[seq.request] = last
        return last

    def forget(self) -> None:
        """Nothing to do: all is on the host."""
