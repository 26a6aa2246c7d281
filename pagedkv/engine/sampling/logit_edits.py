"""Edits of the logits of a step: biases, and forbidden tokens.

Edits that are the same in every step (logit_bias, allowed_token_ids) are uploaded when the batch changes. min_tokens,
masks and bad_words depend on what was sampled: their edits are made anew for every step.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import Any

import numpy as np

from pagedkv import Tensor, ops

from ..sampling_params import MaskRequest
from ..scheduling.sequence import Sequence
from .grammars import GrammarMask


class LogitEdits:
    """The edits of a batch: these sequences are sampled, in this order, and one of them has edits at least."""

    def __init__(self, sequences: list[Sequence], vocab_size: int, device: str) -> None:
        self._rows, self._device = sequences, device
        self._vocab_size, self._num_words = vocab_size, -(-vocab_size // 32)
        self._all = self._pack(np.ones(vocab_size, np.bool_))
        self._bias: tuple[Tensor, Tensor, Tensor] | None = None  # rows, token ids, values
        self._masks: tuple[Tensor, Tensor] | None = None  # rows, bits
        params = [seq.params for seq in sequences]
        # Whether some edits depend on tokens that the host must know, and whether each step needs others.
        self.need_tokens = any(one.mask is not None or one.bad_words for one in params)
        self._changes = self.need_tokens or any(one.min_tokens for one in params)
        if not self._changes:
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
            if seq.finish_reason is not None or seq.error is not None or not seq.params.has_edits:
                continue  # it has ended, and its row is one too many, or it asks for nothing
            try:
                allowed, biases = self._edits_of(seq)
            except Exception as error:  # a mask that fails, or options that leave no token, end this sequence alone
                seq.error = error
                continue
            except BaseException as error:  # so does a mask that would exit
                seq.error = RuntimeError(f"a mask raised {type(error).__name__}: {error}")
                continue
            pairs += [(row, token, bias) for token, bias in biases.items()]
            if allowed is not None:
                masks.append((row, allowed))
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

    def _edits_of(self, seq: Sequence) -> tuple[np.ndarray | None, dict[int, float]]:
        """The bits of the tokens that may come next (None: all), and what is added to the logits of some. Raises
        ValueError where nothing is left."""
        params, mask = seq.params, self._ask(seq)
        biases, forbidden = dict(params.logit_bias or {}), dict[str, Set[int]]()
        forbidden["logit_bias"] = {token for token, bias in biases.items() if bias == -np.inf}
        if seq.bad_words:
            forbidden["bad_words"] = _completing(seq.bad_words, seq.new_tokens)
        # The counts run ahead of new_tokens: num_tokens has the token that is being sampled.
        if seq.num_tokens - seq.num_prompt_tokens <= seq.min_tokens:
            if mask is not None and mask.any() and self._are_within(mask, seq.end_ids):
                seq.min_tokens = 0  # what the mask describes is complete
            else:
                forbidden["min_tokens"] = seq.end_ids
        allowed = mask
        if params.allowed_token_ids is not None:
            bits = self._bits_of_ids(params.allowed_token_ids)
            allowed = bits if mask is None else bits & mask
        never = {token for tokens in forbidden.values() for token in tokens if token < self._vocab_size}
        if self._are_within(self._all if allowed is None else allowed, never):
            name = "structured_outputs" if isinstance(params.mask, GrammarMask) else "mask"
            given = {name: mask, "allowed_token_ids": params.allowed_token_ids}
            names = [name for name, value in given.items() if value is not None]
            names += [name for name, tokens in forbidden.items() if tokens]
            raise ValueError(f"{' and '.join(names)} leave{'s' if len(names) == 1 else ''} no token to sample")
        return allowed, biases | dict.fromkeys(never, -np.inf)

    def _ask(self, seq: Sequence) -> np.ndarray | None:
        """The mask's bits; None where all tokens are allowed, or there is no mask."""
        if seq.params.mask is None:
            return None
        if seq.mask_request is None:
            seq.mask_request = MaskRequest(seq.request.id, seq.index, list(seq.prompt))
        ask, tokens = seq.params.mask, seq.new_tokens
        # A caller's own mask may keep or change its list; a copy for each token of a long answer is worth saving else.
        mask = ask(seq.mask_request, tokens if isinstance(ask, GrammarMask) else list(tokens))
        return None if mask is None else self._bits(mask)

    def _bits(self, mask: Any) -> np.ndarray:
        bits = np.asarray(mask)
        if bits.dtype == np.bool_ and bits.shape == (self._vocab_size,):
            return self._pack(bits)
        if bits.dtype == np.int32 and bits.shape == (self._num_words,):
            words: np.ndarray = bits & self._all
            return words
        raise ValueError(
            f"mask gave {bits.dtype} {list(bits.shape)} but must give int32 [{self._num_words}] or bool "
            f"[{self._vocab_size}]"
        )

    def _bits_of_ids(self, token_ids: Collection[int]) -> np.ndarray:
        """int32 [num_words], where bit t % 32 of word t // 32 stands for token t."""
        ids = np.fromiter(token_ids, np.int64, len(token_ids))
        allowed = np.zeros(self._vocab_size, np.bool_)
        allowed[ids[ids < self._vocab_size]] = True
        return self._pack(allowed)

    def _pack(self, allowed: np.ndarray) -> np.ndarray:
        padded = np.zeros(32 * self._num_words, np.bool_)
        padded[: self._vocab_size] = allowed
        return np.packbits(padded, bitorder="little").view("<i4").astype(np.int32, copy=False)

    def _are_within(self, bits: np.ndarray, token_ids: Collection[int]) -> bool:
        """Whether the bits stand for some of these tokens only. (They are counted first, because that is cheap.)"""
        count = int(np.bitwise_count(bits.view(np.uint32)).sum())
        return count <= len(token_ids) and not (bits & ~self._bits_of_ids(token_ids)).any()

    def _there(self, array: np.ndarray) -> Tensor:
        return ops.asarray(array, device=self._device)


def _completing(texts: list[list[int]], tokens: list[int]) -> set[int]:
    """The tokens that would complete one of the forbidden texts after these tokens."""
    return {last for *before, last in texts if not before or tokens[-len(before) :] == before}
