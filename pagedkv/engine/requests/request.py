"""A request, its answers, and what is new of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from ..outputs import CompletionOutput, EmbeddingOutput, RequestMetrics, RequestOutput
from ..sampling_params import RequestOutputKind, SamplingParams
from ..scheduling.sequence import Sequence
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import Tokenizer
from .prompts import Prompt


class Receiver(Protocol):
    """What takes the Increments of a request. A bell that put() returns is called soon, once for many of them: it wakes
    readers for which that takes long."""

    def put(self, item: Any, /) -> Callable[[], None] | None: ...


@dataclass(slots=True, weakref_slot=True, eq=False)
class Request:
    """A request. Each answer that is sampled for it is a Sequence."""

    id: str
    prompt: Prompt
    token_ids: Iterable[int]  # of the prompt
    params: SamplingParams
    receiver: Receiver
    output_kind: RequestOutputKind
    tokenizer: Tokenizer
    start_time: float
    sequences: list[Sequence] = field(default_factory=list)
    num_ended: int = 0
    error: Exception | None = None  # why the request or one of its answers failed
    is_followed: bool = field(init=False)  # streamed: there are outputs before the last one

    def __post_init__(self) -> None:
        # Which answers are the best is known only at the end.
        is_best_of = self.params.num_sequences > self.params.n
        self.is_followed = self.output_kind is not RequestOutputKind.FINAL_ONLY and not is_best_of

    @property
    def prompt_token_ids(self) -> list[int]:
        """One list for all outputs, made for the first of them: 144,000 ids take 1 ms, no step waits for that."""
        if not isinstance(self.token_ids, list):
            self.token_ids = list(self.token_ids)
        return self.token_ids

    @property
    def prompt_text(self) -> str | None:
        return self.prompt if isinstance(self.prompt, str) else None

    @property
    def is_finished(self) -> bool:
        return self.num_ended == len(self.sequences)

    def prepare_text(self) -> None:
        """Gives a detokenizer to sequences whose text is needed before their end, and turns bad_words into tokens."""
        params, has_text = self.params, self.tokenizer.exists
        for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
            if texts and not has_text:
                raise ValueError(f"{name} is {list(texts)!r} but {self.tokenizer.path} is missing: there is no text")
        for seq in self.sequences:
            if params.bad_words:
                seq.bad_words = self.tokenizer.encode_words(params.bad_words)
            if params.stop or (self.is_followed and params.detokenize and has_text):
                stream = self.tokenizer.text_stream(skip_special_tokens=params.skip_special_tokens)
                seq.detokenizer = Detokenizer(stream, tuple(params.stop), params.include_stop_str_in_output)

    def best_sequences(self) -> list[Sequence]:
        """The n answers that a finished request shows."""
        if self.params.num_sequences == self.params.n:
            return self.sequences
        failed = "error", "abort"  # only where there are too few others
        best_first = sorted(self.sequences, key=lambda seq: (seq.finish_reason in failed, -seq.cumulative_logprob))
        return best_first[: self.params.n]

    def note(self, sequences: list[Sequence]) -> Increment:
        """What is new of these sequences."""
        for seq in self.sequences:  # an answer that failed before may not have been told yet
            self.error = self.error or seq.error
        first = self._note(sequences[0])
        if len(sequences) > 1:
            first.others = tuple(map(self._note, sequences[1:]))
        return first

    def _note(self, seq: Sequence) -> Increment:
        is_delta = self.output_kind is RequestOutputKind.DELTA
        text_start, text_end, detokenizer = 0, -1, seq.detokenizer
        has_ended = seq.finish_reason is not None
        if self.is_followed and self.params.detokenize and detokenizer is not None:
            if has_ended:
                detokenizer.finish()
            text_start, text_end = detokenizer.num_told if is_delta else 0, detokenizer.num_pieces
        return Increment(
            self, seq, seq.num_shown if is_delta else 0, len(seq.new_tokens), text_start, text_end,
            seq.cumulative_logprob, has_ended, self.is_finished, self.error, time.perf_counter(),
        )  # fmt: skip

    def text_of(self, seq: Sequence) -> str | None:
        """All text of the sequence so far."""
        if not self.params.detokenize or not self.tokenizer.exists:
            return None
        if seq.detokenizer is not None:
            if seq.finish_reason is not None:
                seq.detokenizer.finish()
            return seq.detokenizer.text
        is_hidden = seq.finish_reason == "stop" and not self.params.include_stop_str_in_output
        token_ids = seq.new_tokens[:-1] if is_hidden else seq.new_tokens
        return self.tokenizer.decode(token_ids, skip_special_tokens=self.params.skip_special_tokens)


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
