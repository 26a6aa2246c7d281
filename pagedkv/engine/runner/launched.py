"""A step on its way, and what is known of its tokens when they arrive."""

from __future__ import annotations

import numpy as np

from pagedkv import Event

from ..sampling.prompt_outputs import PromptOutputs
from ..scheduling.step import Step


class Launched:
    def __init__(
        self,
        sampled: np.ndarray,
        event: Event | None,
        best: tuple[np.ndarray, np.ndarray] | None,
        prompt_outputs: PromptOutputs | None,
    ) -> None:
        self._sampled, self._event, self._prompt_outputs = sampled, event, prompt_outputs
        # Where a row asks for them: ids and log probabilities [num_rows, 1 + n] of the sampled token and the n best
        # ones, valid when the tokens have arrived; n is the most that a row asks for.
        self._best = best

    def tokens(self) -> list[int]:
        """The sampled tokens in the order of Step.sampled; -1 where the logits gave none. Waits for them."""
        if self._event is not None:
            self._event.synchronize()
        tokens: list[int] = self._sampled.tolist()
        return tokens

    def report(self, step: Step) -> None:
        """Hands what else is known of the tokens to their sequences, after tokens() has waited."""
        if self._prompt_outputs is not None:
            self._prompt_outputs.report()
        if self._best is None:
            return
        for seq, row_ids, row in zip(step.receivers, self._best[0].tolist(), self._best[1].tolist(), strict=True):
            if seq.num_logprobs is not None and seq.finish_reason is None and row_ids[0] >= 0:
                end = 1 + seq.num_logprobs
                seq.logprobs.append(dict(zip(row_ids[:end], row[:end], strict=True)))
                seq.cumulative_logprob += row[0]
