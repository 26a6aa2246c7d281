"""What training loops ask of a server, behind --enable-admin: to pause, to sleep, and to take new weights.

Options are in the query, as vLLM's clients have them, or in a JSON body. New weights are files that the engine's
process can read, or a safetensors file as the body, which is kept in a file for as long as the engine reads it.
"""

from __future__ import annotations

import base64
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from pagedkv.models.ipc import IpcTensor
from pagedkv.models.nccl import BroadcastTensor

from .errors import ApiError, json_response, of_request
from .schema import json_object
from .server import Server

FILES = ("application/octet-stream", "application/vnd.safetensors")


async def sleep(server: Server, request: Request) -> Response:
    options = await _options(server, request, {"level": _integer, "mode": _text})
    await _control(server, "sleep", **options)
    return json_response({"is_sleeping": True})


async def wake_up(server: Server, request: Request) -> Response:
    options = await _options(server, request, {"tags": _names})
    await _control(server, "wake_up", **options)
    return json_response({"is_sleeping": await _control(server, "is_sleeping")})


async def is_sleeping(server: Server, request: Request) -> Response:
    return json_response({"is_sleeping": await _control(server, "is_sleeping")})


async def pause(server: Server, request: Request) -> Response:
    given = {"mode": _text, "wait_for_inflight_requests": _flag, "clear_cache": _flag}  # vLLM's
    options = await _options(server, request, given)
    clears, waits = options.pop("clear_cache", False), options.pop("wait_for_inflight_requests", False)
    await _control(server, "pause", **({"mode": "wait"} if waits else {}) | options)
    if clears:
        await _control(server, "reset_prefix_cache")
    return json_response({"status": "paused", "is_paused": True})


async def resume(server: Server, request: Request) -> Response:
    await _control(server, "resume")
    return json_response({"status": "resumed", "is_paused": False})


async def is_paused(server: Server, request: Request) -> Response:
    return json_response({"is_paused": await _control(server, "is_paused")})


async def reset_prefix_cache(server: Server, request: Request) -> Response:
    return json_response({"num_pages": await _control(server, "reset_prefix_cache")})


async def get_weight_version(server: Server, request: Request) -> Response:
    return json_response({"weight_version": await _control(server, "get_weight_version")})


async def update_weight_version(server: Server, request: Request) -> Response:
    options = await _options(server, request, {"weight_version": _version})
    await _control(server, "update_weight_version", **{"weight_version": None} | options)
    return json_response(options)


async def init_weights_update_group(server: Server, request: Request) -> Response:
    kinds = {"unique_id": _base64, "world_size": _integer, "rank_offset": _integer, "timeout": _seconds}
    options = await _options(server, request, kinds)
    for name in ("unique_id", "world_size"):
        if name not in options:
            raise ApiError(400, f"{name} must be given", param=name)
    await _control(server, "init_weights_update_group", **options)
    return json_response(options | {"unique_id": base64.b64encode(options["unique_id"]).decode()})


async def destroy_weights_update_group(server: Server, request: Request) -> Response:
    await _control(server, "destroy_weights_update_group")
    return json_response({})


async def update_weights(server: Server, request: Request) -> Response:
    kind = request.headers.get("content-type", "").partition(";")[0]
    if kind in FILES:
        version = await _update_by_body(server, request)
    else:
        sources = {"path": _text, "tensors": _tensors, "broadcast": _broadcast}
        options = await _options(server, request, sources | {"weight_version": _version})
        given = [name for name in sources if name in options]
        if len(given) != 1:
            text = "path (of a folder, or of a safetensors file), tensors or broadcast must be given, and one of them"
            raise ApiError(400, text, param="path")
        new = options.pop(given[0])
        version = await _control(server, "update_weights", new, **options)
    return json_response({"weight_version": version})


async def start_weight_update(server: Server, request: Request) -> Response:
    await _options(server, request, {"is_checkpoint_format": _is_checkpoint})
    await _control(server, "start_weight_update")
    return json_response({"status": "started"})


async def finish_weight_update(server: Server, request: Request) -> Response:
    options = await _options(server, request, {"weight_version": _version})
    return json_response({"weight_version": await _control(server, "finish_weight_update", **options)})


async def _update_by_body(server: Server, request: Request) -> Any:
    """However large it is: it is as large as the model."""
    options = _checked(dict(request.query_params), {"weight_version": _version})
    with tempfile.NamedTemporaryFile(prefix="pagedkv-", suffix=".safetensors") as file:
        try:
            async for part in request.stream():
                file.write(part)
        except ClientDisconnect:
            raise ApiError(400, "the client left before its request was complete") from None  # nobody hears it
        file.flush()
        return await _control(server, "update_weights", file.name, **options)


# --- options


async def _options(server: Server, request: Request, kinds: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    """Those of the query and of the body, which may be empty."""
    query: dict[str, Any] = {}
    for name, value in request.query_params.multi_items():
        query[name] = [*query[name], value] if name in query else [value]
    given = {name: values if name == "tags" else values[-1] for name, values in query.items()}
    body = await server.body(request)
    if body:
        given |= json_object(body)
    return _checked(given, kinds)


def _checked(given: Mapping[str, Any], kinds: Mapping[str, Callable[[Any], Any]]) -> dict[str, Any]:
    found = {}
    for name, value in given.items():
        if name not in kinds:
            raise ApiError(400, f"{name} is no option of this path; it has {', '.join(kinds)}", param=name)
        if value is not None:
            try:
                found[name] = kinds[name](value)
            except (TypeError, ValueError) as error:
                raise ApiError(400, f"{name} is {value!r} but {error}", param=name) from None
    return found


def _integer(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, (int, str)) or not str(value).isdecimal():
        raise ValueError("must be an integer")
    return int(value)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("must be a text")
    return value


def _names(value: Any) -> list[str]:
    """Of the query: several, or one with commas."""
    if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
        raise ValueError("must be a list of names")
    return [name for each in value for name in each.split(",")]


def _version(value: Any) -> int | str:
    """In a query all are texts, of which digits are a number."""
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise ValueError("must be an integer or a text")
    return int(value) if isinstance(value, str) and value.isdecimal() else value


def _tensors(value: Any) -> dict[str, IpcTensor]:
    """[{"name", "dtype", "shape", "handle" (base64), "offset", "device"}]: of a GPU, in another process."""
    if not isinstance(value, list):
        raise ValueError("must be a list of objects")
    found = {}
    for each in value:
        try:
            handle = base64.b64decode(each["handle"], validate=True)
            where = each.get("offset", 0), each.get("device", "cuda")
            found[each["name"]] = IpcTensor(handle, tuple(each["shape"]), each["dtype"], *where)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"must hold objects with name, dtype, shape and handle in base64: {error!r}") from None
    return found


def _broadcast(value: Any) -> dict[str, BroadcastTensor]:
    """[{"name", "dtype", "shape"}], in the order in which they are sent."""
    if not isinstance(value, list):
        raise ValueError("must be a list of objects")
    try:
        return {each["name"]: BroadcastTensor(tuple(each["shape"]), each["dtype"]) for each in value}
    except (KeyError, TypeError) as error:
        raise ValueError(f"must hold objects with name, dtype and shape: {error!r}") from None


def _base64(value: Any) -> bytes:
    try:
        return base64.b64decode(value, validate=True)
    except (TypeError, ValueError):
        raise ValueError("must be bytes in base64") from None


def _seconds(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ValueError("must be a number")
    return value


def _flag(value: Any) -> bool:
    """In a query a text."""
    if value is True or value is False:
        return bool(value)
    if not isinstance(value, str) or value.lower() not in ("true", "false", "1", "0"):
        raise ValueError("must be true or false")
    return value.lower() in ("true", "1")


def _is_checkpoint(value: Any) -> bool:
    if not _flag(value):
        raise ValueError("must be true: tensors are those of a checkpoint")
    return True


async def _control(server: Server, name: str, *args: Any, **options: Any) -> Any:
    try:
        return await server.client.control(name, *args, **options)
    except (ValueError, TypeError, NotImplementedError, OSError) as error:
        raise of_request(error) from error
    except MemoryError as error:
        raise ApiError(503, f"{name}: {error}") from error
    except RuntimeError as error:
        raise ApiError(503 if _has_ended(server) else 409, f"{name}: {error}") from error


def _has_ended(server: Server) -> bool:
    try:
        server.client.health()
    except RuntimeError:
        return True
    return False


ROUTES = (
    ("POST", "/sleep", sleep), ("POST", "/wake_up", wake_up), ("GET", "/is_sleeping", is_sleeping),
    ("POST", "/pause", pause), ("POST", "/resume", resume), ("GET", "/is_paused", is_paused),
    ("POST", "/reset_prefix_cache", reset_prefix_cache), ("POST", "/update_weights", update_weights),
    ("POST", "/init_weights_update_group", init_weights_update_group),
    ("POST", "/destroy_weights_update_group", destroy_weights_update_group),
    ("POST", "/start_weight_update", start_weight_update), ("POST", "/finish_weight_update", finish_weight_update),
    ("GET", "/weight_version", get_weight_version), ("POST", "/update_weight_version", update_weight_version),
)  # fmt: skip
