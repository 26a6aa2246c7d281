"""Outputs of requests, and statistics of an engine."""

from __future__ import annotations

import pickle
import traceback
from collections import deque
from dataclasses import dataclass, field, replace
from html import escape

import numpy as np

from .traffic import Traffic


# These three are not frozen: one of each is made for every streamed token, and frozen ones take three times as long.
@dataclass(slots=True)
class RequestMetrics:
    """Times of a request, in seconds since the call that made it.

    Args:
        time_to_first_token: None until there is one
        total_time: until this output
        queue_time: until the first step that computed tokens of the request; None until then
        num_preemptions: how often it gave way to others
    """

    time_to_first_token: float | None
    total_time: float
    queue_time: float | None
    num_preemptions: int


@dataclass(slots=True)
class CompletionOutput:
    """One answer, or its new part.

    Args:
        index: which of the request's n answers
        text: without the stop string, unless that is asked for; None without a tokenizer
        token_ids: as sampled, the end-of-sequence token included
        cumulative_logprob: the sum over all tokens so far; None unless SamplingParams.logprobs asks
        logprobs: for each of token_ids its log probability and those of the most likely tokens, by id: natural
            logarithms of the softmax of the logits before all options. None unless SamplingParams.logprobs asks
        finish_reason: "stop", "length", "abort" or "error"; None: more tokens come
        stop_reason: the token of stop_token_ids or the stop string that ended the answer
    """

    index: int
    text: str | None
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None
    stop_reason: int | str | None


@dataclass(slots=True)
class RequestOutput:
    """The output of a finished request or, where it is streamed, of one on its way.

    text, token_ids, logprobs and finish_reason are those of the first answer.

    Args:
        request_id: that of add_request(), or a number
        prompt: the text; None where token ids were given
        prompt_token_ids: the prompt as token ids
        prompt_logprobs: for each token of the prompt but the first (None) what CompletionOutput.logprobs has for new
            ones; None unless SamplingParams.prompt_logprobs asks
        outputs: all n answers; where the request is streamed, those with new tokens
        finished: whether this is the last output
        error: why this request failed; others go on
        num_cached_tokens: prompt tokens found in the prefix cache at the first admission
        metrics: times
        weight_version: of the weights that computed the last token: see Engine.update_weights
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, float] | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    error: Exception | None
    num_cached_tokens: int
    metrics: RequestMetrics
    weight_version: int | str = 0

    @property
    def text(self) -> str | None:
        return self.outputs[0].text

    @property
    def token_ids(self) -> list[int]:
        return self.outputs[0].token_ids

    @property
    def logprobs(self) -> list[dict[int, float]] | None:
        return self.outputs[0].logprobs

    @property
    def finish_reason(self) -> str | None:
        return self.outputs[0].finish_reason

    def _repr_html_(self) -> str:
        """A table of the answers, for a notebook."""
        prompt = self.prompt if self.prompt is not None else f"{len(self.prompt_token_ids)} token ids"
        rows = "".join(
            f"<tr><td>{one.index}</td><td style='text-align:left'><pre>{escape(str(one.text))}</pre></td>"
            f"<td>{len(one.token_ids)}</td><td>{escape(str(one.finish_reason))}</td></tr>"
            for one in self.outputs
        )
        error = f"<p><b>{escape(type(self.error).__name__)}</b>: {escape(str(self.error))}</p>" if self.error else ""
        return (
            f"<b>{escape(self.request_id)}</b>: <pre>{escape(prompt)}</pre>{error}"
            f"<table><tr><th>index</th><th>text</th><th>tokens</th><th>end</th></tr>{rows}</table>"
        )


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """The vector of a text: the last hidden state of its last token. See LLM.embed.

    `embedding` is float32 [hidden_size], and empty where there is an `error`, which is a CancelledError of
    concurrent.futures where the request was aborted. The rest is as in RequestOutput.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: np.ndarray
    error: Exception | None
    num_cached_tokens: int
    weight_version: int | str = 0


@dataclass(slots=True)
class EngineCounters:
    """Sums over the life of an engine. A step that computes any part of a prompt counts as a prefill step.

    Args:
        num_steps: all steps
        prefill_tokens, prefill_seconds: tokens of prompts, or computed again after a preemption, in prefill steps
        decode_tokens, decode_seconds: tokens sampled in the other steps
        host_seconds: planning steps and taking results on the host, without launches and waits
        num_drafts: speculation: how often a request had guesses in a step
        num_draft_tokens, num_accepted_tokens: all guesses, and those that were right
        peak_used_blocks: the most pages in use
        peak_shared_blocks: the most pages that two or more sequences used at once
    """

    num_steps: int = 0
    prefill_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_tokens: int = 0
    decode_seconds: float = 0.0
    host_seconds: float = 0.0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    peak_used_blocks: int = 0
    peak_shared_blocks: int = 0

    def copy(self) -> EngineCounters:
        return replace(self)


WINDOW = 4096  # the percentiles are of so many last answers
PERCENTILES = (50, 90, 99)


def percentiles(values: deque[float]) -> dict[str, float]:
    """p50, p90 and p99; empty without values."""
    if not values:
        return {}
    return {f"p{p}": float(value) for p, value in zip(PERCENTILES, np.percentile(values, PERCENTILES), strict=True)}


@dataclass(frozen=True, slots=True)
class EngineStats:
    """A snapshot of an engine. Times are in seconds: percentiles p50, p90, p99 of the last 4,096 answers.

    Args:
        num_running, num_waiting: answers that hold pages, and that wait
        num_finished, num_preemptions: since the start
        counters: sums since the start
        pool: see BlockManager.stats()
        time_to_first_token, queue_time: since the call that made the request
        time_per_token: of the tokens after the first
        traffic: sums and histograms since the start
    """

    num_running: int
    num_waiting: int
    num_finished: int
    num_preemptions: int
    counters: EngineCounters
    pool: dict[str, int]
    time_to_first_token: dict[str, float]
    time_per_token: dict[str, float]
    queue_time: dict[str, float]
    traffic: Traffic = field(default_factory=Traffic)

    def _repr_html_(self) -> str:
        """The figures as a table, for a notebook."""

        def row(name: str, text: str) -> str:
            return f"<tr><th style='text-align:left'>{name}</th><td style='text-align:left'>{text}</td></tr>"

        def times(values: dict[str, float]) -> str:
            return ", ".join(f"{name} {seconds * 1e3:,.1f} ms" for name, seconds in values.items()) or "none yet"

        pool = self.pool
        return (
            "<table>"
            + row("answers", f"{self.num_running} run, {self.num_waiting} wait, {self.num_finished:,} finished")
            + row("pages", f"{pool['used']:,} used, {pool['cached']:,} cached, {pool['free']:,} free")
            + row("prefix cache", f"{pool['hit_tokens']:,} of {pool['lookup_tokens']:,} prompt tokens found")
            + row("preemptions", f"{self.num_preemptions:,}")
            + row("time to first token", times(self.time_to_first_token))
            + row("time per token", times(self.time_per_token))
            + row("time in the queue", times(self.queue_time))
            + "</table>"
        )


def portable(error: BaseException) -> Exception:
    """The error, or one that says the same where it cannot be pickled. Its traceback stays behind."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # whatever the class of the error raises
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error if isinstance(error, Exception) else RuntimeError(f"{type(error).__name__}: {error}")


TRACEBACK = "Traceback (most recent call last)"  # as Python's traceback.format_exception() writes it


def without_frames(error: Exception) -> Exception:
    """The error without its traceback, whose frames would keep the engine's memory as long as somebody has the error.
    The errors that led to it lose theirs, too. The text of the traceback becomes a note. One that is raised again and
    again has the first text alone."""
    has_note = any(TRACEBACK in note for note in getattr(error, "__notes__", ()))
    if error.__traceback__ is not None and not has_note:
        error.add_note("".join(traceback.format_exception(error)))
    seen, left = set[int](), list[BaseException | None]([error])
    while left:
        each = left.pop()
        if each is not None and id(each) not in seen:  # after `raise error from error` it is its own cause
            seen.add(id(each))
            each.__traceback__ = None
            left += each.__cause__, each.__context__
            left += each.exceptions if isinstance(each, BaseExceptionGroup) else ()
    return error
