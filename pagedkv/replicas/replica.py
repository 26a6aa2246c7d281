"""What a router asks of a replica, and the replica that is an engine in this process."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from pagedkv.engine.async_engine import AsyncEngine
from pagedkv.engine.outputs import CompletionOutput, RequestMetrics, RequestOutput
from pagedkv.engine.requests.prompts import Prompt, shown
from pagedkv.engine.sampling_params import SamplingParams

from .prefixes import Ids


class ReplicaDied(RuntimeError):
    """A replica has ended, and answers nothing until it has been started again."""


class NoReplicaError(RuntimeError):
    """A router has no replica that serves, or will."""


class Replica(Protocol):
    """An engine that computes whole requests by itself. Every call but start() and close() may raise ReplicaDied."""

    async def start(self) -> None:
        """Returns once it can answer, for the first time or again after it died. Raises where it never will."""
        ...

    async def match(self, token_ids: Ids, salt: bytes) -> int:
        """How many tokens of a prompt need not be computed: they are in the prefix cache, or being computed."""
        ...

    def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, *, priority: int = 0, salt: bytes = b""
    ) -> AsyncGenerator[RequestOutput, None]:
        """As AsyncEngine.generate()."""
        ...

    async def close(self) -> None:
        """Ends it for good."""
        ...


class EngineReplica(Replica):
    """An AsyncEngine in this process, on a device of its own. start() makes it, with the options of Engine."""

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        self._model, self._options = model, options
        self._engine: AsyncEngine | None = None
        self._lock = asyncio.Lock()

    async def start(self) -> None:
        async with self._lock:
            if self.has_died:
                await self.close()
            if self._engine is None:
                self._engine = await asyncio.to_thread(AsyncEngine, self._model, **self._options)

    @property
    def has_died(self) -> bool:
        """Whether start() has made an engine that can serve nothing any more."""
        try:
            return self._engine is not None and self._living() is None
        except ReplicaDied:
            return True

    async def match(self, token_ids: Ids, salt: bytes) -> int:
        return sum(self._living().engine.manager.match(token_ids, salt=salt))

    async def generate(
        self, prompt: Prompt, params: SamplingParams, request_id: str, *, priority: int = 0, salt: bytes = b""
    ) -> AsyncGenerator[RequestOutput, None]:
        engine = self._living()
        outputs: Any = engine.generate(prompt, params, request_id, priority=priority, salt=salt)
        async with aclosing(outputs):
            try:
                async for output in outputs:
                    if output.error is not None:  # perhaps that of the engine, which all of its requests get
                        _check(engine)
                    yield output
            except RuntimeError:  # perhaps the engine's, which ended while a thread prepared the request
                _check(engine)
                raise

    def _living(self) -> AsyncEngine:
        if self._engine is None:
            raise ReplicaDied("its engine has not been started")
        _check(self._engine)
        return self._engine

    async def close(self) -> None:
        engine, self._engine = self._engine, None
        if engine is not None:
            await asyncio.to_thread(engine.close)


def _check(engine: AsyncEngine) -> None:
    try:
        engine.health()
    except RuntimeError as error:
        raise ReplicaDied(str(error.__cause__ or error)) from error


def failed_output(name: str, prompt: Prompt, error: Exception, start: float) -> RequestOutput:
    """The last output of a request that cannot be served. start: when it came, by time.perf_counter()."""
    text, ids = shown(prompt)
    answer = CompletionOutput(0, "", [], None, None, "error", None)
    metrics = RequestMetrics(None, time.perf_counter() - start, None, 0)
    return RequestOutput(name, text, ids, None, [answer], True, error, 0, metrics)
