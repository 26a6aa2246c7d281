"""A request as its caller sees it: the outputs that come of its updates."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np

from ..outputs import CompletionOutput, EmbeddingOutput, RequestMetrics, RequestOutput
from ..sampling_params import RequestOutputKind
from ..text.tokenizer import Tokenizer
from .request import Request, Update


class Reply:
    """Made by EngineClient.prepare(). Call output() in the order of the updates, in one thread at a time.

    Args:
        prompt: its text, if it was given as one
        token_ids: those of the prompt
        start_time: when the caller asked
        normalizes: whether its vector gets the length 1; None: it asks for tokens
    """

    __slots__ = (
        "_kind", "_normalizes", "_so_far", "_start_time", "_token_ids", "_tokenizer", "prompt", "request"
    )  # fmt: skip

    def __init__(
        self,
        request: Request,
        prompt: str | None,
        token_ids: Iterable[int],
        kind: RequestOutputKind,
        tokenizer: Tokenizer,
        start_time: float,
        normalizes: bool | None = None,
    ) -> None:
        self.request, self.prompt, self._token_ids, self._kind = request, prompt, token_ids, kind
        self._tokenizer, self._start_time, self._normalizes = tokenizer, start_time, normalizes
        # Of cumulative outputs, by answer.
        self._so_far: dict[int, tuple[list[int], list[str], list[dict[int, float]]]] = {}

    @property
    def prompt_token_ids(self) -> list[int]:
        """One list for all outputs, made for the first of them: 144,000 ids take 1 ms, no step waits for that."""
        if not isinstance(self._token_ids, list):
            self._token_ids = list(self._token_ids)
        return self._token_ids

    def output(self, update: Update) -> RequestOutput | EmbeddingOutput:
        """What the caller gets after this update."""
        request, updates = self.request, (update, *update.others)
        if self._normalizes is not None:
            vector = np.empty(0, np.float32) if update.embedding is None else update.embedding
            if self._normalizes and update.error is None:
                vector = vector / np.linalg.norm(vector)
            return EmbeddingOutput(
                request.id, self.prompt, self.prompt_token_ids, vector, update.error, update.num_cached
            )
        if not request.is_streamed:
            answers = [self._whole_answer(each, index) for index, each in enumerate(self._best(updates))]
        elif self._kind is RequestOutputKind.DELTA:
            answers = [self._answer(each, _ids(each), each.text, each.logprobs) for each in updates]
        else:
            answers = [self._cumulative_answer(each) for each in updates]
        start, first, scheduled = self._start_time, update.first_token_time, update.scheduled_time
        # Arguments by position, here and below: names take twice the time.
        metrics = RequestMetrics(
            None if first is None else first - start, update.time - start,
            None if scheduled is None else scheduled - start, update.num_preemptions,
        )  # fmt: skip
        return RequestOutput(
            request.id, self.prompt, self.prompt_token_ids, update.prompt_logprobs, answers, update.is_last,
            update.error, update.num_cached, metrics,
        )  # fmt: skip

    def _answer(
        self, update: Update, ids: list[int], text: str | None, logprobs: list[dict[int, float]] | None
    ) -> CompletionOutput:
        cumulative = None if logprobs is None else update.cumulative_logprob
        return CompletionOutput(
            update.index, text, ids, cumulative, logprobs, update.finish_reason, update.stop_reason
        )

    def _cumulative_answer(self, update: Update) -> CompletionOutput:
        ids, texts, logprobs = self._so_far.setdefault(update.index, ([], [""], []))
        ids += _ids(update)
        if update.text is not None:
            texts[0] += update.text
        if update.logprobs is not None:
            logprobs += update.logprobs
        text = None if update.text is None else texts[0]
        return self._answer(update, ids[:], text, None if update.logprobs is None else logprobs[:])

    def _best(self, updates: tuple[Update, ...]) -> Iterable[Update]:
        """The n answers that a finished request shows."""
        params = self.request.params
        if params.num_sequences == params.n:
            return updates
        failed = "error", "abort"  # only where there are too few others
        best_first = sorted(updates, key=lambda each: (each.finish_reason in failed, -each.cumulative_logprob))
        return best_first[: params.n]

    def _whole_answer(self, update: Update, index: int) -> CompletionOutput:
        params, ids, text = self.request.params, _ids(update), update.text
        if text is None and params.detokenize and self._tokenizer.exists:
            is_hidden = update.finish_reason == "stop" and not params.include_stop_str_in_output
            shown = ids[:-1] if is_hidden else ids
            text = self._tokenizer.decode(shown, skip_special_tokens=params.skip_special_tokens)
        answer = self._answer(update, ids, text, update.logprobs)
        answer.index = index
        return answer


def _ids(update: Update) -> list[int]:
    return array("i", update.token_ids).tolist()
