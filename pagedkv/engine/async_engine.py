"""AsyncEngine: an Engine for event loops."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator
from collections.abc import Sequence as SequenceOf
from contextlib import aclosing
from functools import partial
from inspect import signature
from types import TracebackType
from typing import Any, Self, Unpack

from .client import EngineClient
from .control import call_later
from .engine import EMBED, Engine
from .lora_request import LoRARequest
from .outputs import EmbeddingOutput, EngineStats, RequestOutput
from .requests.news import News
from .requests.prompts import Prompt, takes_long
from .requests.request import Update
from .requests.view import EngineView
from .sampling_params import SamplingParams
from .text.chat import ChatOptions, encode_chats


class _Stream(News):
    """What one caller reads, in its event loop."""

    __slots__ = ("_items", "_waker")

    def __init__(self, waker: _Waker) -> None:
        super().__init__(waker.loop)
        self._waker = waker
        self._items: deque[Update] = deque()  # the engine's thread adds to them, then take() is called in the loop

    def put(self, item: Update) -> _Waker:
        self._items.append(item)
        self._waker.streams.append(self)
        return self._waker

    def take(self) -> None:
        while self._items:
            super().put(self._items.popleft())


class _Waker:
    """Wakes the readers of one event loop by one call. It is called after a launch: the loop holds the GIL for
    milliseconds then, and the device must not wait for that."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.streams: list[_Stream] = []  # which have news; only the engine's thread uses it

    def __call__(self) -> None:
        streams, self.streams = self.streams, []
        try:
            self.loop.call_soon_threadsafe(_take_all, streams)
        except RuntimeError:
            if not self.loop.is_closed():  # else its readers are gone with it
                raise


class AsyncEngine(EngineClient):
    """Serves requests of coroutines, in any number of event loops.

        async with AsyncEngine("Qwen3-0.6B") as engine:
            async for output in engine.generate("Hello", SamplingParams(max_tokens=100), "request-1"):
                print(output.outputs[0].text)

    Args:
        model: a model's folder, with the options of Engine; or an Engine, which other threads may use at the same time

    Cancelling the task that reads the outputs aborts its request. A long prompt is encoded, an adapter read, and a
    grammar compiled in another thread.
    """

    def __init__(self, model: str | os.PathLike[str] | Engine, **options: Any) -> None:
        if isinstance(model, Engine) and options:
            raise TypeError(f"{', '.join(options)}: options of a model's folder, but an Engine was given")
        self.engine = model if isinstance(model, Engine) else Engine(model, **options)
        # Of the loops that have readers, by loop: the streams keep them.
        self._wakers: weakref.WeakValueDictionary[asyncio.AbstractEventLoop, _Waker] = weakref.WeakValueDictionary()
        self._is_closed = False

    __init__.__signature__ = signature(Engine.__init__)  # type: ignore[attr-defined]  # with what **options may be

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
        """Yields the outputs of a request: after every step that adds to it, or one at the end, as
        SamplingParams.output_kind says. A reader who comes late finds several steps in one output. The arguments are
        those of Engine.add_request()."""
        return self._outputs(
            prompt, params, lora_request=lora_request, priority=priority, salt=salt, request_id=request_id
        )

    async def chat(
        self,
        messages: SequenceOf[Any],
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        salt: bytes = b"",
        **options: Unpack[ChatOptions],
    ) -> AsyncIterator[RequestOutput]:
        """Yields the outputs of the answer to a chat, as generate() does. LLM.chat() describes the options. The
        template runs in another thread."""
        folder, tokenizer = self.engine.folder, self.engine.tokenizer
        (prompt,) = await asyncio.to_thread(encode_chats, folder, tokenizer, [messages], options)
        outputs = self._outputs(
            prompt, params, lora_request=lora_request, priority=priority, salt=salt, request_id=request_id
        )
        async with aclosing(outputs):
            async for output in outputs:
                yield output

    async def embed(
        self, prompt: Prompt, *, lora_request: LoRARequest | None = None, priority: int = 0, salt: bytes = b""
    ) -> EmbeddingOutput:
        """The vector of a text, as LLM.embed() makes it."""
        outputs = self._outputs(
            prompt, EMBED, lora_request=lora_request, priority=priority, salt=salt, wants_embedding=True
        )
        async with aclosing(outputs):
            output: EmbeddingOutput = await anext(outputs)
        return output

    async def _outputs(
        self, prompt: Prompt, params: SamplingParams | None, *, lora_request: LoRARequest | None, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """The outputs of a request. The options are those of Engine._prepare()."""
        if self._is_closed:
            raise RuntimeError("this AsyncEngine is closed")
        core, stream = self.engine._core, _Stream(self._waker())
        prepare = partial(self.engine._prepare, prompt, params, stream, lora_request=lora_request, **options)
        request = await asyncio.to_thread(prepare) if takes_long(prompt, params, lora_request) else prepare()
        core.submit([request])
        try:
            while True:
                update = await stream.get()
                yield request.output(update)
                if update.is_last:
                    return
        finally:  # cancelled, too
            core.abort([request])

    def _waker(self) -> _Waker:
        loop = asyncio.get_running_loop()
        waker = self._wakers.get(loop)
        if waker is None:
            waker = self._wakers[loop] = _Waker(loop)
        return waker

    async def abort(self, request_id: str) -> bool:
        """Ends a request; its reader gets an output with finish_reason "abort". False where no request has the id."""
        return self.engine.abort(request_id)

    async def view(self) -> EngineView:
        """Who runs and waits at this moment, and which pages of the pool are whose: see Engine.view()."""
        return await asyncio.wrap_future(self.engine._core.ask(self.engine._book.view))

    async def explain(self, request_id: str) -> str | None:
        """What the request is doing or, if it waits, why. None where no unfinished request has this id."""
        return await asyncio.wrap_future(self.engine._core.ask(partial(self.engine._book.explain, request_id)))

    async def control(self, name: str, *args: Any, **options: Any) -> Any:
        """Calls the method of Engine that has this name, one of control.CALLS, in another thread."""
        return await asyncio.wrap_future(call_later(self.engine, name, args, options))

    def stats(self) -> EngineStats:
        """The engine's statistics: see Engine.stats()."""
        return self.engine.stats()

    def health(self) -> float | None:
        """How long the step in work takes; raises where nothing can be served any more: see Engine.health()."""
        return self.engine.health()

    # --- the end

    def close(self) -> None:
        """Aborts unfinished requests and frees the engine's memory. Closing twice is fine."""
        self._is_closed = True
        self.engine.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await asyncio.get_running_loop().run_in_executor(None, self.close)


def _take_all(streams: list[_Stream]) -> None:
    for stream in streams:
        stream.take()
