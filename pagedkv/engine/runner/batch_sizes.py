"""The sizes of steps that only decode: each has a graph on a GPU."""

from __future__ import annotations

from collections.abc import Iterable

from pagedkv import ops
from pagedkv.models.spec import Spec


def batch_sizes_of(device: str, max_num_seqs: int, spec: Spec) -> list[int]:
    """Those of steps that only decode."""
    if device == "cpu":
        return list(range(1, max_num_seqs + 1))
    return batch_sizes(max_num_seqs, filling_sizes(device, spec.kv_layers[0].num_kv_heads))


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


MOST_ROWS = 256  # that are sampled in a step with guesses, unless more sequences run: their logits take memory


def max_rows(max_num_seqs: int, max_num_batched_tokens: int, max_guesses: int) -> int:
    """Tokens sampled in a step with up to so many guesses for each sequence."""
    with_guesses = min(max_num_seqs * (1 + max_guesses), max_num_batched_tokens, MOST_ROWS)
    return max(max_num_seqs, with_guesses)


def row_sizes(device: str, most: int) -> list[int]:
    """Those that the tokens of a step that only decodes, with guesses, are padded to."""
    if device == "cpu":
        return list(range(1, most + 1))
    sizes = {2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192}
    return sorted(size for size in sizes if size < most) + [most]
