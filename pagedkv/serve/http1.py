"""A connection of HTTP/1: uvicorn's, with a bound for what is no body."""

from __future__ import annotations

import math
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 1 << 16  # bytes of a request's line and headers, beside a read of asyncio's, which is at most 256 KiB


class Http1(HttpToolsProtocol):  # type: ignore[misc]
    """httptools keeps all of a head, and of what may follow a body in chunks, for anybody and without an end, in a time
    that grows with the square of a header's length."""

    _num_silent = 0  # bytes since the parser told of something other than a header

    def data_received(self, data: bytes) -> None:
        self._num_silent += len(data)
        super().data_received(data)
        if self._num_silent > MAX_HEAD and not self.transport.is_closing():
            self.send_400_response(f"The head of the request is larger than {MAX_HEAD:,} bytes.")

    def on_headers_complete(self) -> None:
        self._num_silent = 0
        before = self.cycle
        super().on_headers_complete()
        if self.scope["http_version"] == "1.0" and self.cycle is not before:
            _send_without_chunks(self.cycle)

    def on_body(self, body: bytes) -> None:
        self._num_silent = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._num_silent = 0
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
