"""What all ranks must know to make their runners (make.py)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pagedkv import ops
from pagedkv.models.lora import LoraSize
from pagedkv.models.spec import Spec
from pagedkv.ops import Communicator
from pagedkv.parallel.watch import STEP_SECONDS

from .batch_sizes import max_rows, row_sizes

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
        """Of the tokens of a step that only decodes, with guesses; batch_sizes are those without."""
        return row_sizes(device, self.max_num_rows) if self.max_guesses else []

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
