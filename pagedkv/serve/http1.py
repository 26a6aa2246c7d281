"""A connection of HTTP/1: uvicorn's, with a bound for what is no body."""

from __future__ import annotations

import math
import sys
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 1 << 16  # bytes of a request's line and headers, beside a read of asyncio's, which is at most 256 KiB


class Http1(HttpToolsProtocol):  # type: ignore[misc]
    """httptools keeps all of a head, and of what may follow a body in chunks, for anybody and without an end, in a time
    that grows with the square of a header's length."""

    _num_silent = 0  # bytes since the parser told of something other than a header
    _data = b""  # what is being parsed
    _knows_head = False  # the parser gets a head again
    _unanswered: tuple[Any, ...] = ()  # the cycles of requests: the first is in work, and others have come behind it

    def data_received(self, data: bytes) -> None:
        self._num_silent += len(data)
        self._data = data
        super().data_received(data)
        if self._num_silent > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The head of the request is larger than {MAX_HEAD:,} bytes.")

    def _unsupported_upgrade_warning(self) -> None:
        """An offer of another protocol, as Java's clients make it for HTTP/2, is passed over. The parser takes what
        comes after the head for that protocol; another parser takes it for the body."""
        upgrade = sys.exception()
        assert isinstance(upgrade, httptools.HttpParserUpgrade)
        rest = self._data[upgrade.args[0] :]
        length = [(name, value) for name, value in self.headers if name in (b"content-length", b"transfer-encoding")]
        lines = [b"POST / HTTP/1.1", *(name + b": " + value for name, value in length), b"", b""]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's own
        self._knows_head = True
        super().data_received(b"\r\n".join(lines))
        self._knows_head = False
        if rest:
            self.data_received(rest)

    def on_message_begin(self) -> None:
        if not self._knows_head:
            super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        if not self._knows_head:
            super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if not self._knows_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._knows_head:
            return
        self._num_silent = 0
        before = self.cycle
        super().on_headers_complete()
        if self.cycle is before:
            return
        self._unanswered = (*(each for each in self._unanswered if not each.response_complete), self.cycle)
        if len(self._unanswered) == 2:  # uvicorn reads no further, and would not hear that the client has left
            self.flow.resume_reading()
        if self.scope["http_version"] == "1.0":
            _send_without_chunks(self.cycle)

    def connection_lost(self, error: Exception | None) -> None:
        """uvicorn tells it to the last request alone, and would go on to answer those before."""
        for each in self._unanswered:
            each.disconnected = not each.response_complete
            each.message_event.set()
        super().connection_lost(error)

    def on_body(self, body: bytes) -> None:
        self._num_silent = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_silent = 0
        if not self.parser.should_upgrade():  # else the body has not come yet
            super().on_message_complete()


def _send_without_chunks(cycle: Any) -> None:
    """Of HTTP/1.0, which does not know them: a body of unknown length ends with the connection, as uvicorn's do for
    such a client anyway."""
    send = cycle.send

    async def send_plain(message: Any) -> None:
        if message["type"] == "http.response.start":
            if all(name.lower() != b"content-length" for name, _ in message.get("headers", ())):
                cycle.chunked_encoding, cycle.expected_content_length = False, math.inf
        elif cycle.expected_content_length == math.inf and not message.get("more_body", False):
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    cycle.send = send_plain
