"""A request, its answers, and what is new of them."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol

from .arguments import Prompt
from .bad_words import BadWords
from .detokenizer import Detokenizer
from .increment import Increment
from .sampling_params import RequestOutputKind, SamplingParams
from .sequence import Sequence
from .tokenizer import Tokenizer


class Receiver(Protocol):
    """What takes the Increments of a request: a Mailbox."""

    def put(self, item: Any, /) -> None: ...


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
        start = seq.num_shown if self.output_kind is RequestOutputKind.DELTA else 0
        seq.num_shown = len(seq.new_tokens)
        text = self._text_to_show(seq) if self.is_followed else None
        has_ended = seq.is_end_told = seq.finish_reason is not None
        return Increment(
            self, seq, start, seq.num_shown, text, seq.cumulative_logprob, has_ended, self.is_finished, self.error,
            time.perf_counter(),
        )  # fmt: skip

    def _text_to_show(self, seq: Sequence) -> str | None:
        """The new text, or all text so far, as output_kind says."""
        if seq.detokenizer is None or self.output_kind is not RequestOutputKind.DELTA:
            return self.text_of(seq)
        if seq.finish_reason is not None:
            seq.detokenizer.finish()
        return seq.detokenizer.new_text() if self.params.detokenize else None

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
