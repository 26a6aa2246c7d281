"""/v1/chat/completions: an answer to messages."""

from __future__ import annotations

import uuid
from typing import Any

from starlette.requests import Request

from .answers import Answers, Piece
from .formats import CallFormat
from .logprobs import chat_logprobs
from .parser import Event, Parser
from .schema import ChatRequest
from .server import Form, Server
from .sse import Reply
from .turn import ThoughtCounter, Turn, prepare


async def chat(server: Server, request: Request) -> Reply:
    body, headers = await server.read(request, ChatRequest)
    turn = await prepare(server, body, headers)
    return server.reply(body, [turn.prompt], turn.params, ChatForm(server, body, turn), headers)


class ChatForm(Form):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    request: ChatRequest

    def __init__(self, server: Server, request: ChatRequest, turn: Turn) -> None:
        super().__init__(server, request, turn.name, turn.shape_name)
        self._turn = turn
        self._parsers: dict[int, Parser] = {}  # by answer; one whose first chunk is written has one
        self._thoughts: dict[int, ThoughtCounter] = {}

    def choice(self, piece: Piece, answers: Answers) -> dict[str, Any]:
        parser = self._turn.parser()
        message = message_of(self._read(piece, parser), self._turn.calls)
        choice = {"index": piece.index, "message": message, "logprobs": self._logprobs(piece)}
        return self._add_end(choice, piece, parser)

    def extra(self, answers: Answers) -> dict[str, Any]:
        return {"prompt_token_ids": answers.prompt_token_ids[0]} if self.request.return_token_ids else {}

    def chunks(self, piece: Piece, answers: Answers) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        parser = self._parsers.get(piece.index)
        if parser is None:
            parser = self._parsers[piece.index] = self._turn.parser()
            first = {"role": "assistant", "content": ""}
            chunks.append({"index": piece.index, "delta": first, "logprobs": None, "finish_reason": None})
            if self.request.return_token_ids:
                chunks[0]["prompt_token_ids"] = answers.prompt_token_ids[0]
        delta = _delta(self._read(piece, parser), self._turn.calls)
        if delta or piece.finish_reason or piece.logprobs or self.request.return_token_ids:
            chunk = {"index": piece.index, "delta": delta, "logprobs": self._logprobs(piece)}
            chunks.append(self._add_end(chunk, piece, parser))
        return chunks

    def usage(self, answers: Answers) -> dict[str, Any]:
        usage = super().usage(answers)
        if self._turn.start != "answer":
            count = sum(each.count for each in self._thoughts.values())
            usage["completion_tokens_details"] = {"reasoning_tokens": count}
        return usage

    def _read(self, piece: Piece, parser: Parser) -> list[Event]:
        events = parser.feed(piece.text, is_last=piece.finish_reason is not None)
        counter = self._thoughts.setdefault(piece.index, ThoughtCounter(self._turn))
        counter.take(piece.token_ids, parser)
        return events

    def _add_end(self, choice: dict[str, Any], piece: Piece, parser: Parser) -> dict[str, Any]:
        self.add_end(choice, piece)
        if piece.finish_reason == "stop" and parser.num_calls and not parser.is_in_arguments:
            choice["finish_reason"] = "tool_calls"
        return choice

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not piece.logprobs:
            return None
        return chat_logprobs(self.model, piece.token_ids, piece.logprobs, self.request.top_logprobs or 0)


def call_id(calls: CallFormat | None, prefix: str = "call_") -> str:
    length = calls.id_length if calls is not None else None
    return uuid.uuid4().hex[:length] if length else prefix + uuid.uuid4().hex[:24]


def message_of(events: list[Event], calls: CallFormat | None) -> dict[str, Any]:
    """Content is null where there is nothing but thoughts or calls."""
    delta = _delta(events, calls)
    message = {"role": "assistant", "content": delta.pop("content", None if delta else ""), "refusal": None}
    for call in delta.get("tool_calls", ()):
        del call["index"]
    return message | delta


def _delta(events: list[Event], calls: CallFormat | None) -> dict[str, Any]:
    """Thoughts have two names: clients read one or the other."""
    delta: dict[str, Any] = {}
    found: dict[int, dict[str, Any]] = {}
    for kind, text, number in events:
        if kind == "call":
            function = {"name": text, "arguments": ""}
            found[number] = {"index": number, "id": call_id(calls), "type": "function", "function": function}
        elif kind == "custom":
            custom = {"name": text, "input": ""}
            found[number] = {"index": number, "id": call_id(calls), "type": "custom", "custom": custom}
        elif kind in ("arguments", "input"):
            place = "function" if kind == "arguments" else "custom"
            found.setdefault(number, {"index": number, place: {kind: ""}})[place][kind] += text
        else:
            for name in ("reasoning_content", "reasoning") if kind == "reasoning" else ("content",):
                delta[name] = delta.get(name, "") + text
    if found:
        delta["tool_calls"] = list(found.values())
    return delta
