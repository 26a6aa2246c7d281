"""Answers on their way to a client, which may leave at any time, whole or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, Protocol

import msgspec

from .errors import ApiError

EVENTS, JSON = "text/event-stream; charset=utf-8", "application/json"
DONE = b"data: [DONE]\n\n"
COMMENT = b": keep-alive\n\n"  # a comment, which clients ignore
DIRECT = "pagedkv.send"  # in an ASGI scope: the server's own send()


def event(value: Any) -> bytes:
    text: bytes = msgspec.json.encode(value)
    return b"data: " + text + b"\n\n"


def named_event(value: dict[str, Any]) -> bytes:
    """Of APIs whose events have names, which are the types of their values."""
    return b"event: " + str(value["type"]).encode() + b"\n" + event(value)


class EventWriter(Protocol):
    """Makes events of pieces of an answer, and the whole of it."""

    events: list[dict[str, Any]]  # that have not been sent

    def take(self, piece: Any) -> None: ...

    def whole(self) -> dict[str, Any]: ...

    def last(self, error: ApiError | None) -> bytes:
        """See Reply."""


async def named_events(pieces: AsyncGenerator[list[Any], None], writer: EventWriter) -> AsyncGenerator[bytes, None]:
    """What the writer makes of all pieces that come at once, as one part."""
    async with aclosing(pieces) as all_pieces:
        async for some in all_pieces:
            for piece in some:
                writer.take(piece)
            events, writer.events = writer.events, []
            if events:
                yield b"".join(map(named_event, events))


def _last(error: ApiError | None) -> bytes:
    return DONE if error is None else event(error.body()) + DONE


class Reply:
    """An ASGI response of the parts of a generator. The status is sent when the first part is there: until then an
    ApiError is a response of its own, and later, among events, the last event. Where the client leaves, the generator
    is closed.

    last: what ends a stream, after an error or without one.
    keep_alive: seconds; a stream that is silent so long begins, or goes on, with a comment: proxies would take it for
        dead. 0: never
    """

    def __init__(
        self, parts: AsyncGenerator[bytes, None], media_type: str, headers: dict[str, str],
        last: Callable[[ApiError | None], bytes] = _last, keep_alive: float = 0.0,
    ) -> None:  # fmt: skip
        self._parts, self._is_stream, self._last = parts, media_type == EVENTS, last
        self._headers = {"content-type": media_type} | headers
        if self._is_stream:
            self._headers |= {"cache-control": "no-cache", "x-accel-buffering": "no"}
        self._keep_alive, self._sent_at = keep_alive, 0.0
        self._has_started, self._starting = False, asyncio.Lock()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        work = self._stream(send, scope.get(DIRECT, send)) if self._is_stream else self._send(send)
        await _until_gone(receive, work)

    async def _send(self, send: Any) -> None:
        async with aclosing(self._parts) as parts:
            whole = await anext(parts)
        self._headers["content-length"] = str(len(whole))
        await self._start(send)
        await send({"type": "http.response.body", "body": whole, "more_body": False})

    async def _start(self, send: Any) -> None:
        async with self._starting:
            if not self._has_started:
                headers = [(name.encode(), value.encode("latin-1")) for name, value in self._headers.items()]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                self._has_started = True

    async def _stream(self, send: Any, send_more: Any) -> None:
        """send_more: the same without what is around the application, which wants to see the start and no more."""
        loop = asyncio.get_running_loop()
        self._sent_at = loop.time()
        comments = loop.create_task(self._comment(send, send_more)) if self._keep_alive else None
        try:
            async with aclosing(self._parts) as parts:
                async for part in parts:
                    if not self._has_started:
                        await self._start(send)
                    self._sent_at = loop.time()
                    await send_more({"type": "http.response.body", "body": part, "more_body": True})
            end = self._last(None)
        except ApiError as error:
            if not self._has_started:
                raise
            end = self._last(error)
        finally:
            if comments is not None:
                comments.cancel()
        await self._start(send)
        await send({"type": "http.response.body", "body": end, "more_body": False})

    async def _comment(self, send: Any, send_more: Any) -> None:
        loop = asyncio.get_running_loop()
        while True:
            rest = self._sent_at + self._keep_alive - loop.time()
            if rest > 0:
                await asyncio.sleep(rest)
                continue
            self._sent_at = loop.time()
            await self._start(send)
            await send_more({"type": "http.response.body", "body": COMMENT, "more_body": True})


async def _until_gone(receive: Any, work: Coroutine[Any, Any, None]) -> None:
    """Does the work until it is done or the client has left, and raises its error."""
    task, watcher = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
    try:
        await asyncio.wait({task, watcher}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for each in (task, watcher):
            each.cancel()
        await asyncio.gather(task, watcher, return_exceptions=True)
    if not task.cancelled():
        task.result()


async def _gone(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
