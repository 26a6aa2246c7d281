"""AsyncEngine: an Engine for event loops."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import deque
from collections.abc import AsyncIterator
from queue import SimpleQueue
from types import TracebackType
from typing import Any, Self

from .arguments import Prompt
from .calls import Call
from .engine import Engine
from .increment import Increment
from .outputs import EngineStats, RequestOutput
from .request import Request
from .sampling_params import SamplingParams
from .turns import Mailbox


class _Stream:
    """What one caller reads, in its event loop. (asyncio.Queue takes twice the time.)"""

    __slots__ = ("items", "loop", "request", "_waiter")

    def __init__(self, request: Request) -> None:
        self.request, self.loop = request, asyncio.get_running_loop()
        self.items: deque[Increment | BaseException] = deque()  # any thread adds to them, then calls wake() in the loop
        self._waiter: asyncio.Future[None] | None = None

    def wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def get(self) -> RequestOutput:
        while not self.items:
            self._waiter = self.loop.create_future()
            await self._waiter
        item = self.items.popleft()
        if isinstance(item, BaseException):
            raise item
        output = item.output()
        assert isinstance(output, RequestOutput)
        return output


class AsyncEngine:
    """Serves requests of coroutines, in any number of event loops.

        async with AsyncEngine("Qwen3-0.6B") as engine:
            async for output in engine.generate("Hello", SamplingParams(max_tokens=100), "request-1"):
                print(output.outputs[0].text)

    Args:
        model: a model's folder, with the options of Engine; or an Engine, which other threads may use at the same time

    One thread steps the engine while there are requests. Cancelling the task that reads the outputs aborts its request.
    """

    def __init__(self, model: str | os.PathLike[str] | Engine, **options: Any) -> None:
        if isinstance(model, Engine) and options:
            raise TypeError(f"{', '.join(options)}: options of a model's folder, but an Engine was given")
        self.engine = model if isinstance(model, Engine) else Engine(model, **options)
        self._streams: dict[str, _Stream] = {}  # by request id
        self._mailbox: Mailbox = SimpleQueue()
        self._told: dict[asyncio.AbstractEventLoop, list[_Stream]] = {}  # whose readers are to be woken
        self._has_requests = threading.Event()
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()
        self._is_closed = False

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
    ) -> AsyncIterator[RequestOutput]:
        """Yields the outputs of a request: after every step that adds to it, or one at the end, as
        SamplingParams.output_kind says. The arguments are those of Engine.add_request()."""
        engine = self.engine
        request = engine._maker.make(
            prompt, params, self._mailbox, Call(), priority=priority, salt=salt, request_id=request_id
        )
        stream = self._submit(request)
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:  # cancelled, too
            if self._streams.get(request.id) is stream:
                del self._streams[request.id]
            engine._abort_all([request])

    async def abort(self, request_id: str) -> bool:
        """Ends a request; its reader gets an output with finish_reason "abort". False where no request has the id."""
        return self.engine.abort(request_id)

    def stats(self) -> EngineStats:
        """The engine's statistics: see Engine.stats()."""
        return self.engine.stats()

    def _submit(self, request: Request) -> _Stream:
        stream = _Stream(request)
        with self._lock:
            if self._is_closed:
                raise RuntimeError("this AsyncEngine is closed")
            if request.id in self._streams:
                raise ValueError(f"request_id is {request.id!r}, which a request has that is not finished")
            self._streams[request.id] = stream
            try:
                self.engine._book.add([request])
            except BaseException:
                del self._streams[request.id]
                self._mailbox.put(None)  # the thread may wait for news, and no others come
                raise
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="pagedkv", daemon=True)
                self._thread.start()
        self._has_requests.set()
        return stream

    # --- the thread

    def _serve(self) -> None:
        while not self._is_closed or self._streams:  # those that close() has aborted are told
            self._has_requests.wait()
            self._has_requests.clear()
            while self._streams:
                try:
                    # The readers of a step's outputs are woken after the next launch: their loop holds the GIL for
                    # milliseconds, and the device must not wait for that.
                    news = self.engine._turns.receive_all(self._mailbox, self._wake)
                except BaseException as error:  # in a step: all readers that wait for it are told
                    self._fail(error)
                else:
                    self._wake()  # where no step was on its way
                    self._pass_on(news)
            self._wake()

    def _pass_on(self, news: list[Increment | None]) -> None:
        """Puts them into their streams, without waking the readers."""
        for item in news:
            if item is None:
                continue
            stream = self._streams.get(item.request.id)
            if stream is not None and stream.request is item.request:  # not an earlier one with the same id
                stream.items.append(item)
                self._told.setdefault(stream.loop, []).append(stream)
                if item.is_last:
                    self._streams.pop(item.request.id, None)

    def _fail(self, error: BaseException) -> None:
        for request_id, stream in dict(self._streams).items():
            self._streams.pop(request_id, None)
            self.engine._abort_all([stream.request])
            stream.items.append(error)
            self._told.setdefault(stream.loop, []).append(stream)

    def _wake(self) -> None:
        """Wakes the readers of what was passed on, by one call per event loop."""
        while self._told:
            loop, streams = self._told.popitem()
            try:
                loop.call_soon_threadsafe(_wake_all, streams)
            except RuntimeError:
                if not loop.is_closed():  # else its readers are gone with it
                    raise

    # --- the end

    def close(self) -> None:
        """Aborts unfinished requests and frees the engine's memory. Closing twice is fine."""
        with self._lock:
            self._is_closed = True
            thread = self._thread
        self.engine.close()
        self._has_requests.set()
        if thread is not None:
            thread.join()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)


def _wake_all(streams: list[_Stream]) -> None:
    for stream in streams:
        stream.wake()
