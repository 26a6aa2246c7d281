"""Log probabilities of tokens as JSON has them."""

from __future__ import annotations

from typing import Any

from .model import ServedModel

LEAST = -9999.0  # for tokens of probability zero: JSON has no infinity


def top_of(of_ids: dict[int, float]) -> list[tuple[int, float]]:
    """The most likely first."""
    ranked = sorted(of_ids.items(), key=lambda each: (-each[1], each[0]))
    return [(token, max(logprob, LEAST)) for token, logprob in ranked]


def chat_logprobs(
    model: ServedModel, token_ids: list[int], logprobs: list[dict[int, float]], count: int
) -> dict[str, Any]:
    """With so many of the most likely tokens at each place."""
    content = []
    for token, of_ids in zip(token_ids, logprobs, strict=True):
        ranked = top_of(of_ids)
        top = [_entry(model, *each) for each in ranked[:count]]
        content.append(_entry(model, token, dict(ranked)[token]) | {"top_logprobs": top})
    return {"content": content, "refusal": None}


def _entry(model: ServedModel, token: int, logprob: float) -> dict[str, Any]:
    own = model.token_bytes(token)
    return {"token": model.token_text(token), "logprob": logprob, "bytes": None if own is None else list(own)}
