"""Makes the runner of a rank, or those of all ranks."""

from __future__ import annotations

import logging
from contextlib import closing

from pagedkv import ops
from pagedkv.models.dummy import DummyCheckpoint
from pagedkv.models.places import Places
from pagedkv.models.registry import load_model
from pagedkv.models.weights import Checkpoint
from pagedkv.ops import Communicator, GroupError
from pagedkv.parallel.team import Team

from .model_runner import ModelRunner
from .plan import RunnerPlan
from .step_memory import StepMemory

logger = logging.getLogger(__name__)

RANK = "pagedkv.engine.rank"  # the module that another rank's process runs
Made = tuple[ModelRunner, Checkpoint | DummyCheckpoint]  # a runner, and where its weights were from


def make_runner(plan: RunnerPlan, comm: Communicator | None = None, team: Team | None = None) -> Made:
    """That of one rank. comm: None: there is one rank; team: on the first of several, the others."""
    rank, spec = (0, plan.spec) if comm is None else (comm.rank, plan.spec.shard(comm.rank, plan.num_ranks))
    device = plan.devices[rank]
    places = Places(device, plan.dtype)
    where = plan.dtype, device, spec.quantization, plan.lora, comm, plan.batch_invariant, places
    checkpoint = DummyCheckpoint(*where) if plan.is_dummy else Checkpoint(plan.folder, *where)
    with closing(checkpoint):
        model = load_model(spec, checkpoint, plan.max_model_len)
    return ModelRunner(plan, spec, model, device, places, comm, team), checkpoint


def make_runners(plan: RunnerPlan) -> Made:
    """Those of all ranks, the others' in processes of their own. What is returned is the first one's."""
    if plan.num_ranks == 1:
        return make_runner(plan)
    for rank in range(plan.num_ranks):
        plan.spec.shard(rank, plan.num_ranks)  # raises for what cannot be split
    is_cpu = plan.devices[0] == "cpu"
    threads = max(1, ops.get_num_threads() // plan.num_ranks) if is_cpu else None
    team = Team(RANK, plan.num_ranks, StepMemory.most_bytes(plan), threads)
    try:
        team.answers()  # all are there
        team.ask("set_up", plan)
        comm = plan.communicator(0, team.comm_fd)
        if comm.memory == "host" and not is_cpu:
            logger.warning(
                "the GPUs %s do not reach each other's memory (`nvidia-smi topo -p2p r` shows which): what they send "
                "each other goes through the host's memory, which is slower", ", ".join(plan.devices),
            )  # fmt: skip
        team.watch(comm.abort)
        made = make_runner(plan, comm, team)
        team.answers()
    except GroupError as error:
        failure = team.blame(error)
        team.close()
        raise failure from error
    except BaseException:
        team.close()
        raise
    return made
