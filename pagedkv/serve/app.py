"""The ASGI application: its routes, who may call them, and what a failure looks like."""

from __future__ import annotations

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

from .admin import ROUTES as ADMIN_ROUTES
from .chat import chat
from .completions import completions
from .embeddings import detokenize, embeddings, tokenize
from .errors import ApiError, json_response, show_api_error, show_failure, show_http_error
from .messages import count_tokens, messages
from .middleware import REQUEST_ID, AccessLog, Keys, Outermost
from .page import Page
from .responses import count_tokens as count_input_tokens
from .responses import responses
from .server import WARNING, Server

METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"
Handler = Callable[[Server, Request], Awaitable[Any]]


async def health(server: Server, request: Request) -> Response:
    """503 while it drains, too: a balancer is to send nothing more."""
    try:
        seconds = server.client.health()
    except RuntimeError as error:
        raise ApiError(503, str(error)) from None
    if server.is_draining:
        raise ApiError(503, "the server ends")
    if seconds is not None and seconds >= server.stuck_after:
        raise ApiError(503, f"the engine is stuck: a step has taken {seconds:.0f} s (--stuck-after)")
    return json_response({"status": "idle" if seconds is None else "busy", "step_seconds": seconds or 0.0})


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
    ("POST", "/v1/responses", responses), ("POST", "/v1/responses/input_tokens", count_input_tokens),
    ("POST", "/v1/messages", messages),
    ("POST", "/v1/messages/count_tokens", count_tokens),
    ("POST", "/v1/embeddings", embeddings), ("POST", "/tokenize", tokenize), ("POST", "/detokenize", detokenize),
    ("GET", "/v1/models", models), ("GET", "/v1/models/{name:path}", one_model), ("GET", "/health", health),
    ("GET", "/version", version), ("GET", "/metrics", metrics),
)  # fmt: skip


def make_app(
    server: Server, *, api_keys: Sequence[str] = (), origins: Sequence[str] = (), access_log: bool = False,
    with_page: bool = True, with_admin: bool = False,
) -> Any:  # fmt: skip
    """origins: of pages whose scripts may ask (CORS); "*": any. Preflights have no key, so CORS comes first.
    with_admin: the paths that pause the engine and change its weights."""

    def bound(handler: Handler) -> Callable[[Request], Awaitable[Any]]:
        async def run(request: Request) -> Any:
            return await handler(server, request)

        return run

    server.shows_aborts = with_admin  # a client that pauses the engine wants what the answers have so far
    page, admin = Page().routes if with_page else (), ADMIN_ROUTES if with_admin else ()
    routes, middleware = [*ROUTES, *admin, *page], []
    if origins:
        shown = [REQUEST_ID.decode(), WARNING, "retry-after"]  # to scripts, which see few headers otherwise
        allowed = {"allow_methods": ["GET", "POST"], "allow_headers": ["*"], "expose_headers": shown}
        middleware.append(Middleware(CORSMiddleware, allow_origins=list(origins), **allowed))
    if api_keys:
        middleware.append(Middleware(Keys, keys=api_keys))
    app = Starlette(
        routes=[Route(path, bound(handler), methods=[method]) for method, path, handler in routes],
        middleware=middleware,
        exception_handlers={ApiError: show_api_error, HTTPException: show_http_error, Exception: show_failure},
    )
    app.router.redirect_slashes = False  # to the address that a proxy asked for, which is none of the client's
    return Outermost(app, AccessLog() if access_log else None)
