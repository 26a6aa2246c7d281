"""A request in the engine's thread, and the updates that its caller gets."""

from __future__ import annotations

import itertools
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from struct import Struct
from typing import TYPE_CHECKING, Any, Protocol

from ..sampling_params import SamplingParams
from ..scheduling.sequence import Sequence

if TYPE_CHECKING:
    import numpy as np


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
    others: tuple[Update, ...] = ()  # of other answers after the same step


class Receiver(Protocol):
    """What takes the updates of a request. What put() returns is called soon, once for many of them: it
    wakes readers for which that takes long."""

    def put(self, item: Any, /) -> Callable[[], None] | None: ...


_keys = itertools.count()
_one_id = Struct("i").pack


@dataclass(slots=True, weakref_slot=True, eq=False)
class Request:
    """A request. Each answer that is sampled for it is a Sequence."""

    id: str
    params: SamplingParams
    receiver: Receiver
    is_streamed: bool  # there are outputs before the last one
    key: int = field(default_factory=_keys.__next__)  # which no other request has; ids may be used again
    sequences: list[Sequence] = field(default_factory=list)
    num_ended: int = 0
    error: Exception | None = None  # why the request or one of its answers failed

    @property
    def is_finished(self) -> bool:
        return self.num_ended == len(self.sequences)

    def update(self, sequences: list[Sequence]) -> Update:
        """What is new of these sequences, or of all at the end of a request that is not streamed."""
        for seq in self.sequences:  # an answer that failed before may not have been sent yet
            self.error = self.error or seq.error
        first, *others = [self._update(seq) for seq in sequences]
        if others:
            first.others = tuple(others)
        return first

    def _update(self, seq: Sequence) -> Update:
        first, text, detokenizer, is_last = self.sequences[0], None, seq.detokenizer, self.is_finished
        num_preemptions, first_token_time = seq.num_preemptions, seq.first_token_time
        if len(self.sequences) > 1:
            num_preemptions = sum(each.num_preemptions for each in self.sequences)
            times = [each.first_token_time for each in self.sequences if each.first_token_time is not None]
            first_token_time = min(times, default=None)
        now = time.perf_counter()
        if is_last:
            now = max(each.finish_time or now for each in self.sequences)
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
            num_preemptions, max(first.num_cached, 0), first.prompt_logprobs, first.embedding,
        )  # fmt: skip

    @staticmethod
    def mark_sent(sequences: list[Sequence]) -> None:
        """The receiver has the update of these sequences."""
        for seq in sequences:
            seq.num_sent, seq.is_end_sent = len(seq.new_tokens), seq.finish_reason is not None
            if seq.detokenizer is not None:
                seq.detokenizer.mark_sent()
