"""The ASGI application: which path goes where, who may ask, and what a failure looks like."""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

import pagedkv

from .chat import chat
from .completions import completions
from .embeddings import detokenize, embeddings, tokenize
from .errors import ApiError, json_response, show_api_error, show_failure, show_http_error
from .server import Server
from .sse import DIRECT

OPEN = ("/health", "/metrics", "/version")  # without a key: balancers and scrapers have none
METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Handler = Callable[[Server, Request], Awaitable[Any]]


class Outermost:
    """Leaves the server's own send() where Reply finds it: for each part of a stream Starlette's layers are a tenth of
    all that it costs."""

    def __init__(self, app: Any) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        scope[DIRECT] = send
        await self._app(scope, receive, send)


class Keys:
    """Pure ASGI: Starlette's BaseHTTPMiddleware would hide from an answer that its client has left."""

    def __init__(self, app: Any, keys: Sequence[str]) -> None:
        self._app, self._keys = app, [key.encode() for key in keys]

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http" and scope["path"] not in OPEN and not self._is_known(dict(scope["headers"])):
            refusal = ApiError(401, "the API key is missing or wrong", code="invalid_api_key").response()
            await refusal(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _is_known(self, headers: dict[bytes, bytes]) -> bool:
        kind, _, given = headers.get(b"authorization", b"").partition(b" ")
        # All are compared, each in a time that does not depend on how much of it is right.
        found = [hmac.compare_digest(given.strip(), key) for key in self._keys]
        return kind.lower() == b"bearer" and any(found)


async def health(server: Server, request: Request) -> Response:
    """503 while it drains, too: a balancer is to send nothing more."""
    try:
        server.client.health()
    except RuntimeError as error:
        raise ApiError(503, str(error)) from None
    if server.is_draining:
        raise ApiError(503, "the server ends")
    return Response()


async def version(server: Server, request: Request) -> Response:
    return json_response({"version": pagedkv.__version__})


async def metrics(server: Server, request: Request) -> Response:
    return Response(server.metrics.text(), headers={"content-type": METRICS_TYPE})


async def models(server: Server, request: Request) -> Response:
    return json_response({"object": "list", "data": list(map(server.model.describe, server.model.all_names))})


async def one_model(server: Server, request: Request) -> Response:
    return json_response(server.model.describe(server.model.check_name(request.path_params["name"])))


ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/completions", completions), ("POST", "/v1/chat/completions", chat),
    ("POST", "/v1/embeddings", embeddings), ("POST", "/tokenize", tokenize), ("POST", "/detokenize", detokenize),
    ("GET", "/v1/models", models), ("GET", "/v1/models/{name:path}", one_model), ("GET", "/health", health),
    ("GET", "/version", version), ("GET", "/metrics", metrics),
)  # fmt: skip


def make_app(server: Server, *, api_keys: Sequence[str] = (), origins: Sequence[str] = ()) -> Any:
    """origins: of pages whose scripts may ask (CORS); "*": any. Preflights have no key, so CORS comes first."""

    def bound(handler: Handler) -> Callable[[Request], Awaitable[Any]]:
        async def run(request: Request) -> Any:
            return await handler(server, request)

        return run

    middleware = []
    if origins:
        middleware.append(
            Middleware(CORSMiddleware, allow_origins=list(origins), allow_methods=["GET", "POST"], allow_headers=["*"])
        )
    if api_keys:
        middleware.append(Middleware(Keys, keys=api_keys))
    app = Starlette(
        routes=[Route(path, bound(handler), methods=[method]) for method, path, handler in ROUTES],
        middleware=middleware,
        exception_handlers={ApiError: show_api_error, HTTPException: show_http_error, Exception: show_failure},
    )
    return Outermost(app)
