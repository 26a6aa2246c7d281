"""How many sequences run, and how many tokens a step computes, where the user does not say."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.models.config import Qwen3Config
from pagedkv.models.qwen3 import Buffers
from pagedkv.models.weights import ITEM_BYTES


@dataclass(frozen=True)
class StepSize:
    max_num_seqs: int
    max_num_batched_tokens: int

    def num_bytes(self, config: Qwen3Config, dtype: str) -> int:
        """Of the model's buffers and of the logits: nearly all of the memory that grows with a step."""
        buffers = self.max_num_batched_tokens * sum(Buffers.sizes(config)) * ITEM_BYTES[dtype]
        return buffers + self.max_num_seqs * config.vocab_size * ITEM_BYTES["float32"]


GPU = StepSize(256, 16384)
CPU = StepSize(64, 2048)
MOST_OF_GPU = 8  # a step's memory times this is at most a GPU's


def step_size(
    num_seqs: int | None, num_tokens: int | None, config: Qwen3Config, dtype: str, gpu_bytes: int | None
) -> StepSize:
    """What is given, filled up from the defaults of a GPU with so many bytes, or of the CPU (None). A GPU for which its
    own are too large gets the CPU's."""
    size = _filled_up(num_seqs, num_tokens, CPU)
    if gpu_bytes is not None:
        large = _filled_up(num_seqs, num_tokens, GPU)
        if large.num_bytes(config, dtype) * MOST_OF_GPU <= gpu_bytes:
            size = large
    return size


def _filled_up(num_seqs: int | None, num_tokens: int | None, default: StepSize) -> StepSize:
    """A default gives way to what is given: every sequence that runs may decode a token in a step."""
    if num_seqs is None:
        num_seqs = min(default.max_num_seqs, num_tokens or default.max_num_seqs)
    if num_tokens is None:
        num_tokens = max(default.max_num_batched_tokens, num_seqs)
    return StepSize(num_seqs, num_tokens)
