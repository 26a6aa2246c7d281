"""CUDA graphs of steps that only decode, each from the embedding to the sampled token.

Such a step is padded to the next of some batch sizes, for which there are graphs from the start. A padding row has no
keys and writes none. Steps whose rows ask for more than a temperature and a seed have a graph that ends with the
logits, and steps with adapters and steps with guesses have graphs of their own; these are captured after the first such
step of their size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from pagedkv import Graph
from pagedkv.models.spec import Batch

from .plan import RunnerPlan

GRAPH_BYTES = 8 << 20  # the most device memory that two graphs of a batch size take: with logits and without
SCRATCH_BYTES = 36 << 20  # what all graphs share: a piece of scratch memory (csrc/cuda/scratch.cu)


class Key(NamedTuple):
    """What steps with the same graph have in common."""

    num_tokens: int
    num_seqs: int  # 0: there are no guesses, and so a token of each
    needs_logits: bool
    has_adapters: bool


class StepGraphs:
    """They point to the arrays of a step and to the pool."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._graphs: dict[Key, Graph] = {}

    def find(self, batch: Batch) -> Graph | None:
        return self._graphs.get(_key(batch))

    def capture_missing(self, batch: Batch, compute: Callable[[Batch], None]) -> bool:
        """Captures what compute() launches for a step that has run before, if it has no graph yet. Returns whether it
        did. Nothing is computed."""
        key = _key(batch)
        if key in self._graphs:
            return False
        graph = Graph()
        with graph.capture(self._stream):
            compute(batch)
        self._graphs[key] = graph
        return True

    def by_batch_size(self) -> dict[int, Graph]:
        """Those of plain steps."""
        return {key.num_tokens: graph for key, graph in self._graphs.items() if key[1:] == PLAIN}


PLAIN = 0, False, False  # without guesses, logits and adapters


def is_plain(batch: Batch) -> bool:
    return _key(batch)[1:] == PLAIN


def _key(batch: Batch) -> Key:
    num_seqs = 0 if batch.cu_seqlens_q is None else len(batch.context_lens)
    return Key(len(batch.token_ids), num_seqs, batch.needs_logits, batch.has_adapters)


def graph_bytes(plan: RunnerPlan) -> int:
    """The most device memory that they take."""
    if plan.enforce_eager:
        return 0
    return len(plan.batch_sizes) * (1 if plan.lora is None else 2) * GRAPH_BYTES + SCRATCH_BYTES
