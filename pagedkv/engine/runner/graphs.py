"""CUDA graphs of steps that only decode.

Such a step is padded to the next of some batch sizes. Each size has a graph from the embedding to the sampled token. A
padding row has no keys and writes none. Steps whose rows ask for more than a temperature and a seed have a graph that
ends with the logits; it is captured after the first such step of its size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pagedkv import Graph, ops
from pagedkv.models.spec import Batch

GRAPH_BYTES = 8 << 20  # the most device memory that the two graphs of a batch size take
SCRATCH_BYTES = 36 << 20  # what all graphs share: a piece of scratch memory (csrc/cuda/scratch.cu)


class DecodeGraphs:
    """The graphs of one model runner, captured on its stream. They point to its arrays and to the pool."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._graphs: dict[tuple[int, bool], Graph] = {}  # by batch size, and whether it ends with the logits

    def find(self, num_rows: int, *, needs_logits: bool) -> Graph | None:
        """The graph of this batch size, if it was captured."""
        return self._graphs.get((num_rows, needs_logits))

    def capture(self, batch: Batch, compute: Callable[[Batch], None]) -> None:
        """Captures a step that only decodes and has run before. Nothing is computed."""
        graph = Graph()
        with graph.capture(self._stream):
            compute(batch)
        self._graphs[len(batch.token_ids), batch.needs_logits] = graph


def batch_sizes(max_num_seqs: int, filling: Iterable[int] = ()) -> list[int]:
    """The batch sizes that have graphs, those of filling_sizes among them. The last one is max_num_seqs."""
    sizes = {1, 2, 4, *range(8, 256, 8), *range(256, max_num_seqs, 32), *filling}
    return sorted(size for size in sizes if 0 < size < max_num_seqs) + [max_num_seqs]


def filling_sizes(device: str, num_kv_heads: int) -> list[int]:
    """The sequences whose KV heads fill the GPU when attention has one, two or four CTAs on a multiprocessor.

    One more begins another wave of CTAs, even if it is padding: 33 sequences of 8 heads, padded to 40, take up to 12 %
    longer on 132 multiprocessors (benchmarks/lab/decode/NOTES.md, #112).
    """
    return [ops.num_multiprocessors(device) * ctas // num_kv_heads for ctas in (1, 2, 4)]
