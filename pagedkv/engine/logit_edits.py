"""Edits of logits before a token is sampled, as the rows of a step ask for them: biases, and forbidden tokens.

A step whose rows ask for none of them uses nothing of this file. Edits that are the same in every step (logit_bias,
allowed_token_ids) are uploaded when the batch changes. min_tokens, masks and bad_words depend on what was sampled:
their edits are made anew for every step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv import Tensor, ops

from .sequence import Sequence


@dataclass(frozen=True, eq=False)
class MaskRequest:
    """The answer for which a mask is asked. It lives as long as the answer."""

    id: str
    index: int
    prompt_token_ids: list[int]


class LogitEdits:
    """The edits of the step that is launched."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: str) -> None:
        self._vocab_size, self._num_words, self._device = vocab_size, -(-vocab_size // 32), device
        self.are_there = False  # whether any row asks for an edit
        self.need_tokens = False  # whether some edits depend on tokens that the host must know
        self._changes = False  # whether the next step needs other edits
        self._rows: list[Sequence] = []
        self._bias: tuple[Tensor, Tensor, Tensor] | None = None  # rows, token ids, values
        self._masks: tuple[Tensor, Tensor] | None = None  # rows, bits

    def set_rows(self, sequences: list[Sequence]) -> None:
        """The batch is another one: these sequences are sampled, in this order."""
        self._rows = sequences
        params = [seq.params for seq in sequences]
        self.need_tokens = any(one.mask is not None or one.bad_words for one in params)
        self._changes = self.need_tokens or any(one.min_tokens for one in params)
        self.are_there = self._changes or any(one.logit_bias or one.allowed_token_ids is not None for one in params)
        if self.are_there and not self._changes:
            self._upload()

    def apply(self, logits: Tensor) -> None:
        """Edits float32 [num_rows, vocab_size] in place."""
        if self._changes:
            self._upload()
        if self._masks is not None:
            rows, bits = self._masks
            ops.mask_logits(logits, bits, rows=rows)
        if self._bias is not None:
            ops.bias_logits(logits, *self._bias)

    def _upload(self) -> None:
        pairs: list[tuple[int, int, float]] = []
        masks: list[tuple[int, np.ndarray]] = []
        for row, seq in enumerate(self._rows):
            if seq.finish_reason is not None:
                continue  # it has ended: its row is one too many
            params = seq.params
            pairs += [(row, token, bias) for token, bias in (params.logit_bias or {}).items()]
            pairs += [(row, token, -np.inf) for token in self._forbidden(seq) if token < self._vocab_size]
            if params.allowed_token_ids is not None:
                masks.append((row, self._bits_of_ids(params.allowed_token_ids)))
            if params.mask is not None and (bits := self._ask(seq)) is not None:
                masks.append((row, bits))
        self._bias = self._masks = None
        if pairs:
            rows, ids, values = (np.array(each) for each in zip(*pairs, strict=True))
            self._bias = (
                self._there(rows.astype(np.int32)),
                self._there(ids.astype(np.int32)),
                self._there(values.astype(np.float32)),
            )
        if masks:
            rows, bits = zip(*masks, strict=True)
            self._masks = self._there(np.array(rows, np.int32)), self._there(np.stack(bits))

    def _forbidden(self, seq: Sequence) -> set[int]:
        """Tokens that may not come next."""
        forbidden: set[int] = set() if seq.bad_words is None else seq.bad_words.next_forbidden(seq.new_tokens)
        # The counts run ahead of new_tokens: num_tokens has the token that is being sampled.
        if seq.num_tokens - seq.num_prompt_tokens <= seq.params.min_tokens:
            forbidden |= seq.end_ids
        return forbidden

    def _ask(self, seq: Sequence) -> np.ndarray | None:
        """The mask's bits; None where all tokens are allowed. A mask that fails ends this sequence alone."""
        assert seq.params.mask is not None
        if seq.mask_request is None:
            seq.mask_request = MaskRequest(seq.owner.id, seq.index, list(seq.prompt))
        try:
            mask = seq.params.mask(seq.mask_request, list(seq.new_tokens))
            return None if mask is None else self._bits(mask)
        except Exception as error:
            seq.error = error
            return None

    def _bits(self, mask: Any) -> np.ndarray:
        bits = np.asarray(mask)
        if bits.dtype == np.bool_ and bits.shape == (self._vocab_size,):
            return self._pack(bits)
        if bits.dtype == np.int32 and bits.shape == (self._num_words,):
            return bits
        raise ValueError(
            f"mask gave {bits.dtype} {list(bits.shape)} but must give int32 [{self._num_words}] or bool "
            f"[{self._vocab_size}]"
        )

    def _bits_of_ids(self, token_ids: Any) -> np.ndarray:
        allowed = np.zeros(self._vocab_size, np.bool_)
        allowed[list(token_ids)] = True
        return self._pack(allowed)

    def _pack(self, allowed: np.ndarray) -> np.ndarray:
        padded = np.zeros(32 * self._num_words, np.bool_)
        padded[: self._vocab_size] = allowed
        return np.packbits(padded, bitorder="little").view("<i4").astype(np.int32, copy=False)

    def _there(self, array: np.ndarray) -> Tensor:
        return ops.asarray(array, device=self._device)
