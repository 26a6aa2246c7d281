"""What the routes share: the engine's client, the model, metrics, limits, and the way of a request to its answer."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from pagedkv.engine.client import EngineClient
from pagedkv.engine.sampling_params import SamplingParams

from .answers import Answers, Piece
from .errors import ApiError
from .gate import Gate
from .metrics import Metrics
from .model import ServedModel
from .schema import Generation, check_stream_options, read, salt_of
from .sse import EVENTS, JSON, EventWriter, Reply, event, named_events

T = TypeVar("T")
WARNING = "x-pagedkv-warning"


def warn(headers: dict[str, str], ignored: list[str]) -> None:
    """Names what of a request has no effect."""
    if ignored:
        before = f"{headers[WARNING]}, " if WARNING in headers else "without effect: "
        headers[WARNING] = before + ", ".join(ignored)


@dataclass
class Server:
    """Args:
    max_body_size: bytes of a request
    max_answers: in work or waiting at a time; more are told to come later
    counts, place: of Gate, where there are other front ends
    max_waiting: while more answers wait in the engine, requests are told to come later; None: no matter how many
    stuck_after: seconds of a step, after which the engine is taken for stuck
    keep_alive: see Reply
    """

    client: EngineClient
    model: ServedModel
    max_body_size: int = 8 << 20
    max_answers: int = 1024
    counts: int | None = None
    place: int = 0
    max_waiting: int | None = None
    stuck_after: float = 120.0
    keep_alive: float = 15.0
    is_draining: bool = False
    shows_aborts: bool = False  # of completions and chats: see Answers
    gate: Gate = field(init=False)
    metrics: Metrics = field(init=False)

    def __post_init__(self) -> None:
        self.gate = Gate(self.max_answers, self.counts, self.place)
        self.metrics = Metrics(self.client, self.model.name)

    async def read(self, request: Request, kind: type[T]) -> tuple[T, dict[str, str]]:
        """The body of a request, and headers for its answer."""
        body, ignored = read(await self.body(request), kind)
        headers: dict[str, str] = {}
        warn(headers, ignored)
        return body, headers

    async def body(self, request: Request) -> bytes:
        parts, size, coding = [], 0, request.headers.get("content-encoding", "identity")
        if coding.lower() != "identity":
            raise ApiError(400, f"the body has the content-encoding {coding[:100]!r}, which is not read")
        try:
            async for part in request.stream():
                size += len(part)
                if size > self.max_body_size:
                    raise ApiError(413, f"the body is larger than {self.max_body_size:,} bytes (--max-body-size)")
                parts.append(part)
        except ClientDisconnect:
            raise ApiError(400, "the client left before its request was complete") from None  # nobody hears it
        return b"".join(parts)

    def check_queue(self) -> None:
        if self.max_waiting is not None and self.client.stats().num_waiting > self.max_waiting:
            raise ApiError(429, f"more than {self.max_waiting} answers wait (--max-waiting)")

    def reply(
        self, request: Generation, prompts: list[str | list[int]], params: SamplingParams, form: Form,
        headers: dict[str, str],
    ) -> Reply:  # fmt: skip
        options = check_stream_options(request)
        if any(isinstance(each, str) for each in prompts):
            self.model.check_tokenizer()
        answers = self.answers(request, prompts, params, form.name, form.shape_name, shows_aborts=self.shows_aborts)
        if not request.stream:
            return Reply(_whole(answers, form), JSON, headers)
        always = bool(options.continuous_usage_stats)
        parts = _events(answers, form, bool(options.include_usage), always)
        return Reply(parts, EVENTS, headers, keep_alive=self.keep_alive)

    def written(self, answers: Answers, writer: EventWriter, headers: dict[str, str], *, is_stream: bool) -> Reply:
        """One answer, as the writer has it."""
        if not is_stream:
            return Reply(_written(answers, writer), JSON, headers)
        parts = named_events(answers.pieces(), writer)
        return Reply(parts, EVENTS, headers, last=writer.last, keep_alive=self.keep_alive)

    def answers(
        self, request: Generation, prompts: list[str | list[int]], params: SamplingParams, name: str,
        shape_name: str, *, shows_aborts: bool = False,
    ) -> Answers:  # fmt: skip
        """name: of the model; shape_name: see Answers."""
        self.check_queue()
        return Answers(
            self.client, self.gate, prompts, params, priority=request.priority or 0,
            salt=salt_of(request.cache_salt), lora_request=self.model.adapters.get(name), shape_name=shape_name,
            shows_aborts=shows_aborts,
        )  # fmt: skip


class Form(ABC):
    """How answers are written: those of completions, or of chats."""

    prefix: str  # of ids
    whole_object: str
    chunk_object: str

    def __init__(self, server: Server, request: Generation, name: str, shape_name: str) -> None:
        self.model, self.request = server.model, request
        self.name, self.shape_name = name, shape_name  # see Server.answers()
        self._id, self._created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())

    def envelope(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """`choices` come last: see _events()."""
        return {"id": self._id, "object": kind, "created": self._created, "model": self.name, "choices": choices}

    @abstractmethod
    def choice(self, piece: Piece, answers: Answers) -> dict[str, Any]:
        """A whole answer."""

    @abstractmethod
    def chunks(self, piece: Piece, answers: Answers) -> list[dict[str, Any]]:
        """What is new of a streamed one; empty where nothing of it is shown."""

    def extra(self, answers: Answers) -> dict[str, Any]:
        """Beside the choices of whole answers."""
        return {}

    def usage(self, answers: Answers) -> dict[str, Any]:
        return answers.usage()

    def is_shown(self, piece: Piece) -> bool:
        return bool(piece.text or piece.finish_reason or piece.logprobs or self.request.return_token_ids)

    def add_end(self, choice: dict[str, Any], piece: Piece) -> dict[str, Any]:
        choice |= {"finish_reason": piece.finish_reason, "stop_reason": piece.stop_reason}
        if self.request.return_token_ids:
            choice |= {"token_ids": piece.token_ids, "weight_version": piece.weight_version}
        return choice


async def _written(answers: Answers, writer: EventWriter) -> AsyncGenerator[bytes, None]:
    (piece,) = await answers.whole()
    writer.take(piece)
    yield msgspec.json.encode(writer.whole())


async def _whole(answers: Answers, form: Form) -> AsyncGenerator[bytes, None]:
    pieces = await answers.whole()
    value = form.envelope(form.whole_object, [form.choice(each, answers) for each in pieces])
    yield msgspec.json.encode(value | form.extra(answers) | {"usage": form.usage(answers)})


async def _events(answers: Answers, form: Form, with_usage: bool, always: bool) -> AsyncGenerator[bytes, None]:
    """All that is new at a time is one part, and so one write. What the events have in common is encoded once."""
    encode = msgspec.json.Encoder().encode
    before = b"data: " + encode(form.envelope(form.chunk_object, [])).removesuffix(b"]}")
    after = b'],"usage":null}\n\n' if with_usage else b"]}\n\n"
    async with aclosing(answers.pieces()) as all_pieces:
        async for pieces in all_pieces:
            choices = [choice for piece in pieces for choice in form.chunks(piece, answers)]
            if not choices:
                continue
            if always:
                after = b'],"usage":' + encode(form.usage(answers)) + b"}\n\n"
            yield b"".join([before + encode(each) + after for each in choices])
    if with_usage:
        yield event(form.envelope(form.chunk_object, []) | {"usage": form.usage(answers)})
