"""The arrays of a step: how they lie in memory, and what the model gets of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv import Tensor
from pagedkv.models.qwen3 import Batch

ALIGN = 64  # bytes, to which each array of a step is aligned


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The arrays of a step on the device. The next step overwrites them."""

    batch: Batch  # token ids may be negative: -1 - r is the token in row r of the step before
    last_tokens: Tensor | None  # [num_rows] tokens after which one is sampled; None: all
    temperatures: Tensor  # [num_rows] float32
    seeds: Tensor  # [num_rows] int64
    positions: Tensor  # [num_rows] of the tokens to be sampled
    needs_logits: bool  # whether logits are written before anything is sampled


class Arrays:
    """The arrays of a step side by side in one piece of bytes, so that one copy brings all of them to the device.

    num_tokens None: a step that only decodes, one token per sequence, which needs fewer arrays.
    """

    def __init__(self, memory: np.ndarray | Tensor, num_tokens: int | None, num_seqs: int, num_rows: int) -> None:
        self._memory, self.num_bytes = memory, 0
        is_decode = num_tokens is None
        num_tokens = num_seqs if num_tokens is None else num_tokens
        self.seeds = self._array(num_rows, "int64")
        self.temperatures = self._array(num_rows, "float32")
        self.token_ids = self._array(num_tokens, "int32")
        self.positions = self._array(num_tokens, "int32")
        self.slot_mapping = self._array(num_tokens, "int32")
        self.context_lens = self._array(num_seqs, "int32")
        self.cu_seqlens_q: Any = None if is_decode else self._array(num_seqs + 1, "int32")
        self.last_tokens: Any = None if is_decode else self._array(num_rows, "int32")
        # The position of the next token is the length of the context.
        self.next_positions = self.context_lens if is_decode else self._array(num_rows, "int32")

    def _array(self, count: int, dtype: str) -> Any:
        start = -(-self.num_bytes // ALIGN) * ALIGN
        self.num_bytes = start + count * (8 if dtype == "int64" else 4)
        part = self._memory[start : self.num_bytes]
        return part.view(-1, dtype) if isinstance(part, Tensor) else part.view(dtype)

    def inputs(
        self, block_tables: Any, max_seqlen_q: int, plans: dict[tuple[int, int], Tensor], *, needs_logits: bool = False
    ) -> StepInputs:
        batch = Batch(
            self.token_ids, self.positions, self.slot_mapping, block_tables, self.context_lens, self.cu_seqlens_q,
            max_seqlen_q, plans,
        )  # fmt: skip
        numbers = self.temperatures, self.seeds, self.next_positions
        return StepInputs(batch, self.last_tokens, *numbers, needs_logits)
