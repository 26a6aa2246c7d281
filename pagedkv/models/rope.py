"""Rotary embedding: what config.json says of it, and the table of cosines and sines that qk_norm_rope_store reads.

The table is rounded to float32 where transformers' code rounds: at position 3,000 one unit in the last place of a
frequency is 0.0001 rad, and the models were trained with the rounded ones.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .config_keys import check_keys, flag, number

DEFAULT_THETA = 10000.0
# The keys of each type, besides rope_type (older: type) and rope_theta.
KEYS = {
    "default": (),
    "linear": ("factor",),
    "yarn": (
        "factor", "original_max_position_embeddings", "attention_factor", "attn_factor", "beta_fast", "beta_slow",
        "mscale", "mscale_all_dim", "truncate",
    ),
    "llama3": ("factor", "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"),
}  # fmt: skip
NEUTRAL = {"partial_rotary_factor": (1,), "extrapolation_factor": (1,), "apply_yarn_scaling": (True,)}


@dataclass(frozen=True)
class Rope:
    """Rotary embedding: the angle of pair i at position p is p * inv_freq[i]; attention_factor scales cos and sin."""

    type: str = "default"
    theta: float = DEFAULT_THETA
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0


def parse_rope(raw: Mapping[str, Any], max_position_embeddings: int, head_dim: int) -> Rope:
    """Of config.json. Raises ValueError for numbers of which no table can be made."""
    rope = _parse(raw, max_position_embeddings)
    try:
        with np.errstate(divide="raise", over="raise", invalid="raise"):
            inverse_frequencies(rope, head_dim) * np.float32(2**31) * np.float32(rope.attention_factor)
    except (ArithmeticError, ValueError) as error:
        raise ValueError(f"the rotary embedding is no number at some position ({error}): {rope}") from None
    return rope


def _parse(raw: Mapping[str, Any], max_position_embeddings: int) -> Rope:
    """transformers 5 writes rope_parameters with everything in it, 4 wrote rope_theta beside
    rope_scaling. Where both are there, rope_scaling counts, as it does in transformers 5."""
    name = "rope_scaling" if raw.get("rope_scaling") else "rope_parameters"
    scaling = raw.get(name) or {}
    if not isinstance(scaling, Mapping):
        raise ValueError(f"{name} is {scaling!r} but must be an object")
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    if kind not in KEYS:
        raise NotImplementedError(f"rope type {kind!r}; supported are {', '.join(KEYS)}")
    check_keys(scaling, ("rope_type", "type", "rope_theta", *KEYS[kind]), NEUTRAL, where=f"{name}.")
    theta, where = _theta(raw, scaling), f"{name}."
    if kind == "default":
        return Rope(theta=theta)
    original = number(scaling, "original_max_position_embeddings", max_position_embeddings, where)
    if kind == "llama3":
        return _llama3(scaling, theta, int(original), where)
    default = max_position_embeddings / original if kind == "yarn" else None
    factor = number(scaling, "factor", default, where)
    _check_factor(factor)
    if kind == "linear":
        return Rope("linear", theta, factor)
    return Rope(
        "yarn",
        theta,
        factor,
        int(original),
        number(scaling, "beta_fast", 32.0, where),
        number(scaling, "beta_slow", 1.0, where),
        _yarn_attention_factor(scaling, factor, where),
        flag(scaling, "truncate", True, where),
    )


def _llama3(scaling: Mapping[str, Any], theta: float, original: int, where: str) -> Rope:
    """transformers, too, has no factors of its own where the file lacks them."""
    names = "factor", "low_freq_factor", "high_freq_factor"
    factor, low, high = (number(scaling, each, where=where) for each in names)
    _check_factor(factor)
    if low >= high:
        raise ValueError(f"low_freq_factor is {low} and high_freq_factor is {high} but 0 < low < high must hold")
    return Rope("llama3", theta, factor, original, low_freq_factor=low, high_freq_factor=high)


def _check_factor(factor: float) -> None:
    if factor < 1:
        raise ValueError(f"the rope scaling factor is {factor} but must be at least 1")


def _theta(raw: Mapping[str, Any], scaling: Mapping[str, Any]) -> float:
    """That of the object which counts, else that beside it. transformers reads no other place; the model's own theta,
    where it stands in an object that does not count, would be lost."""
    theta = raw.get("rope_theta") if scaling.get("rope_theta") is None else scaling["rope_theta"]
    other = (raw.get("rope_parameters") or {}).get("rope_theta")
    if theta is None and other not in (None, DEFAULT_THETA):
        raise ValueError(f"rope_scaling has no rope_theta but rope_parameters has {other}: write it into rope_scaling")
    return number({"rope_theta": theta}, "rope_theta", DEFAULT_THETA)


def _yarn_attention_factor(scaling: Mapping[str, Any], factor: float, where: str) -> float:
    """What cos and sin are multiplied by (YaRN, section 3.4: sqrt(1/t) = 0.1 ln(s) + 1), unless the file says.

    attn_factor multiplies it: with 0.8782488562869419, as in DeepSeek-R1-0528-Qwen3-8B, and a factor of 4 nothing is
    scaled."""

    def temperature(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0

    names = "attention_factor", "attn_factor"
    given, more = (None if scaling.get(name) is None else number(scaling, name, where=where) for name in names)
    if given is not None and more is not None:
        raise ValueError(f"attention_factor is {given} and attn_factor is {more}: only one of them may be there")
    if given is not None:
        return given
    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        above, below = (temperature(number(scaling, name, where=where)) for name in ("mscale", "mscale_all_dim"))
        scale = above / below
    else:
        scale = temperature(1.0)
    return scale * (1.0 if more is None else more)


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """float32 [head_dim / 2]: the angle by which pair i turns from one position to the next."""
    exponents = (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)).astype(np.float64)
    periods = (np.float64(np.float32(rope.theta)) ** exponents).astype(np.float32)
    frequencies: np.ndarray = 1 / periods
    if rope.type == "linear":
        frequencies = frequencies / np.float32(rope.factor)
    elif rope.type == "yarn":
        kept = _yarn_kept(rope, head_dim)
        frequencies = 1 / (np.float32(rope.factor) * periods) * (1 - kept) + frequencies * kept
    elif rope.type == "llama3":
        frequencies = _llama3_frequencies(rope, frequencies)
    return frequencies


def _yarn_kept(rope: Rope, head_dim: int) -> np.ndarray:
    """YaRN (arXiv 2309.00071, section 3.2): 1 for pairs that turn often within the original length, which keep their
    frequency, 0 for those that hardly turn, which are slowed down by the factor, and a linear ramp between the two."""

    def pair_with_turns(turns: float) -> float:
        """The (fractional) pair that makes so many turns over the original length."""
        longest = rope.original_max_position_embeddings / (turns * 2 * math.pi)
        return head_dim * math.log(longest) / (2 * math.log(rope.theta))

    low, high = pair_with_turns(rope.beta_fast), pair_with_turns(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # a ramp of no length is a step
    ramp = (np.arange(head_dim // 2, dtype=np.float32) - np.float32(low)) / np.float32(high - low)
    kept: np.ndarray = 1 - np.clip(ramp, 0, 1)
    return kept


def _llama3_frequencies(rope: Rope, frequencies: np.ndarray) -> np.ndarray:
    """Llama 3.1's: pairs that turn at least high_freq_factor times within the original length keep their frequency,
    those that turn less than low_freq_factor times are slowed down by the factor, and there is a ramp between them."""
    original, low, high = rope.original_max_position_embeddings, rope.low_freq_factor, rope.high_freq_factor
    factor = np.float32(rope.factor)
    wavelengths = np.float32(2 * math.pi) / frequencies
    kept = (np.float32(original) / wavelengths - np.float32(low)) / np.float32(high - low)
    ramp = (1 - kept) * frequencies / factor + kept * frequencies
    is_slow, is_fast = wavelengths > np.float32(original / low), wavelengths < np.float32(original / high)
    scaled: np.ndarray = np.where(is_slow, frequencies / factor, np.where(is_fast, frequencies, ramp))
    return scaled


def cos_sin_table(rope: Rope, head_dim: int, num_positions: int) -> np.ndarray:
    """float32 [num_positions, head_dim]: the cosines of every pair, then the sines."""
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inverse_frequencies(rope, head_dim)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * np.float32(rope.attention_factor)
