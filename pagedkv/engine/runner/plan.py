"""What all ranks must know to make their runners (make.py), the sizes of steps among it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from pagedkv import ops
from pagedkv.models.lora import LoraSize
from pagedkv.models.spec import Spec
from pagedkv.ops import Communicator
from pagedkv.parallel.watch import STEP_SECONDS

JOIN_SECONDS = 9.0  # in which ranks whose processes run must have found each other


@dataclass(frozen=True, kw_only=True)
class RunnerPlan:
    """Plain data, the same for all ranks.

    spec: of the whole model; devices: by rank; batch_sizes: of steps that only decode, in order; lora: what adapters
    there may be, if any; max_guesses: of a sequence in a step.
    """

    folder: Path
    spec: Spec
    is_dummy: bool
    devices: tuple[str, ...]
    dtype: str
    kv_cache_dtype: str
    block_size: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    batch_sizes: list[int]
    enforce_eager: bool
    lora: LoraSize | None
    batch_invariant: bool
    max_guesses: int = 0

    @property
    def num_ranks(self) -> int:
        return len(self.devices)

    @property
    def max_num_rows(self) -> int:
        """Tokens that are sampled in a step, at most."""
        return max_rows(self.max_num_seqs, self.max_num_batched_tokens, self.max_guesses)

    def row_sizes(self, device: str) -> list[int]:
        """What the tokens of a step that only decodes, with guesses, are padded to; batch_sizes are without guesses."""
        most = self.max_num_rows if self.max_guesses else 0
        if device == "cpu" or not most:
            return list(range(1, most + 1))
        sizes = {2, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192}
        return sorted(size for size in sizes if size < most) + [most]

    def communicator(self, rank: int, fd: int) -> Communicator:
        device = self.devices[rank]
        return Communicator(rank, self.num_ranks, fd, device, timeout=STEP_SECONDS, join_timeout=JOIN_SECONDS)


def devices_of_ranks(device: str, num_ranks: int) -> tuple[str, ...]:
    """The first one's, and the GPUs behind it."""
    if device == "cpu" or num_ranks == 1:
        return (device,) * num_ranks
    first, count = int(device.partition(":")[2]), ops.build_info()["cuda_devices"]
    if first + num_ranks > count:
        raise ValueError(f"tensor_parallel_size is {num_ranks} but from {device} on there are {count - first} GPUs")
    return tuple(f"cuda:{index}" for index in range(first, first + num_ranks))


# --- the sizes of steps that only decode: each has a graph on a GPU


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
