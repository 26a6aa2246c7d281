"""What a request asks of its prompt's own tokens: their log probabilities, or the last hidden state as an embedding.

Few requests ask for it. A step with such a request computes the hidden states of all its tokens, and waits for them.
"""

from __future__ import annotations

import numpy as np

from pagedkv import Tensor, ops
from pagedkv.models.spec import Model

from ..scheduling.sequence import Sequence
from ..scheduling.step import Step


class PromptOutputs:
    """The prompt outputs of a step; report() gives each sequence its own."""

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
