"""RemoteEngine: the client of an engine in another process."""

from __future__ import annotations

import asyncio
import itertools
import os
import pickle
import socket
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagedkv.engine.client import EngineClient
from pagedkv.engine.engine import EMBED
from pagedkv.engine.lora_request import LoRARequest
from pagedkv.engine.outputs import EmbeddingOutput, EngineStats, RequestOutput
from pagedkv.engine.requests.news import News
from pagedkv.engine.requests.prompts import Prompt, encode, read_prompt
from pagedkv.engine.requests.request import Request
from pagedkv.engine.requests.view import EngineView
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.engine.text.tokenizer import LONG_TEXT, Tokenizer
from pagedkv.models.ipc import IpcTensor
from pagedkv.models.nccl import BroadcastTensor
from pagedkv.models.pooling import read_normalizes

from .wire import Decoder, to_bytes, unpack

BEAT = 0.5  # seconds between two signs of life of an engine's process
LATE = 4 * BEAT  # after which a sign of life is missed


_numbers = itertools.count()  # of this process: with its own, requests have names that no other front end's have


@dataclass
class Facts:
    """What a front end knows of the engine's model."""

    folder: Path
    default_params: SamplingParams
    max_model_len: int
    vocab_size: int


class RemoteEngine(asyncio.Protocol, EngineClient):
    """Talks to an EngineHost (host.py) over a socket. Call connect() in the event loop that is to use it.

    The engine's thread sends one message for each step, with the news of all requests. Prompts are encoded here, and
    whole texts are made here; parts of texts are made by the engine, which looks for stop strings in them.
    """

    def __init__(self, facts: Facts, tokenizer: Tokenizer) -> None:
        self._facts, self._tokenizer = facts, tokenizer
        self._streams: dict[int, News] = {}  # by number, of requests that have not ended
        self._calls: dict[int, asyncio.Future[Any]] = {}
        self._decoder = Decoder()
        self._beat: tuple[float | None, EngineStats] | None = None
        self._beat_time, self._is_gone = 0.0, False
        self._first_beat = asyncio.Event()
        self.when_gone: Callable[[], None] = lambda: None

    async def connect(self, connected: socket.socket) -> None:
        """Over a Unix socket whose other end the engine's process has."""
        loop = asyncio.get_running_loop()
        self._transport, _ = await loop.create_unix_connection(lambda: self, sock=connected)
        await self._first_beat.wait()
        if self._beat is None:
            raise self._gone()

    # --- asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        for kind, *values in self._decoder.feed(data):
            if kind == "news":
                for each in values[0]:
                    if stream := self._streams.get(each[0]):  # else its reader has left
                        stream.put(unpack(each))
            elif kind == "beat":
                self._beat, self._beat_time = (values[0], values[1]), time.monotonic()
                self._first_beat.set()
            elif kind in ("done", "failed"):
                if call := self._calls.pop(values[0], None):  # else nobody waits any more
                    call.set_result(values[1]) if kind == "done" else call.set_exception(values[1])
            elif stream := self._streams.get(values[0]):
                stream.fail(values[1])

    def connection_lost(self, error: Exception | None) -> None:
        self._is_gone = True
        self._first_beat.set()
        for stream in self._streams.values():
            stream.fail(self._gone())
        for call in self._calls.values():
            call.set_exception(self._gone())
        self._calls.clear()
        self.when_gone()

    def _gone(self) -> RuntimeError:
        return RuntimeError("the engine's process has ended")

    def _send(self, *message: Any) -> None:
        if self._is_gone:
            raise self._gone()
        self._transport.write(to_bytes(message))

    # --- EngineClient

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
        """As AsyncEngine.generate(). What a late reader finds of several steps is one output. A mask of the params must
        be one that can be pickled."""
        options = {"lora_request": lora_request, "priority": priority, "salt": salt}
        return self._outputs(prompt, self._facts.default_params if params is None else params, request_id, options)

    async def embed(
        self, prompt: Prompt, *, lora_request: LoRARequest | None = None, priority: int = 0, salt: bytes = b""
    ) -> EmbeddingOutput:
        """As AsyncEngine.embed()."""
        options = {"lora_request": lora_request, "priority": priority, "salt": salt, "wants_embedding": True}
        async with aclosing(self._outputs(prompt, EMBED, None, options)) as outputs:
            output: EmbeddingOutput = await anext(outputs)
        return output

    async def _outputs(
        self, prompt: Prompt, params: SamplingParams, request_id: str | None, options: dict[str, Any]
    ) -> AsyncGenerator[Any, None]:
        """options: of Engine._prepare()."""
        number, start = next(_numbers), time.perf_counter()
        name = f"{os.getpid()}-{number}" if request_id is None else request_id
        text, served = read_prompt("prompt", prompt)
        how = "prompt", served, self._tokenizer, self._facts.vocab_size
        is_long = isinstance(served, str) and len(served) > LONG_TEXT
        ids, error = await asyncio.to_thread(encode, *how) if is_long else encode(*how)
        normalizes = read_normalizes(self._facts.folder) if "wants_embedding" in options else None
        stream = self._streams[number] = News(asyncio.get_running_loop())
        request = Request(
            name, params, stream, params.output_kind, self._tokenizer, prompt=text, token_ids=ids, start_time=start,
            normalizes=normalizes,
        )  # fmt: skip
        # The engine needs to know that there was a text, and not which.
        encoded = ids if text is None else {"prompt": "", "prompt_token_ids": ids}
        try:
            try:
                self._send("generate", number, served if error else encoded, params, options | {"request_id": name})
            except (pickle.PicklingError, AttributeError) as problem:  # of a function that has no name, say
                raise TypeError(f"mask is {params.mask!r}, which the engine's process cannot get: {problem}") from None
            while True:
                update = await stream.get()
                yield request.output(update)
                if update.is_last:
                    return
        finally:  # cancelled, too
            del self._streams[number]
            if not (stream.has_ended or self._is_gone):  # also where the engine knows of none
                self._send("leave", number)

    async def abort(self, request_id: str) -> bool:
        """Ends a request of any front end. False where no unfinished request has this id."""
        found: bool = await self._call("abort", request_id)
        return found

    async def view(self) -> EngineView:
        """Who runs and waits at this moment, and which pages of the pool are whose."""
        found: EngineView = await self._call("view")
        return found

    async def explain(self, request_id: str) -> str | None:
        """What the request is doing or, if it waits, why. None where no unfinished request has this id."""
        found: str | None = await self._call("explain", request_id)
        return found

    async def control(self, name: str, *args: Any, **options: Any) -> Any:
        """As AsyncEngine.control(). update_weights() takes the path of files that the engine's process can read, or
        IpcTensors or BroadcastTensors by name."""
        given = options.get("tensors", args[0] if args else None)
        kinds = IpcTensor, BroadcastTensor
        if isinstance(given, Mapping) and given and all(isinstance(each, kinds) for each in given.values()):
            return await self._call("control", name, args, options)
        if name == "update_weights" and not isinstance(given, (str, os.PathLike)):
            given = "a path, or IpcTensors or BroadcastTensors by name"
            raise TypeError(f"tensors: the engine is in another process: give {given}")
        return await self._call("control", name, args, options)

    async def _call(self, kind: str, *values: Any) -> Any:
        """What the engine's process answers. A call that is cancelled is forgotten."""
        number = next(_numbers)
        call = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            self._send(kind, number, *values)
            return await call
        finally:
            self._calls.pop(number, None)

    def stats(self) -> EngineStats:
        """As they were half a second ago."""
        assert self._beat is not None, "it is connected"
        return self._beat[1]

    def health(self) -> float | None:
        """A process that gives no sign of life is at a step, as far as anybody can tell."""
        if self._is_gone:
            raise self._gone()
        assert self._beat is not None, "it is connected"
        seconds, age = self._beat[0], time.monotonic() - self._beat_time
        if seconds is None:
            return age if age > LATE else None
        return seconds + age
