"""A request, the updates that its caller gets, where they wait, and the outputs that are made of them."""

from __future__ import annotations

import itertools
import threading
import time
from array import array
from collections.abc import Callable, Iterable
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from queue import SimpleQueue
from struct import Struct
from typing import Any, Protocol, cast

import numpy as np

from ..outputs import CompletionOutput, EmbeddingOutput, RequestMetrics, RequestOutput
from ..sampling_params import RequestOutputKind, SamplingParams
from ..scheduling.sequence import Sequence
from ..text.tokenizer import Tokenizer


@dataclass(slots=True, eq=False)
class Update:
    """What is new of a request after a step: plain data, which another process could get as well.

    A step makes updates for hundreds of readers. One object for each of them keeps the step short, and Python's garbage
    collector away: objects that live through a collection in a step count as old, and a collection of old objects looks
    at all that the process has, which takes 25 ms and more. So new tokens are bytes, which it does not look at.
    """

    key: int  # of the request: Request.key
    index: int  # which of its answers this is of
    token_ids: bytes  # int32; the new ones
    text: str | None  # the new one; None: the reader makes it of the tokens
    logprobs: list[dict[int, float]] | None  # of the new tokens, where they are asked for
    cumulative_logprob: float
    finish_reason: str | None
    stop_reason: int | str | None
    is_last: bool  # whether the request has no later update
    error: Exception | None  # of the request
    # Of the whole request, in seconds of time.perf_counter().
    time: float
    scheduled_time: float | None
    first_token_time: float | None
    num_preemptions: int
    num_cached: int
    prompt_logprobs: list[dict[int, float] | None] | None
    embedding: np.ndarray | None
    weight_version: int | str = 0
    others: tuple[Update, ...] = ()  # of other answers after the same step


class Receiver(Protocol):
    """What gets the updates of a request. A function that put() returns is called soon, once for many of them: it wakes
    readers for which that takes long."""

    def put(self, item: Any, /) -> Callable[[], None] | None: ...


_keys = itertools.count()
_one_id = Struct("i").pack


@dataclass(slots=True, weakref_slot=True, eq=False)
class Request:
    """A request. Each answer that is sampled for it is a Sequence."""

    id: str
    params: SamplingParams
    receiver: Receiver
    kind: RequestOutputKind  # the params' own, or what the caller asks for
    tokenizer: Tokenizer
    is_streamed: bool = field(init=False)  # there are outputs before the last one
    key: int = field(default_factory=_keys.__next__)  # which no other request has; ids may be used again
    # For the engine's thread, once it is submitted.
    sequences: list[Sequence] = field(default_factory=list)
    num_ended: int = 0
    error: Exception | None = None  # why the request or one of its answers failed
    # For the caller, who calls output().
    prompt: str | None = None  # its text, if it was given as one
    token_ids: Iterable[int] = ()  # of the prompt
    start_time: float = 0.0  # when the caller asked
    normalizes: bool | None = None  # whether its vector gets the length 1; None: it asks for tokens
    # Of cumulative outputs, by answer.
    _so_far: dict[int, tuple[list[int], list[str], list[dict[int, float]]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # Which answers are the best is known only at the end.
        is_whole = self.kind is RequestOutputKind.FINAL_ONLY or self.params.num_sequences > self.params.n
        self.is_streamed = not is_whole

    # --- in the engine's thread

    @property
    def is_finished(self) -> bool:
        return self.num_ended == len(self.sequences)

    def update(self, sequences: list[Sequence], weight_version: int | str = 0) -> Update:
        """What is new of these sequences, or of all at the end of a request that is not streamed."""
        all_of_it, is_last, now = self.sequences, self.is_finished, time.perf_counter()
        num_preemptions, first_token_time = all_of_it[0].num_preemptions, all_of_it[0].first_token_time
        for seq in all_of_it:  # an answer that failed before may not have been sent yet
            self.error = self.error or seq.error
        if len(all_of_it) > 1:
            num_preemptions = sum(each.num_preemptions for each in all_of_it)
            times = [each.first_token_time for each in all_of_it if each.first_token_time is not None]
            first_token_time = min(times, default=None)
        if is_last:
            now = max(each.finish_time or now for each in all_of_it)
        of_all = is_last, now, num_preemptions, first_token_time, weight_version
        first, *others = [self._update(seq, *of_all) for seq in sequences]
        if others:
            first.others = tuple(others)
        return first

    def _update(
        self, seq: Sequence, is_last: bool, now: float, num_preemptions: int, first_token_time: float | None,
        weight_version: int | str,
    ) -> Update:  # fmt: skip
        first, text, detokenizer = self.sequences[0], None, seq.detokenizer
        if detokenizer is not None:
            if seq.finish_reason is not None:
                detokenizer.finish()
            text = detokenizer.text
        tokens = seq.new_tokens
        is_one = len(tokens) == seq.num_sent + 1
        new = _one_id(tokens[-1]) if is_one else array("i", tokens[seq.num_sent :]).tobytes()
        logprobs = None if self.params.logprobs is None else seq.logprobs[seq.num_sent :]
        # Arguments by position: names take twice the time.
        return Update(
            self.key, seq.index, new, text, logprobs, seq.cumulative_logprob, seq.finish_reason,
            seq.stop_reason, is_last, self.error, now, first.first_scheduled_time, first_token_time,
            num_preemptions, max(first.num_cached, 0), first.prompt_logprobs, first.embedding, weight_version,
        )  # fmt: skip

    @staticmethod
    def mark_sent(sequences: list[Sequence]) -> None:
        """The receiver has the update of these sequences."""
        for seq in sequences:
            seq.num_sent, seq.is_end_sent = len(seq.new_tokens), seq.finish_reason is not None
            if seq.detokenizer is not None:
                seq.detokenizer.mark_sent()

    # --- in the caller's thread

    def prepare_text(self) -> None:
        """Gives a detokenizer to sequences whose text is needed before their end, and turns bad_words into tokens."""
        params, tokenizer = self.params, self.tokenizer
        if (params.stop or params.bad_words) and not tokenizer.exists:
            name, texts = ("stop", params.stop) if params.stop else ("bad_words", params.bad_words)
            raise ValueError(f"{name} is {list(texts)!r} but {tokenizer.path} is missing: there is no text")
        bad_words = tokenizer.encode_words(params.bad_words) if params.bad_words else []
        skips = params.skip_special_tokens
        needs_text = params.stop or (self.is_streamed and params.detokenize and tokenizer.exists)
        for seq in self.sequences:
            seq.bad_words = bad_words
            if needs_text:
                seq.detokenizer = tokenizer.detokenizer(
                    tuple(params.stop), params.include_stop_str_in_output, skips, self.continues_text
                )

    @property
    def continues_text(self) -> bool:
        """A text goes on in its answer, and so does the last message of a chat that asks for it. Token ids, those of
        other chats among them, have an answer that begins a text."""
        return self.prompt is not None

    @property
    def prompt_token_ids(self) -> list[int]:
        """One list for all outputs, made for the first of them: 144,000 ids take 1 ms, no step waits for that."""
        if not isinstance(self.token_ids, list):
            self.token_ids = list(self.token_ids)
        return self.token_ids

    def output(self, update: Update) -> RequestOutput | EmbeddingOutput:
        """What the caller gets after this update. Call it in the order of the updates, in one thread at a time."""
        updates = (update, *update.others)
        if self.normalizes is not None:
            vector, error = update.embedding, update.error
            if vector is None:
                vector, error = np.empty(0, np.float32), error or CancelledError("the request was aborted")
            elif self.normalizes and error is None:
                vector = vector / np.linalg.norm(vector)
            return EmbeddingOutput(
                self.id, self.prompt, self.prompt_token_ids, vector, error, update.num_cached, update.weight_version
            )
        if not self.is_streamed:
            answers = [self._whole_answer(each, index) for index, each in enumerate(self._best(updates))]
        elif self.kind is RequestOutputKind.DELTA:
            answers = [self._answer(each, _ids(each), each.text, each.logprobs) for each in updates]
        else:
            answers = [self._cumulative_answer(each) for each in updates]
        start, first, scheduled = self.start_time, update.first_token_time, update.scheduled_time
        # Arguments by position, here and below: names take twice the time.
        metrics = RequestMetrics(
            None if first is None else first - start, update.time - start,
            None if scheduled is None else scheduled - start, update.num_preemptions,
        )  # fmt: skip
        return RequestOutput(
            self.id, self.prompt, self.prompt_token_ids, update.prompt_logprobs, answers, update.is_last,
            update.error, update.num_cached, metrics, update.weight_version,
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
        if self.params.num_sequences == self.params.n:
            return updates
        failed = "error", "abort"  # only where there are too few others
        best_first = sorted(updates, key=lambda each: (each.finish_reason in failed, -each.cumulative_logprob))
        return best_first[: self.params.n]

    def _whole_answer(self, update: Update, index: int) -> CompletionOutput:
        params, ids, text = self.params, _ids(update), update.text
        if text is None and params.detokenize and self.tokenizer.exists:
            is_hidden = update.finish_reason == "stop" and not params.include_stop_str_in_output
            shown = ids[:-1] if is_hidden else ids
            skips = params.skip_special_tokens
            text = self.tokenizer.decode(shown, skip_special_tokens=skips, goes_on=self.continues_text)
        answer = self._answer(update, ids, text, update.logprobs)
        answer.index = index
        return answer


class Mailbox:
    """Where updates of requests made by add_request() wait for step(). Any thread may add requests and receive."""

    def __init__(self) -> None:
        self._updates: SimpleQueue[Update] = SimpleQueue()
        # By Request.key; single operations of a dict are atomic.
        self._requests: dict[int, Request] = {}
        self._expected: dict[int, None] = {}  # a set: which have updates to come
        self._lock = threading.Lock()  # of the thread that waits

    def expect(self, request: Request) -> None:
        """Its updates come here, the last of them for sure."""
        self._requests[request.key], self._expected[request.key] = request, None

    def expect_no_more(self, key: int) -> None:
        self._expected.pop(key, None)
        self._requests.pop(key, None)

    @property
    def expects_anything(self) -> bool:
        return bool(self._expected) or not self._updates.empty()

    def put(self, update: Update) -> None:
        self._updates.put(update)
        if update.is_last:  # nobody waits for it, even if an interrupt ends the receive() that has it
            self._expected.pop(update.key, None)

    def receive(self) -> list[RequestOutput]:
        """The outputs of all updates that are there, of which there is one at least unless nothing is expected. Who
        comes second waits for the first, because it may take the last there is."""
        with self._lock:
            outputs: list[RequestOutput] = []
            while not outputs and self.expects_anything:
                self._receive(self._updates.get(), outputs)
                while not self._updates.empty():
                    self._receive(self._updates.get(), outputs)
            return outputs

    def _receive(self, update: Update, outputs: list[RequestOutput]) -> None:
        request = self._requests.get(update.key)
        if update.is_last:  # put() may not have come to it yet, and nothing would follow
            self.expect_no_more(update.key)
        if request is not None:  # else add_request() was interrupted: nobody knows of the request
            outputs.append(cast(RequestOutput, request.output(update)))


def _ids(update: Update) -> list[int]:
    return array("i", update.token_ids).tolist()
