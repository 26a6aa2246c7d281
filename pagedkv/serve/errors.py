"""Errors in OpenAI's form: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from pagedkv import OutOfBlocks

logger = logging.getLogger(__name__)

TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    409: "invalid_request_error", 413: "invalid_request_error", 429: "rate_limit_error",
    503: "service_unavailable_error",
}  # fmt: skip

ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


ENDED = "the server has ended this answer"
TOO_LONG = "context_length_exceeded"  # agents know OpenAI's code, and shorten


class ApiError(Exception):
    """What a client is told instead of an answer.

    param: the field of the request that is wrong; code: a word for programs.
    """

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code

    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        kind = ANTHROPIC_TYPES.get(self.status, "api_error")
        # Agents know Anthropic's own words, and shorten.
        text = f"prompt is too long: {self.message}" if self.code == TOO_LONG else self.message
        error: dict[str, Any] = {"type": kind, "message": text}
        if self.param == "thread":  # on this word Anthropic's client asks again, with the whole conversation
            error["details"] = {"error_code": "thread_unsupported_request"}
        return {"type": "error", "error": error, "request_id": None}

    def response(self, path: str) -> Response:
        """In the form of the API that the path belongs to."""
        headers = {429: {"retry-after": "1"}, 401: {"www-authenticate": "Bearer"}}.get(self.status)
        body = self.anthropic_body() if path.startswith("/v1/messages") else self.body()
        return json_response(body, self.status, headers)


def json_response(value: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(msgspec.json.encode(value), status, headers, media_type="application/json")


def of_request(error: Exception, where: str = "") -> ApiError:
    """Of what checks say of a request. Most messages begin with the name of an argument, and its value follows. To one
    that does not, `where` is added, such as "prompt[3]"."""
    message = str(error) or type(error).__name__
    code = TOO_LONG if "exceed max_model_len" in message else None
    name = re.compile(r"([a-z_]+)(\[[^]]*\]|\.[a-z_]+)*( (is|holds|has)|(?<=\]):) ")
    if where and not name.match(message):
        message = f"{where}: {message}"
    named = name.match(message)
    return ApiError(400, message, param=named[1] if named else None, code=code)


@contextmanager
def renamed(names: Mapping[str, str]) -> Iterator[None]:
    """An ApiError within it is told by the names that its client uses. names: a field, or the path of one, by the name
    that the checks know it by."""
    try:
        yield
    except ApiError as error:
        if error.param is None or error.param not in names:
            raise
        name = names[error.param]
        text = re.sub(rf"\b{error.param}\b", name, error.message, count=1)
        raise ApiError(error.status, text, param=name.partition(".")[0], code=error.code) from None


def of_engine(error: Exception, where: str = "") -> ApiError:
    """Of the error in an output: one that cannot be served is the client's, and anything else is logged here."""
    if isinstance(error, (ValueError, OutOfBlocks)):
        return of_request(error, where)
    if isinstance(error, CancelledError):
        return ApiError(503, ENDED)
    logger.error("a request failed", exc_info=error)
    return ApiError(500, f"the request failed: {type(error).__name__}: {error}")


async def show_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.url.path)


async def show_http_error(request: Request, error: Exception) -> Response:
    """Starlette's own: no such route, another method."""
    assert isinstance(error, HTTPException)
    text = f"{request.method} {request.url.path}: {error.detail}"
    response = ApiError(error.status_code, text).response(request.url.path)
    response.headers.update(error.headers or {})
    return response


async def show_failure(request: Request, error: Exception) -> Response:
    """Starlette raises the error again afterwards, and the server logs it."""
    return ApiError(500, f"the server failed: {type(error).__name__}").response(request.url.path)
