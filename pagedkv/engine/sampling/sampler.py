"""From hidden states to tokens: logits, their edits, the sampling, and the log probabilities.

Where no row asks for more than a temperature and a seed, the head and the sampler are one operation, which need not
write logits. Otherwise the logits are written, and what the rows ask for follows (see SamplingOptions and LogitEdits).
The host must know the tokens that masks depend on: wait_for_tokens() waits for those of the step before, while the
device computes the logits of this one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pagedkv import Tensor, ops
from pagedkv.models.spec import Model

from ..sampling_params import MAX_LOGPROBS
from ..scheduling.sequence import Sequence
from ..scheduling.step import Step, StepInputs
from .options import LogitEdits, SamplingOptions

Best = tuple[np.ndarray, np.ndarray]  # ids and log probabilities, [num_rows, 1 + n]


class Sampler:
    """Samples the rows of one step at a time."""

    def __init__(self, model: Model, vocab_size: int, device: str, *, max_num_seqs: int, max_model_len: int) -> None:
        self._model, self._device, self._max_num_seqs = model, device, max_num_seqs
        self.logits = ops.empty((max_num_seqs, vocab_size), "float32", device)
        self.sampled = ops.empty(max_num_seqs, "int32", device)  # of the last launch, by row
        # Copies for the host, used in turn. The arrays are made now, because numpy() waits for what writes the memory.
        self._known = [self._host_memory(max_num_seqs, "int32") for _ in range(2)]
        self._known_arrays = [memory.numpy() for memory in self._known]
        self._options = SamplingOptions(max_num_seqs, max_model_len, vocab_size, device)
        self._edits = LogitEdits(max_num_seqs, vocab_size, device)
        self._unedited: Tensor | None = None  # logits, where some are edited and their log probabilities asked for
        self._logits_as_they_are = self.logits
        self._best: list[list[Tensor]] = []  # ids and log probabilities: on the device, then two for the host, in turn
        self._best_arrays: list[list[np.ndarray]] = []  # the latter two as arrays

    def _host_memory(self, count: int, dtype: str) -> Tensor:
        return ops.empty(count, dtype, pinned=self._device != "cpu")

    def set_rows(self, sequences: list[Sequence]) -> None:
        """The batch is another one: these sequences are sampled, in this order."""
        self._options.set_rows(sequences)
        self._edits.set_rows(sequences)

    def forget(self) -> None:
        """Steps on their way are lost: no sequence continues from them."""
        self._options.forget()

    @property
    def needs_logits(self) -> bool:
        """Whether sampling needs logits in memory. The CPU always does: there a row that fails must not stop others."""
        return self._options.need_logits or self._edits.are_there or self._device == "cpu"

    def compute(self, hidden: Tensor, inputs: StepInputs) -> None:
        """Computes the logits where the step needs them, otherwise its tokens."""
        num_rows = len(inputs.temperatures)
        if not num_rows:
            return
        logits = self.logits[:num_rows]
        if inputs.needs_logits:
            self._model.logits(hidden, out=logits)
        else:
            numbers = inputs.temperatures, inputs.seeds, inputs.positions
            self._model.sample(hidden, *numbers, logits=logits, out=self.sampled[:num_rows])

    def edit(self, wait_for_tokens: Callable[[], None]) -> None:
        """Edits the logits as the rows ask. Log probabilities are those of the logits before the edits."""
        num_rows = self._options.num_rows
        self._logits_as_they_are = self.logits
        if not num_rows or not self._edits.are_there:
            return
        if self._edits.need_tokens:
            wait_for_tokens()
        if self._options.num_logprobs is not None:
            if self._unedited is None:
                self._unedited = ops.empty(self.logits.shape, "float32", self._device)
            self._logits_as_they_are = self._unedited
            self._unedited[:num_rows].copy_(self.logits[:num_rows])
        self._edits.apply(self.logits[:num_rows])

    def sample(self, inputs: StepInputs) -> None:
        """Samples `logits` into `sampled`. A row that fails (NaN, nothing finite) gets -1 and does not stop others."""

        def sample(start: int, end: int) -> None:
            given = self.logits, inputs.temperatures, inputs.seeds, inputs.positions
            options = {
                name: value if name == "counts" else value[start:end] for name, value in self._options.arguments.items()
            }
            ops.sample(*(each[start:end] for each in given), out=self.sampled[start:end], **options)

        num_rows = len(inputs.temperatures) if self._options.num_rows is None else self._options.num_rows
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
        if self._options.num_logprobs is None or not num_rows:
            return None
        if not self._best:
            size = self._max_num_seqs * (1 + MAX_LOGPROBS)
            of_device = [ops.empty(size, dtype, self._device) for dtype in ("int32", "float32")]
            of_host = [[self._host_memory(size, dtype) for dtype in ("int32", "float32")] for _ in range(2)]
            self._best_arrays = [[memory.numpy() for memory in pair] for pair in of_host]
            self._best = [of_device, *of_host]  # last: there may be no memory
        shape = num_rows, 1 + self._options.num_logprobs
        there, here = (
            [flat[: shape[0] * shape[1]].view(shape) for flat in pair] for pair in (self._best[0], self._best[1 + turn])
        )
        logits, sampled = self._logits_as_they_are[:num_rows], self.sampled[:num_rows]
        ops.token_logprobs(logits, sampled, self._options.num_logprobs, out_ids=there[0], out=there[1])
        for to, of in zip(here, there, strict=True):
            to.copy_(of)
        ids, logprobs = (array[: shape[0] * shape[1]].reshape(shape) for array in self._best_arrays[turn])
        return ids, logprobs


class PromptOutputs:
    """What requests ask of their prompts' own tokens: log probabilities, or the last hidden state as an embedding.

    Few requests ask for it. A step with such a request computes the hidden states of all its tokens, and waits for
    them. report() gives each sequence its own.
    """

    def __init__(self, step: Step, hidden: Tensor, model: Model, logits: Tensor) -> None:
        """hidden: [num_tokens, hidden_size] of the step's tokens; logits: memory for some rows of them."""
        self._model, self._hidden, self._logits = model, hidden, logits
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
        prompts = step.sequences[step.num_decodes :]
        return any(seq.wants_embedding or seq.prompt_logprobs is not None for seq in prompts)

    def _score(self, seq: Sequence, start: int, end: int, first_row: int) -> None:
        """Scores the tokens that follow those at [start, end), whose hidden states begin at first_row. A token that was
        scored before the sequence was preempted is left out."""
        assert seq.prompt_logprobs is not None and seq.params.prompt_logprobs is not None
        row_of_prompt = first_row - start  # where the row of token 0 would be
        start, end = max(start, len(seq.prompt_logprobs) - 1), min(end, seq.num_prompt_tokens - 1)
        num_best = min(seq.params.prompt_logprobs, self._logits.shape[1])
        for at in range(start, end, len(self._logits)):
            stop = min(at + len(self._logits), end)
            rows = _ids(range(row_of_prompt + at, row_of_prompt + stop), self._hidden.device)
            logits = self._logits[: stop - at]
            self._model.logits(ops.gather_rows(self._hidden, rows), out=logits)
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
