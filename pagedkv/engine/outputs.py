"""What a request gives back."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds, from the call of generate()."""

    time_to_first_token: float | None
    total_time: float
    num_preemptions: int


@dataclass(frozen=True, slots=True)
class RequestOutput:
    prompt: str | None  # None where token ids were given
    prompt_token_ids: list[int]
    text: str | None  # without the end-of-sequence token; None where there is no tokenizer
    token_ids: list[int]  # as sampled, the end-of-sequence token included
    # Where SamplingParams.logprobs asks: for each of token_ids the natural log of its probability and those of the most
    # likely tokens, by id, of the softmax of the logits before all options.
    logprobs: list[dict[int, float]] | None
    finish_reason: str  # "stop", "length" or "error"
    error: Exception | None  # why this request, and only this one, failed
    num_cached_tokens: int  # tokens of the prompt that the prefix cache held at the first admission
    metrics: RequestMetrics


@dataclass(slots=True)
class EngineStats:
    """Sums over the life of an engine. A step that computes any part of a prompt counts as a prefill step."""

    num_steps: int = 0
    prefill_tokens: int = 0  # tokens computed in prefill steps that belong to prompts (or to recomputation)
    prefill_seconds: float = 0.0
    decode_tokens: int = 0  # tokens sampled in the other steps
    decode_seconds: float = 0.0
    host_seconds: float = 0.0  # scheduling and taking the results: all but ModelRunner.launch() and waiting for it
    peak_used_blocks: int = 0
    peak_shared_blocks: int = 0  # pages that two or more sequences used at a time

    def copy(self) -> EngineStats:
        return replace(self)
