"""From hidden states to tokens: logits, their edits, the sampling, and the log probabilities.

Where no row asks for more than a temperature and a seed, the head and the sampler are one operation, which need not
write logits. Otherwise the logits are written, and what the rows ask for follows. The host must know the tokens that
masks depend on: wait_for_tokens() waits for those of the step before, while the device computes the logits of this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from pagedkv import Tensor, ops
from pagedkv.models.spec import Batch, Model

from ..sampling_params import MAX_LOGPROBS
from ..scheduling.sequence import Sequence
from ..scheduling.step import Step
from .logit_edits import LogitEdits

Best = tuple[np.ndarray, np.ndarray]  # ids and log probabilities, [num_rows, 1 + n]
FILTERS = {"top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}  # arguments of ops.sample: names in SamplingParams
PENALTIES = {
    "repetition_penalties": "repetition_penalty",
    "presence_penalties": "presence_penalty",
    "frequency_penalties": "frequency_penalty",
}
NUM_ARRAYS = len(FILTERS) + len(PENALTIES) + 1


class Sampler:
    """Samples the rows of one step at a time. What they ask for is uploaded when the batch changes.

    The counts of tokens, which penalties need, stay on the device. A sequence has a row of counts from the first step
    that samples it: the row is made from the tokens that the host knows then, and sample() adds each new token, even if
    the host learns it a step late. A sequence that leaves the batch loses its row; a preempted one comes back when the
    host knows all of its tokens.
    """

    def __init__(
        self, model: Model, vocab_size: int, device: str, *, max_num_seqs: int, max_num_rows: int, max_model_len: int,
        is_shared: bool,
    ) -> None:  # fmt: skip
        """max_num_rows: at least max_num_seqs; is_shared: the vocabulary is divided among ranks, which would have to
        gather logits."""
        self._model, self._device, self._max_num_seqs, self._is_shared = model, device, max_num_seqs, is_shared
        self._vocab_size, self._max_model_len, self._max_num_rows = vocab_size, max_model_len, max_num_rows
        self.logits = model.allocate_logits(max_num_rows)
        self.sampled = ops.empty(max_num_rows, "int32", device)  # of the last launch, by row
        # Copies for the host, used in turn. The arrays are made now, because numpy() waits for what writes the memory.
        self._known = [self._host_memory(max_num_rows, "int32") for _ in range(2)]
        self._known_arrays = [memory.numpy() for memory in self._known]
        self._num_rows: int | None = None  # the rows after them are padding; None: before the first step
        self._options: dict[str, Any] = {}  # of ops.sample: one number per row, except for counts
        self._option_arrays = ops.empty(NUM_ARRAYS * max_num_rows, "int32", device)
        self._counts: Tensor | None = None  # made for the first request with penalties, because it is large
        self._slots: dict[int, int] = {}  # rows of the counts, by Sequence.id
        self._edits: LogitEdits | None = None
        self._num_logprobs: int | None = None  # the most that a row asks for
        self._unedited: Tensor | None = None  # logits, where some are edited and their log probabilities asked for
        self._logits_as_they_are = self.logits
        self._best: list[list[Tensor]] = []  # ids and log probabilities: on the device, then two for the host, in turn
        self._best_arrays: list[list[np.ndarray]] = []  # the latter two as arrays

    def _host_memory(self, count: int, dtype: str) -> Tensor:
        return ops.empty(count, dtype, pinned=self._device != "cpu")

    # --- what the rows ask for

    def set_rows(self, sequences: list[Sequence]) -> None:
        """The batch is another one: these sequences are sampled, in this order."""
        params = [seq.params for seq in sequences]
        self._num_rows = len(params)
        asked = [seq.num_logprobs for seq in sequences if seq.num_logprobs is not None]
        self._num_logprobs = min(max(asked), self._vocab_size) if asked else None
        has_edits = any(one.has_edits for one in params)
        self._edits = LogitEdits(sequences, self._vocab_size, self._device) if has_edits else None
        penalised = [seq for seq in sequences if seq.params.has_penalties]
        self._assign_slots(penalised)
        self._options = {}
        if not penalised and not any(one.has_filters for one in params):
            return
        arrays = {
            key: np.array([getattr(one, name) for one in params], np.int32 if name == "top_k" else np.float32)
            for key, name in (FILTERS | PENALTIES if penalised else FILTERS).items()
        }
        if penalised:
            arrays["slots"] = np.array([self._slots.get(seq.id, -1) for seq in sequences], np.int32)
            self._options["counts"] = self._counts
        # One copy, from pageable memory, which may be freed after the call.
        here = np.concatenate([array.view(np.int32) for array in arrays.values()])
        there = self._option_arrays[: len(here)].copy_(here)
        for i, (name, array) in enumerate(arrays.items()):
            self._options[name] = there[i * len(params) : (i + 1) * len(params)].view(-1, str(array.dtype))

    def forget(self) -> None:
        """Steps on their way are lost, with tokens that the counts on the device may include."""
        self._slots = {}

    def _assign_slots(self, sequences: list[Sequence]) -> None:
        """Gives each of these sequences a row of the counts, and takes the rows of all others."""
        self._slots = {seq.id: self._slots[seq.id] for seq in sequences if seq.id in self._slots}
        free = set(range(self._max_num_seqs)).difference(self._slots.values())
        for seq in sequences:
            if seq.id not in self._slots:
                self._slots[seq.id] = free.pop()
                self._count(seq)

    def _count(self, seq: Sequence) -> None:
        if self._counts is None:
            self._token_ids = ops.empty(self._max_model_len, "int32", self._device)
            shape = self._max_num_seqs, self._vocab_size
            self._counts = ops.empty(shape, "int32", self._device)  # last: there may be no memory
        tokens = np.asarray(seq.tokens)
        ids = self._token_ids[: len(tokens)].copy_(tokens)
        end = seq.num_prompt_tokens
        ops.count_tokens(ids[:end], ids[end:], self._counts[self._slots[seq.id]])

    @property
    def needs_logits(self) -> bool:
        """Whether sampling needs logits in memory. The CPU always does, if it has all of them."""
        asks = self._options or self._edits is not None or self._num_logprobs is not None
        return bool(asks) or (self._device == "cpu" and not self._is_shared)

    # --- a step

    def compute(self, hidden: Tensor, batch: Batch) -> None:
        """Computes the logits where the step needs them, otherwise its tokens."""
        num_rows = len(batch.temperatures)
        if not num_rows:
            return
        if batch.needs_logits:
            self._model.logits(hidden, out=self.logits[:num_rows])
            return

        def sample(start: int, end: int) -> None:
            given = hidden, batch.temperatures, batch.seeds, batch.next_positions
            rows = (each[start:end] for each in given)
            self._model.sample(*rows, logits=self.logits[start:end], out=self.sampled[start:end])

        self._sample_each(sample, num_rows)

    def edit(self, wait_for_tokens: Callable[[], None]) -> None:
        """Edits the logits as the rows ask. Log probabilities are those of the logits before the edits."""
        num_rows = self._num_rows
        self._logits_as_they_are = self.logits
        if not num_rows or self._edits is None:
            return
        if self._edits.need_tokens:
            wait_for_tokens()
        if self._num_logprobs is not None:
            if self._unedited is None:
                self._unedited = ops.empty(self.logits.shape, "float32", self._device)
            self._logits_as_they_are = self._unedited
            self._unedited[:num_rows].copy_(self.logits[:num_rows])
        self._edits.apply(self.logits[:num_rows])

    def sample(self, batch: Batch) -> None:
        """Samples `logits` into `sampled`. A row that fails (NaN, nothing finite) gets -1 and does not stop others."""

        def sample(start: int, end: int) -> None:
            given = self.logits, batch.temperatures, batch.seeds, batch.next_positions
            options = {
                name: value if name == "counts" else value[start:end] for name, value in self._options.items()
            }
            ops.sample(*(each[start:end] for each in given), out=self.sampled[start:end], **options)

        self._sample_each(sample, len(batch.temperatures) if self._num_rows is None else self._num_rows)

    def _sample_each(self, sample: Callable[[int, int], None], num_rows: int) -> None:
        try:
            sample(0, num_rows)
        except ValueError:  # only the CPU raises, for the first row that fails: find all of them
            for i in range(num_rows):
                try:
                    sample(i, i + 1)
                except ValueError:
                    self.sampled.numpy()[i] = -1

    def send(self, num_rows: int, turn: int) -> tuple[np.ndarray, Best | None]:
        """Starts the copy of the tokens, and of log probabilities where rows ask for them, to the host."""
        best = self._send_best(num_rows, turn)
        if num_rows:
            self._known[turn][:num_rows].copy_(self.sampled[:num_rows])
        return self._known_arrays[turn][:num_rows], best

    def _send_best(self, num_rows: int, turn: int) -> Best | None:
        """Log probabilities of the unedited logits; None where no row asks for them."""
        if self._num_logprobs is None or not num_rows:
            return None
        if not self._best:
            size = self._max_num_rows * (1 + MAX_LOGPROBS)
            of_device = [ops.empty(size, dtype, self._device) for dtype in ("int32", "float32")]
            of_host = [[self._host_memory(size, dtype) for dtype in ("int32", "float32")] for _ in range(2)]
            self._best_arrays = [[memory.numpy() for memory in pair] for pair in of_host]
            self._best = [of_device, *of_host]  # last: there may be no memory
        shape = num_rows, 1 + self._num_logprobs
        there, here = (
            [flat[: shape[0] * shape[1]].view(shape) for flat in pair] for pair in (self._best[0], self._best[1 + turn])
        )
        logits, sampled = self._logits_as_they_are[:num_rows], self.sampled[:num_rows]
        ops.token_logprobs(logits, sampled, self._num_logprobs, out_ids=there[0], out=there[1])
        for to, of in zip(here, there, strict=True):
            to.copy_(of)
        ids, logprobs = (array[: shape[0] * shape[1]].reshape(shape) for array in self._best_arrays[turn])
        return ids, logprobs


class PromptOutputs:
    """What requests ask of their prompts' own tokens: log probabilities, or the last hidden state as an embedding.

    Few requests ask for it. A step with such a request computes the hidden states of all its tokens, and waits for
    them. report() gives each sequence its own.
    """

    def __init__(
        self, step: Step, hidden: Tensor, logits_of: Callable[[np.ndarray], Tensor], most: tuple[int, ...]
    ) -> None:
        """hidden: [num_tokens, hidden_size] of the step's tokens; logits_of: some rows (int32) of them, at most [rows,
        vocab_size], in memory that the next ones take."""
        self._logits_of, self._most, self._hidden = logits_of, most, hidden
        self._scores: list[tuple[Sequence, np.ndarray, np.ndarray]] = []
        self._vectors: list[tuple[Sequence, np.ndarray]] = []
        firsts = np.cumsum([0, *step.lengths])
        for i, seq in enumerate(step.sequences):
            if seq.prompt_logprobs is not None:
                self._score(seq, step.starts[i], step.ends[i], int(firsts[i]))
        for seq, i in zip(step.receivers, step.sampled, strict=True):
            if seq.wants_embedding:
                row = ops.gather_rows(hidden, _ids([int(firsts[i + 1]) - 1], hidden.device))
                self._vectors.append((seq, _here(row, "float32")[0]))

    @staticmethod
    def are_wanted(step: Step) -> bool:
        prompts = step.sequences[step.num_decodes :]  # mostly none
        return bool(prompts) and any(seq.wants_embedding or seq.prompt_logprobs is not None for seq in prompts)

    def _score(self, seq: Sequence, start: int, end: int, first_row: int) -> None:
        """Scores the tokens that follow those at [start, end), whose hidden states begin at first_row. A token that was
        scored before the sequence was preempted is left out."""
        assert seq.prompt_logprobs is not None and seq.params.prompt_logprobs is not None
        row_of_prompt = first_row - start  # where the row of token 0 would be
        start, end = max(start, len(seq.prompt_logprobs) - 1), min(end, seq.num_prompt_tokens - 1)
        most, num_best = self._most[0], min(seq.params.prompt_logprobs, self._most[1])
        for at in range(start, end, most):
            stop = min(at + most, end)
            logits = self._logits_of(np.arange(row_of_prompt + at, row_of_prompt + stop, dtype=np.int32))
            targets = _ids(seq.prompt[at + 1 : stop + 1], self._hidden.device)
            ids, logprobs = ops.token_logprobs(logits, targets, num_best)
            self._scores.append((seq, _here(ids), _here(logprobs)))

    def report(self) -> None:
        for seq, ids, logprobs in self._scores:
            assert seq.prompt_logprobs is not None
            for row_ids, row in zip(ids.tolist(), logprobs.tolist(), strict=True):
                seq.prompt_logprobs.append(dict(zip(row_ids, row, strict=True)))
        for seq, vector in self._vectors:
            seq.embedding = vector


def _ids(values: object, device: str) -> Tensor:
    return ops.asarray(np.array(values, np.int32), device=device)


def _here(tensor: Tensor, dtype: str | None = None) -> np.ndarray:
    return ops.asarray(tensor, dtype, "cpu").numpy()
