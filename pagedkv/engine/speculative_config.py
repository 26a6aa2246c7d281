"""SpeculativeConfig: who guesses tokens, as plain data."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagedkv.checks import check_int

NAME = "speculative_config"
METHODS = ("suffix", "draft_model")
KEYS = ("method", "model", "num_speculative_tokens")
NUM_TOKENS = 7  # by default: with the newest one eight rows, which a decode's attention takes at once
MOST_TOKENS = 63


@dataclass(frozen=True)
class SpeculativeConfig:
    """vLLM's names. See EngineOptions."""

    method: str
    model: str | None = None
    num_speculative_tokens: int = NUM_TOKENS

    @classmethod
    def of(cls, value: object) -> SpeculativeConfig:
        """Of a dict, or of JSON. Raises for what is wrong in it."""
        if not isinstance(value, str):
            return cls(**_checked(value))
        try:
            given = json.loads(value)
        except (ValueError, RecursionError) as error:
            raise ValueError(f"{NAME} is {value!r} but must be JSON: {error}") from None
        try:
            return cls(**_checked(given))
        except TypeError as error:  # within a text, which is of the right type
            raise ValueError(str(error)) from None


def _checked(given: object) -> dict[str, Any]:
    if not isinstance(given, Mapping):
        raise TypeError(f"{NAME} is {given!r} but must be a dict or JSON of one")
    for key in given:
        if key not in KEYS:
            raise ValueError(f"{NAME} has {key!r} but may have {', '.join(KEYS[:-1])} and {KEYS[-1]}")
    checked, method, model = dict(given), given.get("method"), given.get("model")
    if method not in METHODS:
        raise ValueError(f"{NAME}['method'] is {method!r} but must be {' or '.join(METHODS)}")
    if method == "suffix" and model is not None:
        raise ValueError(f"{NAME}['model'] is {model!r} but the method 'suffix' has no model")
    if method == "draft_model":
        if model is None:
            raise ValueError(f"{NAME}['model'] is missing: the folder of a smaller model, or its name on the hub")
        if not isinstance(model, (str, os.PathLike)):
            raise TypeError(f"{NAME}['model'] is {model!r} but must be a folder, or a name on the Hugging Face hub")
        checked["model"] = os.fsdecode(model)
    count = given.get("num_speculative_tokens")
    name = f"{NAME}['num_speculative_tokens']"
    checked["num_speculative_tokens"] = NUM_TOKENS if count is None else check_int(name, count, 1, MOST_TOKENS)
    return checked
