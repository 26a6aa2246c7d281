"""What a rank must know to make its runner, and how the first one makes all of them."""

from __future__ import annotations

import logging
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from pagedkv import ops
from pagedkv.models.dummy import DummyCheckpoint
from pagedkv.models.lora import LoraSize
from pagedkv.models.places import Places
from pagedkv.models.registry import load_model
from pagedkv.models.spec import Spec
from pagedkv.models.weights import Checkpoint
from pagedkv.ops import Communicator, GroupError
from pagedkv.parallel.team import Team
from pagedkv.parallel.watch import OF_GROUP, STEP_SECONDS

from .batch_sizes import max_rows
from .model_runner import ModelRunner
from .step_memory import StepMemory

logger = logging.getLogger(__name__)

RANK = "pagedkv.engine.rank"  # the module that another rank's process runs
JOIN_SECONDS = 9.0  # in which ranks whose processes run must have found each other


@dataclass(frozen=True, kw_only=True)
class RunnerPlan:
    """Plain data, the same for all ranks. devices: by rank."""

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

    def make(
        self, rank: int = 0, comm: Communicator | None = None, team: Team | None = None
    ) -> tuple[ModelRunner, Checkpoint | DummyCheckpoint]:
        """The runner of a rank, and where its weights were from."""
        device, spec = self.devices[rank], self.spec
        if comm is not None:
            spec = spec.shard(rank, self.num_ranks)
        places = Places(device, self.dtype)
        where = self.dtype, device, spec.quantization, self.lora, comm, self.batch_invariant, places
        checkpoint = DummyCheckpoint(*where) if self.is_dummy else Checkpoint(self.folder, *where)
        with closing(checkpoint):
            model = load_model(spec, checkpoint, self.max_model_len)
        runner = ModelRunner(
            spec, model, kv_cache_dtype=self.kv_cache_dtype, device=device, block_size=self.block_size,
            max_num_seqs=self.max_num_seqs, max_num_batched_tokens=self.max_num_batched_tokens,
            max_model_len=self.max_model_len, enforce_eager=self.enforce_eager, has_adapters=self.lora is not None,
            max_guesses=self.max_guesses, sizes=self.batch_sizes, comm=comm, team=team, places=places,
        )  # fmt: skip
        return runner, checkpoint

    def make_all(self) -> tuple[ModelRunner, Checkpoint | DummyCheckpoint]:
        """Those of all ranks, the others' in processes of their own. What is returned is the first one's."""
        for rank in range(self.num_ranks):
            self.spec.shard(rank, self.num_ranks)  # raises for what cannot be split
        is_cpu = self.devices[0] == "cpu"
        num_rows = max_rows(self.max_num_seqs, self.max_num_batched_tokens, self.max_guesses)
        most = self.max_num_seqs, num_rows, self.max_num_batched_tokens, self.max_model_len, self.block_size
        threads = max(1, ops.get_num_threads() // self.num_ranks) if is_cpu else None
        team = Team(RANK, self.num_ranks, StepMemory.most_bytes(*most), threads)
        try:
            team.answers()  # all are there
            team.ask("set_up", self)
            comm = self.communicator(0, team.comm_fd)
            if comm.memory == "host" and not is_cpu:
                logger.warning(
                    "the GPUs %s do not reach each other's memory (`nvidia-smi topo -p2p r` shows which): what they "
                    "send each other goes through the host's memory, which is slower", ", ".join(self.devices),
                )  # fmt: skip
            team.watch(comm.abort)
            made = self.make(0, comm, team)
            team.answers()
        except GroupError as error:
            failure = team.blame(OF_GROUP, str(error))
            team.close()
            raise failure from error
        except BaseException:
            team.close()
            raise
        return made

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
