"""The table of cosines and sines that qk_norm_rope_store reads.

Rounded to float32 where transformers' code rounds: at position 3,000 one unit in the last place of a frequency is
0.0001 rad, and the models were trained with the rounded ones.
"""

from __future__ import annotations

import math

import numpy as np

from .config import Rope


def inverse_frequencies(rope: Rope, head_dim: int) -> np.ndarray:
    """float32 [head_dim / 2]: the angle by which pair i turns from one position to the next."""
    exponents = (np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)).astype(np.float64)
    periods = (rope.theta**exponents).astype(np.float32)
    frequencies: np.ndarray = 1 / periods
    if rope.type == "linear":
        frequencies = frequencies / np.float32(rope.factor)
    elif rope.type == "yarn":
        kept = _yarn_kept(rope, head_dim)
        frequencies = 1 / (np.float32(rope.factor) * periods) * (1 - kept) + frequencies * kept
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


def cos_sin_table(rope: Rope, head_dim: int, num_positions: int) -> np.ndarray:
    """float32 [num_positions, head_dim]: the cosines of every pair, then the sines."""
    angles = np.arange(num_positions, dtype=np.float32)[:, None] * inverse_frequencies(rope, head_dim)
    return np.concatenate([np.cos(angles), np.sin(angles)], axis=1) * np.float32(rope.attention_factor)
