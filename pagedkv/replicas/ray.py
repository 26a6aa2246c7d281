"""Replicas that are Ray actors, on any machines of a cluster. Ray places them, starts them again and carries what they
are sent; who gets which request is the Router's.

    import ray
    from pagedkv.replicas.ray import ray_router

    ray.init()
    async with ray_router("Qwen/Qwen3-8B", 4, tensor_parallel_size=2) as router:
        outputs = await router.generate_all(prompts)
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

from pagedkv.checks import check_float, check_int
from pagedkv.engine.options import EngineOptions
from pagedkv.engine.outputs import RequestOutput, portable
from pagedkv.engine.requests.prompts import Prompt, shown
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.optional import need

from .prefixes import Ids
from .replica import EngineReplica, Replica, ReplicaDied
from .router import Router

need("pagedkv.replicas.ray", "ray", "ray")
import ray  # noqa: E402  the message above is better than its own
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group  # noqa: E402
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy  # noqa: E402

# What a call to an actor raises whose process or machine is gone.
DEATHS = (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError, ray.exceptions.NodeDiedError)
MAX_RESTARTS = 100  # of one replica: Ray's -1 would load a model for ever that always crashes
MAX_CALLS = 10_000  # at a time, of one replica: all of its requests, and the questions of the router


class _Actor:
    """What runs in the actor's process: an engine in an event loop."""

    def __init__(self, model: str, options: dict[str, Any]) -> None:
        self._replica = EngineReplica(model, **options)

    async def start(self) -> None:
        if self._replica.has_died:  # a device may be unusable for this process: Ray makes another and asks it again
            os._exit(1)
        await self._replica.start()

    async def match(self, token_ids: Ids, salt: bytes) -> int:
        return await self._replica.match(token_ids, salt)

    async def generate(self, *request: Any, **options: Any) -> AsyncGenerator[RequestOutput, None]:
        """The prompt is left out of the outputs: whoever asked has it."""
        async with aclosing(self._replica.generate(*request, **options)) as outputs:
            async for output in outputs:
                output.prompt, output.prompt_token_ids = None, []
                output.error = output.error and portable(output.error)
                yield output


class RayReplica(Replica):
    """An engine in an actor, with the options of Engine.

    Args:
        num_cpus: cores that it reserves
        start_seconds: how long it waits for its cores and GPUs

    A placement group of one bundle reserves what it needs on one machine: a GPU for each of tensor_parallel_size,
    unless device is "cpu". It stays reserved while the actor is started again.
    """

    def __init__(
        self, model: str | os.PathLike[str], *, num_cpus: int = 1, start_seconds: float = 600, **options: Any
    ) -> None:
        checked = EngineOptions.of(type(self).__name__, options)  # before anything is reserved
        num_gpus = 0 if str(checked.device) == "cpu" else checked.tensor_parallel_size
        self._needs = {"CPU": check_int("num_cpus", num_cpus, 1, 4096)} | ({"GPU": num_gpus} if num_gpus else {})
        self._model, self._options = str(model), options
        self._start_seconds = check_float("start_seconds", start_seconds, 0, 1e9, is_open=True)
        self._group: PlacementGroup | None = None
        self._actor: Any = None

    async def start(self) -> None:
        if self._group is None:
            self._group = placement_group([self._needs], strategy="STRICT_PACK")
            try:
                await asyncio.wait_for(self._group.ready(), self._start_seconds)
            except TimeoutError:
                raise RuntimeError(f"no machine had {self._needs} free within {self._start_seconds:g} s") from None
            self._actor = self._new_actor(self._group)
        with _errors():
            await _answer(self._actor.start.options(max_task_retries=-1).remote)

    def _new_actor(self, group: PlacementGroup) -> Any:
        options: dict[str, Any] = {
            "num_cpus": self._needs["CPU"], "num_gpus": self._needs.get("GPU", 0), "max_restarts": MAX_RESTARTS,
            "max_concurrency": MAX_CALLS, "scheduling_strategy": PlacementGroupSchedulingStrategy(group),
        }  # fmt: skip
        return ray.remote(_Actor).options(**options).remote(self._model, self._options)

    async def match(self, token_ids: Ids, salt: bytes) -> int:
        with _errors():
            found: int = await _answer(self._actor.match.remote, token_ids, salt)
        return found

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, *, priority: int = 0, salt: bytes = b""
    ) -> AsyncGenerator[RequestOutput, None]:
        text, ids = shown(prompt)
        call = self._actor.generate.options(num_returns="streaming")
        has_finished = False
        with _errors():
            _check()
            outputs = call.remote(prompt, params, request_id, priority=priority, salt=salt)
            try:
                while (reference := await _answer(anext, outputs, None)) is not None:
                    output: RequestOutput = await _answer(lambda given: given, reference)
                    output.prompt, output.prompt_token_ids, has_finished = text, ids, output.finished
                    yield output
            finally:
                if not has_finished and ray.is_initialized():  # its reader has left
                    ray.cancel(outputs)

    async def close(self) -> None:
        if ray.is_initialized():  # else it has ended all
            if self._actor is not None:
                ray.kill(self._actor)
            if self._group is not None:
                remove_placement_group(self._group)
        self._actor = self._group = None


@contextmanager
def _errors() -> Iterator[None]:
    """Of a call to an actor: its death, or what it has raised."""
    try:
        yield
    except DEATHS as error:
        raise ReplicaDied(str(error)) from error
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error


def _check() -> None:
    if not ray.is_initialized():  # and a call would start another Ray, which knows nothing of this one's actors
        raise RuntimeError("Ray was shut down")


async def _answer(ask: Callable[..., Any], *args: Any) -> Any:
    """What Ray answers; where it has been shut down that would never come."""
    _check()
    task = asyncio.ensure_future(ask(*args))
    try:
        while not (await asyncio.wait({task}, timeout=1))[0]:
            _check()
        return task.result()
    finally:
        task.cancel()


def ray_router(
    model: str | os.PathLike[str], num_replicas: int, *, num_cpus: int = 1, start_seconds: float = 600, **options: Any
) -> Router:
    """A Router over so many RayReplicas, with the options of Engine.

    Args:
        model: a name on the Hugging Face hub, or a folder that all machines have under the same path
        num_cpus: cores that each replica reserves
        start_seconds: how long each waits for its cores and GPUs; then entering the router raises RuntimeError
    """
    count = check_int("num_replicas", num_replicas, 1, 4096)
    replicas = [RayReplica(model, num_cpus=num_cpus, start_seconds=start_seconds, **options) for _ in range(count)]
    of_folder = {name: options[name] for name in ("revision", "quantization") if name in options}
    return Router.of_model(model, replicas, **of_folder)
