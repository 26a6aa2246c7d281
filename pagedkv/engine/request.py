"""A request, and what its caller is told of it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from .arguments import Prompt
from .bad_words import BadWords
from .detokenizer import Detokenizer
from .outputs import CompletionOutput, EmbeddingOutput, RequestMetrics, RequestOutput
from .sampling_params import RequestOutputKind, SamplingParams
from .sequence import Sequence
from .tokenizer import Tokenizer


class Receiver(Protocol):
    """What takes the outputs of a request: a Mailbox, or what an event loop reads."""

    def put(self, item: Any, /) -> None: ...


@dataclass(slots=True, weakref_slot=True, eq=False)
class Request:
    """Its answers are sequences, one for each that is sampled."""

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

    @property
    def prompt_token_ids(self) -> list[int]:
        """One list for all outputs, made for the first: 144,000 ids take 1 ms, which no first step waits for."""
        if not isinstance(self.token_ids, list):
            self.token_ids = list(self.token_ids)
        return self.token_ids

    @property
    def is_followed(self) -> bool:
        """Whether there are outputs before the last one. The best of several are known at the end only."""
        return self.output_kind is not RequestOutputKind.FINAL_ONLY and self.params.num_sequences == self.params.n

    @property
    def is_finished(self) -> bool:
        return self.num_ended == len(self.sequences)

    def prepare_text(self) -> None:
        """Sequences whose text is needed before their end get a detokenizer, and what their bad_words are in tokens."""
        params, has_text = self.params, self.tokenizer.exists
        for name, texts in (("stop", params.stop), ("bad_words", params.bad_words)):
            if texts and not has_text:
                raise ValueError(f"{name} is {list(texts)!r} but {self.tokenizer.path} is missing: there is no text")
        for seq in self.sequences:
            if params.bad_words:
                seq.bad_words = BadWords(params.bad_words, self.tokenizer)
            if params.stop or (self.is_followed and params.detokenize and has_text):
                seq.detokenizer = Detokenizer(
                    self.tokenizer,
                    skip_special_tokens=params.skip_special_tokens,
                    stop=tuple(params.stop),
                    include_stop_str_in_output=params.include_stop_str_in_output,
                )

    def final_output(self) -> RequestOutput | EmbeddingOutput:
        """Of a request whose sequences have all ended."""
        if self.sequences[0].wants_embedding:
            return self._embedding_output()
        best, params = self.sequences, self.params
        if params.num_sequences > params.n:
            best = sorted(best, key=lambda seq: -seq.cumulative_logprob)[: params.n]
        outputs = [self._completion(seq, index, 0) for index, seq in enumerate(best)]
        return self._output(outputs, is_finished=True)

    def new_output(self, sequences: list[Sequence]) -> RequestOutput:
        """What is new of these sequences, or all of them so far, as output_kind says."""
        is_delta = self.output_kind is RequestOutputKind.DELTA
        outputs = [self._completion(seq, seq.index, seq.num_shown if is_delta else 0) for seq in sequences]
        for seq in sequences:
            seq.num_shown = len(seq.new_tokens)
        return self._output(outputs, is_finished=self.is_finished)

    def _completion(self, seq: Sequence, index: int, start: int) -> CompletionOutput:
        """From the sequence's new token number `start` on."""
        return CompletionOutput(
            index=index,
            text=self._text(seq),
            token_ids=seq.new_tokens[start:],
            cumulative_logprob=None if self.params.logprobs is None else seq.cumulative_logprob,
            logprobs=None if self.params.logprobs is None else seq.logprobs[start:],
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
        )

    def _text(self, seq: Sequence) -> str | None:
        if not self.params.detokenize or not self.tokenizer.exists:
            return None
        if seq.detokenizer is None:  # nobody needed the text before the end
            is_hidden = seq.finish_reason == "stop" and not self.params.include_stop_str_in_output
            token_ids = seq.new_tokens[:-1] if is_hidden else seq.new_tokens
            return self.tokenizer.decode(token_ids, skip_special_tokens=self.params.skip_special_tokens)
        if seq.finish_reason is not None and not isinstance(seq.stop_reason, str):
            seq.detokenizer.finish()
        return seq.detokenizer.new_text() if self.output_kind is RequestOutputKind.DELTA else seq.detokenizer.text

    def _output(self, outputs: list[CompletionOutput], *, is_finished: bool) -> RequestOutput:
        first = self.sequences[0]
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt if isinstance(self.prompt, str) else None,
            prompt_token_ids=self.prompt_token_ids,
            prompt_logprobs=first.prompt_logprobs,
            outputs=outputs,
            finished=is_finished,
            error=next((seq.error for seq in self.sequences if seq.error is not None), None),
            num_cached_tokens=max(first.num_cached, 0),
            metrics=self._metrics(),
        )

    def _embedding_output(self) -> EmbeddingOutput:
        seq = self.sequences[0]
        vector = np.empty(0, np.float32) if seq.embedding is None else seq.embedding
        prompt = self.prompt if isinstance(self.prompt, str) else None
        return EmbeddingOutput(self.id, prompt, self.prompt_token_ids, vector, seq.error, max(seq.num_cached, 0))

    def _metrics(self) -> RequestMetrics:
        start, first, num_preemptions, end = self.start_time, None, 0, 0.0
        for seq in self.sequences:
            if seq.first_token_time is not None and (first is None or seq.first_token_time < first):
                first = seq.first_token_time
            num_preemptions += seq.num_preemptions
            end = max(end, seq.finish_time or time.perf_counter())
        scheduled = self.sequences[0].first_scheduled_time
        return RequestMetrics(
            time_to_first_token=None if first is None else first - start,
            total_time=end - start,
            queue_time=None if scheduled is None else scheduled - start,
            num_preemptions=num_preemptions,
        )
