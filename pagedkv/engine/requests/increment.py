"""What is new of a request after a step, and the output that its reader makes of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from ..outputs import CompletionOutput, EmbeddingOutput, RequestMetrics, RequestOutput
from ..scheduling.sequence import Sequence

if TYPE_CHECKING:
    from .request import Request


@dataclass(slots=True, eq=False)
class Increment:
    """Made by the thread that steps the engine; output() is for the reader's thread.

    A step has news for hundreds of readers at once. One object for each of them instead of six keeps the step short,
    and Python's garbage collector away: objects that live through a collection in a step count as old, and a collection
    of old objects looks at all that the process has, which takes 25 ms and more.

    What an increment refers to only grows: the tokens from `end` on, and the text from `text_end` on, belong to later
    increments. So the thread that steps copies nothing, however long the answer is.
    """

    request: Request
    seq: Sequence
    start: int  # the first new one, in seq.new_tokens
    end: int
    # Of a streamed request with text: the new pieces of its detokenizer's text, [text_start, text_end); else -1
    text_start: int
    text_end: int
    cumulative_logprob: float
    has_ended: bool  # whether the sequence has
    is_last: bool  # whether the request has no later increment
    error: Exception | None  # of the request
    time: float
    others: tuple[Increment, ...] = ()  # of other answers after the same step

    def mark_told(self) -> None:
        """The receiver has it."""
        seq = self.seq
        seq.num_shown, seq.is_end_told = self.end, self.has_ended
        if seq.detokenizer is not None:
            seq.detokenizer.num_told = self.text_end
        for other in self.others:
            other.mark_told()

    def output(self) -> RequestOutput | EmbeddingOutput:
        # Arguments by position, here and below: names take twice the time.
        request, first = self.request, self.request.sequences[0]
        num_cached = max(first.num_cached, 0)
        if first.wants_embedding:
            vector = np.empty(0, np.float32) if first.embedding is None else first.embedding
            return EmbeddingOutput(
                request.id, request.prompt_text, request.prompt_token_ids, vector, self.error, num_cached
            )
        if request.is_followed:
            answers = [self._answer(), *[other._answer() for other in self.others]]
        else:
            answers = [_final_answer(request, seq, index) for index, seq in enumerate(request.best_sequences())]
        return RequestOutput(
            request.id, request.prompt_text, request.prompt_token_ids, first.prompt_logprobs, answers, self.is_last,
            self.error, num_cached, self._metrics(),
        )  # fmt: skip

    def _answer(self) -> CompletionOutput:
        seq, start, end, logprobs, cumulative = self.seq, self.start, self.end, None, None
        text = None
        if self.text_end >= 0 and seq.detokenizer is not None:
            if self.text_start:
                text = seq.detokenizer.text_between(self.text_start, self.text_end)
            else:
                text = seq.detokenizer.text_until(self.text_end)
        if self.request.params.logprobs is not None:
            logprobs, cumulative = seq.logprobs[start:end], self.cumulative_logprob
        finish_reason, stop_reason = (seq.finish_reason, seq.stop_reason) if self.has_ended else (None, None)
        return CompletionOutput(
            seq.index, text, seq.new_tokens[start:end], cumulative, logprobs, finish_reason, stop_reason
        )

    def _metrics(self) -> RequestMetrics:
        start, first, end, num_preemptions = self.request.start_time, None, 0.0, 0
        for seq in self.request.sequences:
            if seq.first_token_time is not None and (first is None or seq.first_token_time < first):
                first = seq.first_token_time
            end = max(end, seq.finish_time or self.time)
            num_preemptions += seq.num_preemptions
        time_to_first_token = None if first is None else first - start
        scheduled = self.request.sequences[0].first_scheduled_time
        queue_time = None if scheduled is None else scheduled - start
        return RequestMetrics(
            time_to_first_token, (end if self.is_last else self.time) - start, queue_time, num_preemptions
        )


def _final_answer(request: Request, seq: Sequence, index: int) -> CompletionOutput:
    """The whole answer."""
    has_logprobs = request.params.logprobs is not None
    return CompletionOutput(
        index=index,
        text=request.text_of(seq),
        token_ids=seq.new_tokens[:],
        cumulative_logprob=seq.cumulative_logprob if has_logprobs else None,
        logprobs=seq.logprobs[:] if has_logprobs else None,
        finish_reason=seq.finish_reason,
        stop_reason=seq.stop_reason,
    )
