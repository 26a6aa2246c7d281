"""Batches in OpenAI's form: a file of requests becomes a file of answers, and a run that was killed goes on.

An answer is one write of one line, behind all that were there. A line that a kill has cut is the last one, and is
written again. So each request is answered once.
"""

from __future__ import annotations

import asyncio
import codecs
import fcntl
import json
import os
import stat
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

URLS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/embeddings")
ENDED = 503  # of a server that serves nothing any more
START = b'{"id":"batch_req_'  # of an answer's line


@dataclass
class RequestFile:
    """The requests of a file, all of which are checked before the first is answered. Their bodies stay in the file."""

    path: Path
    ids: dict[str, None] = field(default_factory=dict)  # an ordered set
    models: dict[str, None] = field(default_factory=dict)  # an ordered set: those that are named

    def __post_init__(self) -> None:
        if self.path.is_fifo():  # what is read once is gone, and nothing would be answered
            raise ValueError(f"{self.path}: a pipe, but requests are read more than once: give a file")
        for number, request in self._lines():
            where, custom_id = f"{self.path}:{number}", request.get("custom_id")
            if not isinstance(custom_id, str) or not custom_id:
                raise ValueError(f"{where}: custom_id is {custom_id!r} but must be a text")
            if custom_id in self.ids:
                raise ValueError(f"{where}: custom_id is {custom_id!r}, as in a line before")
            if request.get("method", "POST") != "POST" or request.get("url") not in URLS:
                text = f"{request.get('method', 'POST')} {request.get('url')}"
                raise ValueError(f"{where}: {text} is not served; served is POST with {', '.join(URLS)}")
            body = request.get("body")
            if not isinstance(body, dict):
                raise ValueError(f"{where}: body is missing, or no JSON object")
            if body.get("stream"):
                raise ValueError(f"{where}: stream is true, but an answer is a line of a file")
            self.ids[custom_id] = None
            if isinstance(body.get("model"), str):
                self.models[body["model"]] = None

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for _, request in self._lines():
            yield request

    def _lines(self) -> Iterator[tuple[int, dict[str, Any]]]:
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, _object(f"{self.path}:{number}", line)


class AnswerFile:
    """The file of answers: what is there is kept. Nobody else may write it meanwhile."""

    def __init__(self, path: Path, known: dict[str, None]) -> None:
        self.path, self.done = path, set[str]()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            if not stat.S_ISREG(os.fstat(self._file).st_mode):
                raise ValueError(f"{path}: no file that answers can be kept in")
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            self._read(known)
        except BlockingIOError:
            os.close(self._file)
            raise ValueError(f"{path}: another process writes it") from None
        except BaseException:
            os.close(self._file)
            raise

    def _read(self, known: dict[str, None]) -> None:
        end = 0
        with open(self.path, "rb") as file:
            for number, line in enumerate(file, 1):
                where = f"{self.path}:{number}"
                if not line.startswith(START[: len(line)]):  # somebody else wrote it, and wants to keep it
                    raise ValueError(f"{where}: no answer of a batch")
                if not line.endswith(b"\n"):  # cut by a kill
                    break
                custom_id = _object(where, line).get("custom_id")
                if not isinstance(custom_id, str) or custom_id not in known:
                    raise ValueError(f"{where}: custom_id is {custom_id!r}, which is none of the requests")
                if custom_id in self.done:
                    raise ValueError(f"{where}: custom_id is {custom_id!r}, as in a line before")
                self.done.add(custom_id)
                end += len(line)
        os.ftruncate(self._file, end)

    def add(self, custom_id: str, status: int, body: Any) -> None:
        response = {"status_code": status, "request_id": f"req_{uuid.uuid4().hex}", "body": body}
        row = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": custom_id, "response": response, "error": None}
        size, rest = os.fstat(self._file).st_size, memoryview(msgspec.json.encode(row) + b"\n")
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except BaseException:  # a full disk
            os.ftruncate(self._file, size)
            raise
        self.done.add(custom_id)

    def close(self) -> None:
        os.fsync(self._file)
        os.close(self._file)


async def answer_all(
    app: Any, requests: RequestFile, answers: AnswerFile, at_a_time: int, tell: Callable[[int], None]
) -> None:
    """Answers those that have no answer yet; tell() gets the status of each. RuntimeError: the engine has ended."""
    places, tasks = asyncio.Semaphore(at_a_time), set[asyncio.Task[None]]()

    async def answer(request: dict[str, Any]) -> None:
        try:
            status, body = await call(app, request["url"], msgspec.json.encode(request["body"]))
        finally:
            places.release()
        if status == ENDED:
            raise RuntimeError(f"the engine has ended: {body}")
        answers.add(request["custom_id"], status, body)
        tell(status)

    try:
        for request in requests:
            if request["custom_id"] in answers.done:
                continue
            await places.acquire()
            for task in [each for each in tasks if each.done()]:
                tasks.discard(task)
                task.result()
            tasks.add(asyncio.create_task(answer(request)))
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def call(app: Any, path: str, body: bytes) -> tuple[int, Any]:
    """The status and the JSON that an ASGI application answers."""
    scope = {
        "type": "http", "asgi": {"version": "3.0"}, "http_version": "1.1", "method": "POST", "scheme": "http",
        "path": path, "raw_path": path.encode(), "root_path": "", "query_string": b"", "client": None, "server": None,
        "headers": [(b"content-type", b"application/json")],
    }  # fmt: skip
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    status, parts = 0, list[bytes]()

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        return dict(await asyncio.get_running_loop().create_future())  # the client never leaves

    async def send(message: dict[str, Any]) -> None:
        nonlocal status
        status = message.get("status", status)
        parts.append(message.get("body", b""))

    try:
        await app(scope, receive, send)
    except Exception:  # Starlette raises it again, for the log, behind the response that tells of it
        if not status:
            raise
    return status, json.loads(b"".join(parts))


def _object(where: str, line: bytes) -> dict[str, Any]:
    try:
        value = msgspec.json.decode(line.removeprefix(codecs.BOM_UTF8))
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:  # ValueError: no UTF-8
        raise ValueError(f"{where}: no JSON: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{where}: no JSON object")
    return value
