"""EngineClient: all that a server, a rank or a replica may ask of an engine, wherever that engine runs."""

from __future__ import annotations

from collections.abc import AsyncIterator, Collection
from typing import Any, Protocol

from .holds import PauseMode
from .lora_request import LoRARequest
from .outputs import EmbeddingOutput, EngineStats, RequestOutput
from .requests.prompts import Prompt
from .requests.view import EngineView
from .sampling_params import SamplingParams


class ControlClient(Protocol):
    """The calls of control.CALLS, by one: control()."""

    async def control(self, name: str, *args: Any, **options: Any) -> Any:
        """Calls the method of Engine that has this name, one of control.CALLS. What follows are these methods."""
        ...

    async def pause(self, mode: PauseMode = "abort") -> None:
        """See Engine.pause()."""
        await self.control("pause", mode)

    async def resume(self) -> None:
        """See Engine.resume()."""
        await self.control("resume")

    async def is_paused(self) -> bool:
        """See Engine.is_paused()."""
        found: bool = await self.control("is_paused")
        return found

    async def sleep(self, level: int = 1, mode: PauseMode = "abort") -> None:
        """See Engine.sleep()."""
        await self.control("sleep", level, mode)

    async def wake_up(self, tags: Collection[str] | None = None) -> None:
        """See Engine.wake_up()."""
        await self.control("wake_up", tags)

    async def is_sleeping(self) -> bool:
        """See Engine.is_sleeping()."""
        found: bool = await self.control("is_sleeping")
        return found

    async def start_weight_update(self) -> None:
        """See Engine.start_weight_update()."""
        await self.control("start_weight_update")

    async def finish_weight_update(self, weight_version: int | str | None = None) -> int | str:
        """See Engine.finish_weight_update()."""
        version: int | str = await self.control("finish_weight_update", weight_version)
        return version

    async def update_weights(self, tensors: Any, *, weight_version: int | str | None = None) -> int | str:
        """See Engine.update_weights(). A client of another process takes the path of a folder or a file."""
        version: int | str = await self.control("update_weights", tensors, weight_version=weight_version)
        return version

    async def init_weights_update_group(
        self, unique_id: bytes, world_size: int, rank_offset: int = 1, *, timeout: float = 60.0
    ) -> None:
        """See Engine.init_weights_update_group()."""
        await self.control("init_weights_update_group", unique_id, world_size, rank_offset, timeout=timeout)

    async def destroy_weights_update_group(self) -> None:
        """See Engine.destroy_weights_update_group()."""
        await self.control("destroy_weights_update_group")

    async def get_weight_version(self) -> int | str:
        """See Engine.get_weight_version()."""
        version: int | str = await self.control("get_weight_version")
        return version

    async def update_weight_version(self, weight_version: int | str) -> None:
        """See Engine.update_weight_version()."""
        await self.control("update_weight_version", weight_version)

    async def reset_prefix_cache(self) -> int:
        """See Engine.reset_prefix_cache()."""
        count: int = await self.control("reset_prefix_cache")
        return count


class EngineClient(ControlClient, Protocol):
    """The seam between what takes requests and what computes them. AsyncEngine is the client of an engine in this
    process. Arguments and outputs are plain data, so that a client may as well talk to another process.
    """

    def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        salt: bytes = b"",
    ) -> AsyncIterator[RequestOutput]:
        """The outputs of a request. A reader who leaves the iterator early ends the request."""
        ...

    async def embed(
        self, prompt: Prompt, *, lora_request: LoRARequest | None = None, priority: int = 0, salt: bytes = b""
    ) -> EmbeddingOutput:
        """The vector of a prompt."""
        ...

    async def abort(self, request_id: str) -> bool:
        """Ends a request. False where no unfinished request has this id."""
        ...

    async def view(self) -> EngineView:
        """Who runs and waits at this moment, and which pages of the pool are whose."""
        ...

    async def explain(self, request_id: str) -> str | None:
        """What the request is doing or, if it waits, why. None where no unfinished request has this id."""
        ...

    def stats(self) -> EngineStats:
        """What runs and waits now, and sums since the start."""
        ...

    def health(self) -> float | None:
        """The seconds that the step in work has taken so far; None: the engine is idle. Raises RuntimeError where
        nothing can be served any more."""
        ...
