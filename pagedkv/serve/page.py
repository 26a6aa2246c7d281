"""The page at /: what the engine does at this moment, and a box to chat in. page.html is all of it.

What it asks for once a second is taken at most once a second, however many look.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

import pagedkv
from pagedkv.engine.requests.view import ANSWER, EngineView

from .errors import ApiError, json_response
from .server import Server

FRESH, PATIENCE = 1.0, 5.0  # seconds of a view until the next one is taken, and to wait for it


class Page:
    def __init__(self) -> None:
        self._html = (Path(__file__).parent / "page.html").read_bytes()
        self._headers = {
            "content-security-policy": _policy(self._html), "referrer-policy": "no-referrer",
            "x-content-type-options": "nosniff", "cache-control": "no-cache",
        }  # fmt: skip
        self._view: asyncio.Task[EngineView] | None = None  # the last one, or the one that is being taken, ...
        self._time = 0.0  # ... since then

    @property
    def routes(self) -> tuple[tuple[str, str, Any], ...]:
        return ("GET", "/", self.html), ("GET", "/page/state", self.state), ("GET", "/page/explain", self.explain)

    async def html(self, server: Server, request: Request) -> Response:
        return Response(self._html, headers=self._headers, media_type="text/html")

    async def state(self, server: Server, request: Request) -> Response:
        view = await self._take(server)
        state = {each.name: getattr(view, each.name) for each in fields(view)}
        for name in ("running", "waiting"):
            state[name] = [dict(zip(ANSWER, each, strict=True)) for each in state[name]]
        return json_response({"model": server.model.name, "version": pagedkv.__version__} | state, headers=NO_STORE)

    async def explain(self, server: Server, request: Request) -> Response:
        """The text is null where no unfinished request has the id: it may have ended since the page heard of it."""
        request_id = request.query_params.get("id")
        if request_id is None:
            raise ApiError(400, "id is missing: a request's, as /page/state has it", param="id")
        try:
            text = await server.client.explain(request_id)
        except RuntimeError as error:
            raise ApiError(503, str(error)) from None
        return json_response({"id": request_id, "text": text}, headers=NO_STORE)

    async def _take(self, server: Server) -> EngineView:
        now = asyncio.get_running_loop().time()
        if self._view is None or (self._view.done() and now - self._time >= FRESH):
            self._view, self._time = asyncio.ensure_future(server.client.view()), now
        view = self._view  # shared by all requests meanwhile: none of them cancels it
        done, _ = await asyncio.wait({view}, timeout=PATIENCE)
        if not done:
            raise ApiError(503, f"the engine has been in a step for more than {PATIENCE:.0f} s")
        try:
            return view.result()
        except RuntimeError as error:
            raise ApiError(503, str(error)) from None


NO_STORE = {"cache-control": "no-store"}


def _policy(html: bytes) -> str:
    """The page's own script and style, and nothing from anywhere else."""

    def allowed(tag: bytes) -> str:
        parts = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), html, re.DOTALL)
        return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(each).digest()).decode()}'" for each in parts)

    return (
        f"default-src 'none'; script-src {allowed(b'script')}; style-src {allowed(b'style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )
