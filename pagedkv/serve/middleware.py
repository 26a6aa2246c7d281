"""What is around the application, in pure ASGI: Starlette's BaseHTTPMiddleware would hide that a client has left."""

from __future__ import annotations

import asyncio
import hmac
import sys
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

from .errors import ApiError
from .sse import DIRECT

# Without a key: balancers and scrapers have none, and the page asks for one.
OPEN = ("/", "/health", "/metrics", "/version")
REQUEST_ID, MAX_ID = b"x-request-id", 200


class Keys:
    def __init__(self, app: Any, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN and not self._is_known(dict(scope["headers"])):
            refusal = ApiError(401, "the API key is missing or wrong", code="invalid_api_key").response(scope["path"])
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_known(self, headers: dict[bytes, bytes]) -> bool:
        kind, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = bearer.strip() if kind.lower() == b"bearer" else headers.get(b"x-api-key", b"")  # Anthropic's clients
        # All are compared, each in a time that does not depend on how much of it is right.
        found = [hmac.compare_digest(given, key) for key in self._keys]
        return any(found)


class Outermost:
    """A request's id comes back with its answer, and requests are counted for the log.

    Leaves the server's own send() where Reply finds it: for each part of a stream, the layers in between are a tenth of
    all that it costs.
    """

    def __init__(self, app: Any, log: AccessLog | None) -> None:
        self._app, self._log = app, log

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope[DIRECT] = send
        log, given = self._log, _request_id(scope)

        def noted(message: Any) -> Any:
            if message["type"] == "http.response.start":
                if given is not None:
                    message = message | {"headers": [*message["headers"], (REQUEST_ID, given)]}
                if log is not None:
                    log.count(message["status"])
            return send(message)

        if log is not None:
            log.num_open += 1
        try:
            await self._app(scope, receive, noted)
        finally:
            if log is not None:
                log.num_open -= 1


def _request_id(scope: Any) -> bytes | None:
    """One that a header may hold."""
    for name, value in scope.get("headers", ()):
        if name == REQUEST_ID and len(value) <= MAX_ID and value.isascii() and value.decode().isprintable():
            found: bytes = value
            return found
    return None


class AccessLog:
    """One line a second on stderr, while there are requests: how many began to be answered, by status, and how many are
    in work."""

    def __init__(self) -> None:
        self.num_open = 0
        self._statuses: Counter[int] = Counter()

    def count(self, status: int) -> None:
        if not self._statuses:
            asyncio.get_running_loop().call_later(1, self._write)
        self._statuses[status] += 1

    def _write(self) -> None:
        counts = ", ".join(f"{count} x {status}" for status, count in sorted(self._statuses.items()))
        self._statuses.clear()
        print(f"{time.strftime('%H:%M:%S')} answers: {counts}; in work: {self.num_open}", file=sys.stderr, flush=True)
