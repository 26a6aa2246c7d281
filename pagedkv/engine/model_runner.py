"""A step's arrays, and the model run on them.

    launched = runner.launch(step)      # returns while a GPU still computes
    tokens = launched.tokens()          # waits; one token for each of step.sampled, -1 where the logits gave none

The next step may be launched before the tokens of this one are known: a decode whose token the host has not seen yet
reads it where this step's sampler left it. So the host may be one step behind the device, and no more than one: a
launch may be read until the second launch after it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

import pagedkv
from pagedkv import BlockManager, Tensor
from pagedkv.models.config import Qwen3Config
from pagedkv.models.qwen3 import Batch, Buffers, Qwen3

from .scheduler import Step
from .sequence import Sequence


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Views of arrays that the next step overwrites."""

    batch: Batch  # token ids may be negative: -1 - r is the token in row r of the step before
    last_tokens: np.ndarray  # [num_rows]: the batch's tokens whose successors are sampled
    temperatures: np.ndarray  # [num_rows] float32
    seeds: np.ndarray  # [num_rows] int64
    positions: np.ndarray  # [num_rows]: of the tokens to be sampled


class Launched:
    """A step on its way."""

    def __init__(self, sampled: np.ndarray) -> None:
        self._sampled = sampled

    def tokens(self) -> list[int]:
        """The sampled tokens in the order of Step.sampled; -1 where the logits gave none. Waits for them."""
        return self._sampled.tolist()


class ModelRunner:
    """Owns the KV cache and the buffers of a step, all allocated here and never in the loop."""

    def __init__(
        self,
        config: Qwen3Config,
        model: Qwen3,
        manager: BlockManager,
        *,
        dtype: str,
        device: str,
        max_num_seqs: int,
        max_num_batched_tokens: int,
    ) -> None:
        self.model, self.manager = model, manager
        self.num_behind = 0 if device == "cpu" else 1  # steps that the host launches before it asks for tokens
        page = (manager.num_blocks, manager.block_size, config.num_kv_heads, config.head_dim)
        self.caches = [
            (pagedkv.empty(page, dtype, device), pagedkv.empty(page, dtype, device)) for _ in range(config.num_layers)
        ]
        host_page = (manager.num_host_blocks, *page[1:])
        self.host_caches = [(pagedkv.empty(host_page, dtype), pagedkv.empty(host_page, dtype)) for _ in self.caches]
        self.buffers = Buffers.allocate(config, max_num_batched_tokens, dtype, device)
        self.last_hidden = pagedkv.empty((max_num_seqs, config.hidden_size), dtype, device)
        self.logits = pagedkv.empty((max_num_seqs, config.vocab_size), "float32", device)
        self.token_ids = np.zeros(max_num_batched_tokens, np.int32)
        self.temperatures = np.zeros(max_num_seqs, np.float32)
        self.seeds = np.zeros(max_num_seqs, np.int64)
        self.sampled = np.zeros(max_num_seqs, np.int32)  # of the last launch, by row
        self._rows: dict[int, int] = {}  # in which row of `sampled` a sequence's token is
        self._known = [np.zeros(max_num_seqs, np.int32) for _ in range(2)]  # what the host gets, in turn

    def launch(self, step: Step) -> Launched:
        """Starts the step. A token of a sequence that is not in Sequence.tokens yet is taken from the launch before."""
        self.move_pages(step)
        self.run(self.fill(step))
        self._rows = {step.sequences[i].id: row for row, i in enumerate(step.sampled)}
        self._known.reverse()
        known = self._known[0][: len(step.sampled)]
        known[:] = self.sampled[: len(step.sampled)]
        return Launched(known)

    def move_pages(self, step: Step) -> None:
        """Swaps and copies, before anything is computed."""
        caches = [cache for pair in self.caches for cache in pair]
        host_caches = [cache for pair in self.host_caches for cache in pair]
        if step.swap_out is not None:
            pagedkv.swap_blocks(caches, host_caches, step.swap_out)
        if step.swap_in is not None:
            pagedkv.swap_blocks(host_caches, caches, step.swap_in)
        if step.copies is not None and len(step.copies):
            pagedkv.copy_blocks(caches, step.copies)

    def fill(self, step: Step) -> StepInputs:
        """The step's arrays."""
        arrays = self.manager.prepare([seq.id for seq in step.sequences], step.starts, step.lengths)
        num_decodes, num_rows = step.num_decodes, len(step.sampled)
        end = num_decodes
        decodes = zip(step.sequences[:end], step.starts[:end], strict=True)
        self.token_ids[:end] = [self._token(seq, start) for seq, start in decodes]
        for i in range(num_decodes, len(step.sequences)):
            start, length = step.starts[i], step.lengths[i]
            self.token_ids[end : end + length] = step.sequences[i].tokens[start : start + length]
            end += length
        sampled = [step.sequences[i] for i in step.sampled]
        self.temperatures[:num_rows] = [seq.params.temperature for seq in sampled]
        self.seeds[:num_rows] = [seq.seed for seq in sampled]
        batch = Batch(
            token_ids=self.token_ids[:end],
            positions=arrays.positions,
            slot_mapping=arrays.slot_mapping,
            block_tables=arrays.block_tables,
            context_lens=arrays.context_lens,
            cu_seqlens_q=arrays.cu_seqlens_q,
            max_seqlen_q=arrays.max_seqlen_q,
        )
        return StepInputs(
            batch,
            arrays.cu_seqlens_q[1:][step.sampled] - 1,
            self.temperatures[:num_rows],
            self.seeds[:num_rows],
            arrays.context_lens[step.sampled],  # a sequence's next token lies behind its context
        )

    def _token(self, seq: Sequence, position: int) -> int:
        return seq.tokens[position] if position < len(seq.tokens) else -1 - self._rows[seq.id]

    def run(self, inputs: StepInputs) -> None:
        """Computes the step; its tokens are in `sampled` then."""
        ids = inputs.batch.token_ids
        unknown = ids < 0
        ids[unknown] = np.maximum(self.sampled[-1 - ids[unknown]], 0)  # -1: its request has failed, any token will do
        hidden = self.forward(inputs.batch)
        num_rows = len(inputs.last_tokens)
        if num_rows:
            rows = pagedkv.gather_rows(hidden, inputs.last_tokens, out=self.last_hidden[:num_rows])
            logits = self.model.logits(rows, out=self.logits[:num_rows])
            self._sample(logits, inputs)

    def _sample(self, logits: Tensor, inputs: StepInputs) -> None:
        """Into `sampled`; -1 for a row without a token (its logits hold NaN or nothing finite), which ends no other."""
        given = logits, inputs.temperatures, inputs.seeds, inputs.positions
        try:
            pagedkv.sample(*given, out=self.sampled[: len(logits)])
        except ValueError:  # it names the first such row; there may be more
            for i in range(len(logits)):
                try:
                    pagedkv.sample(*(each[i : i + 1] for each in given), out=self.sampled[i : i + 1])
                except ValueError:
                    self.sampled[i] = -1

    def forward(self, batch: Batch) -> Tensor:
        """Normed hidden states of all tokens of the batch [num_tokens, hidden_size]."""
        return self.model.forward(batch, self.caches, self.buffers.first(len(batch.token_ids)))
