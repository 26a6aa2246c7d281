"""EngineClient: all that a server, a rank or a replica may ask of an engine, wherever that engine runs."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Protocol

from .lora_request import LoRARequest
from .outputs import EmbeddingOutput, EngineStats, RequestOutput
from .requests.prompts import Prompt
from .requests.view import EngineView
from .sampling_params import SamplingParams


class EngineClient(Protocol):
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
