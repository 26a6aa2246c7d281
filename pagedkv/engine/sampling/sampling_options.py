"""What the rows of a step ask for besides a temperature and a seed, as arguments of ops.sample.

A step whose rows ask for none of it uses nothing of this file. The arrays are uploaded when the batch changes. The
counts of tokens, which penalties need, stay on the device. A sequence has a row of counts from the first step that
samples it: the row is made from the tokens that the host knows then, and sample() adds each new token, even if the
host learns it a step late. A sequence that leaves the batch loses its row; a preempted one comes back when the host
knows all of its tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv import Tensor, ops

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
