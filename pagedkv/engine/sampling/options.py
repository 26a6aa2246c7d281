"""What the rows of a step ask for besides a temperature and a seed: arguments of ops.sample, and edits of logits.

A step whose rows ask for none of it uses nothing of this file.

SamplingOptions: the arrays are uploaded when the batch changes. The
counts of tokens, which penalties need, stay on the device. A sequence has a row of counts from the first step that
samples it: the row is made from the tokens that the host knows then, and sample() adds each new token, even if the
host learns it a step late. A sequence that leaves the batch loses its row; a preempted one comes back when the host
knows all of its tokens.

LogitEdits: biases, and forbidden tokens. Edits that are the same in every step (logit_bias, allowed_token_ids) are
uploaded when the batch changes. min_tokens, masks and bad_words depend on what was sampled: their edits are made anew
for every step.
"""

from __future__ import annotations

from collections.abc import Collection, Set
from typing import Any

import numpy as np

from pagedkv import Tensor, ops

from ..sampling_params import MaskRequest
from ..scheduling.sequence import Sequence

FILTERS = {"top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}  # the argument, and the name in SamplingParams
PENALTIES = {
    "repetition_penalties": "repetition_penalty",
    "presence_penalties": "presence_penalty",
    "frequency_penalties": "frequency_penalty",
}
NUM_ARRAYS = len(FILTERS) + len(PENALTIES) + 1


class SamplingOptions:
    """The options of the step that is launched."""

    def __init__(self, max_num_seqs: int, max_model_len: int, vocab_size: int, device: str) -> None:
        self.arguments: dict[str, Any] = {}  # of ops.sample: one number per row, except for counts
        self.num_rows: int | None = None  # the rows after them are padding; None: before the first step
        self.num_logprobs: int | None = None  # the most that a row asks for
        self._counts_shape, self._max_model_len, self._device = (max_num_seqs, vocab_size), max_model_len, device
        self._counts: Tensor | None = None  # made for the first request with penalties, because it is large
        self._slots: dict[int, int] = {}  # rows of the counts, by Sequence.id
        self._arrays = ops.empty(NUM_ARRAYS * max_num_seqs, "int32", device)

    @property
    def need_logits(self) -> bool:
        """Whether rows ask for more than a temperature and a seed, which needs the logits in memory."""
        return bool(self.arguments) or self.num_logprobs is not None

    def set_rows(self, sequences: list[Sequence]) -> None:
        """The batch is another one: these sequences are sampled, in this order."""
        params = [seq.params for seq in sequences]
        self.num_rows = len(params)
        asked = [seq.num_logprobs for seq in sequences if seq.num_logprobs is not None]
        self.num_logprobs = min(max(asked), self._counts_shape[1]) if asked else None
        has_penalties = any(one.has_penalties for one in params)
        self._assign_slots([seq for seq in sequences if seq.params.has_penalties])
        self.arguments = {}
        if not has_penalties and not any(one.has_filters for one in params):
            return
        arrays = {
            key: np.array([getattr(one, name) for one in params], np.int32 if name == "top_k" else np.float32)
            for key, name in (FILTERS | PENALTIES if has_penalties else FILTERS).items()
        }
        if has_penalties:
            arrays["slots"] = np.array([self._slots.get(seq.id, -1) for seq in sequences], np.int32)
            self.arguments["counts"] = self._counts
        self._upload(arrays, len(params))

    def forget(self) -> None:
        """After lost steps: the counts on the device may include tokens that are lost."""
        self._slots = {}

    def _upload(self, arrays: dict[str, np.ndarray], size: int) -> None:
        """Uploads the arrays in one copy. It is from pageable memory, which may be freed after the call."""
        here = np.concatenate([array.view(np.int32) for array in arrays.values()])
        there = self._arrays[: len(here)].copy_(here)
        for i, (name, array) in enumerate(arrays.items()):
            self.arguments[name] = there[i * size : (i + 1) * size].view(-1, str(array.dtype))

    def _assign_slots(self, sequences: list[Sequence]) -> None:
        """Gives each of these sequences a row of the counts, and takes the rows of all others."""
        self._slots = {seq.id: self._slots[seq.id] for seq in sequences if seq.id in self._slots}
        free = set(range(self._counts_shape[0])).difference(self._slots.values())
        for seq in sequences:
            if seq.id not in self._slots:
                self._slots[seq.id] = free.pop()
                self._count(seq)

    def _count(self, seq: Sequence) -> None:
        if self._counts is None:
            self._token_ids = ops.empty(self._max_model_len, "int32", self._device)
            self._counts = ops.empty(self._counts_shape, "int32", self._device)  # last: there may be no memory
        tokens = np.asarray(seq.tokens)
        ids = self._token_ids[: len(tokens)].copy_(tokens)
        end = seq.num_prompt_tokens
        ops.count_tokens(ids[:end], ids[end:], self._counts[self._slots[seq.id]])


class LogitEdits:
    """The edits of the step that is launched."""

    def __init__(self, max_num_seqs: int, vocab_size: int, device: str) -> None:
        self._vocab_size, self._num_words, self._device = vocab_size, -(-vocab_size // 32), device
        self._all = self._bits_of_ids(range(vocab_size))
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
        self.are_there = any(one.has_edits for one in params)
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
            if seq.finish_reason is not None or seq.error is not None or not seq.params.has_edits:
                continue  # it has ended, and its row is one too many, or it asks for nothing
            try:
                allowed, biases = self._edits_of(seq)
            except Exception as error:  # a mask that fails, or options that leave no token, end this sequence alone
                seq.error = error
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
            given = {"mask": mask, "allowed_token_ids": params.allowed_token_ids}
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
        mask = seq.params.mask(seq.mask_request, list(seq.new_tokens))
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
