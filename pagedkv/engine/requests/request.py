"""A request, its answers, and what is new of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..sampling.bad_words import BadWords
from ..sampling_params import RequestOutputKind, SamplingParams
from ..scheduling.sequence import Sequence
from ..text.detokenizer import Detokenizer
from ..text.tokenizer import Tokenizer
from .increment import Increment
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
                seq.bad_words = BadWords(params.bad_words, self.tokenizer)
            if params.stop or (self.is_followed and params.detokenize and has_text):
                seq.detokenizer = Detokenizer(
                    self.tokenizer,
                    skip_special_tokens=params.skip_special_tokens,
                    stop=tuple(params.stop),
                    include_stop_str_in_output=params.include_stop_str_in_output,
                )

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
