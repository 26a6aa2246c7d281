"""Outputs of requests, and statistics of an engine."""

from __future__ import annotations

import pickle
from collections import deque
from dataclasses import dataclass, field, replace
from html import escape

import numpy as np

from .traffic import Traffic


# These three are not frozen: one of each is made for every streamed token, and frozen ones take three times as long.
@dataclass(slots=True)
class RequestMetrics:
    """Seconds since the call that made the request."""

    time_to_first_token: float | None
    total_time: float  # until this output
    queue_time: float | None  # until the first step that computed tokens of it
    num_preemptions: int


@dataclass(slots=True)
class CompletionOutput:
    """One answer, or its new part."""

    index: int  # which of the request's n answers
    text: str | None  # without the stop string, unless that is asked for; None without a tokenizer
    token_ids: list[int]  # as sampled, the end-of-sequence token included
    cumulative_logprob: float | None  # the sum over all tokens so far, where SamplingParams.logprobs asks
    # Where SamplingParams.logprobs asks: for each of token_ids its log probability and those of the most likely tokens,
    # by id. They are natural logarithms of the softmax of the logits before all options.
    logprobs: list[dict[int, float]] | None
    finish_reason: str | None  # "stop", "length", "abort" or "error"; None: more tokens come
    stop_reason: int | str | None  # the token of stop_token_ids or the stop string that ended it


@dataclass(slots=True)
class RequestOutput:
    """The output of a finished request or, where it is streamed, of one on its way.

    text, token_ids, logprobs and finish_reason are those of the first answer.
    """

    request_id: str
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    # Where SamplingParams.prompt_logprobs asks: for each token of the prompt but the first (None) what
    # CompletionOutput.logprobs has for new ones.
    prompt_logprobs: list[dict[int, float] | None] | None
    outputs: list[CompletionOutput]  # all n; where the request is streamed, those with new tokens
    finished: bool
    error: Exception | None  # why this request failed; others go on
    num_cached_tokens: int  # prompt tokens found in the prefix cache at the first admission
    metrics: RequestMetrics
    weight_version: int | str = 0  # of the weights that the last token was computed with: see Engine.update_weights

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
    """The vector of a text: the last hidden state of its last token. See LLM.embed."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    embedding: np.ndarray  # float32 [hidden_size]; empty where there is an error
    error: Exception | None
    num_cached_tokens: int
    weight_version: int | str = 0  # as RequestOutput's


@dataclass(slots=True)
class EngineCounters:
    """Sums over the life of an engine. A step that computes any part of a prompt counts as a prefill step."""

    num_steps: int = 0
    prefill_tokens: int = 0  # of prompts, or computed again after a preemption, in prefill steps
    prefill_seconds: float = 0.0
    decode_tokens: int = 0  # tokens sampled in the other steps
    decode_seconds: float = 0.0
    host_seconds: float = 0.0  # of the host: planning steps and taking results, without launches and waits
    num_drafts: int = 0  # speculation: how often a request had guesses in a step, ...
    num_draft_tokens: int = 0  # ... all guesses, ...
    num_accepted_tokens: int = 0  # ... and those that were right
    peak_used_blocks: int = 0
    peak_shared_blocks: int = 0  # pages that two or more sequences used at once

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
    """A snapshot of an engine. Times are in seconds: percentiles p50, p90, p99 of the last 4,096 answers."""

    num_running: int  # answers that hold pages
    num_waiting: int
    num_finished: int  # since the start, and so are ...
    num_preemptions: int
    counters: EngineCounters
    pool: dict[str, int]  # see BlockManager.stats()
    time_to_first_token: dict[str, float]
    time_per_token: dict[str, float]  # of the tokens after the first
    queue_time: dict[str, float]
    traffic: Traffic = field(default_factory=Traffic)  # sums and histograms since the start

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
