"""/v1/responses: OpenAI's newer API for chats. Nothing is stored: each request brings the whole conversation."""

from __future__ import annotations

import time
import uuid
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from .answers import Answers, Piece
from .chat import call_id
from .errors import ApiError, json_response
from .parser import Event
from .response_input import flat_tools, messages_of
from .schema import ChatRequest, Generation, check_stream_options
from .server import Server, warn
from .sse import Reply, named_event
from .turn import ThoughtCounter, Turn, prepare

NAMES = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format"}  # of chats, and here
KINDS = ("function", "custom")  # of tools of the client
# Of the server, which clients offer in every request: the model has none of them to call.
NO_TOOLS = ("web_search", "web_search_preview", "image_generation", "tool_search")

# By the kind of an Event: the type of the item, its field, the events that tell of that, and the prefix of its id.
CALLS = {
    "call": ("function_call", "arguments", "function_call_arguments", "fc"),
    "custom": ("custom_tool_call", "input", "custom_tool_call_input", "ctc"),
}


@dataclass(kw_only=True)
class ResponsesRequest(Generation):
    """max_output_tokens is max_completion_tokens, and text.format is response_format, in another form."""

    input: Any = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    truncation: str | None = None
    metadata: dict[str, str] | None = None  # comes back in the response
    chat_template_kwargs: dict[str, Any] | None = None

    @cached_property
    def tools_and_names(self) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]]]:
        return flat_tools(self.tools or (), self.input)


async def responses(server: Server, request: Request) -> Reply:
    body, headers = await server.read(request, ResponsesRequest)
    turn = await _prepare(server, body, headers)
    answers = server.answers(body, [turn.prompt], turn.params, turn.name, turn.shape_name)
    writer = ResponseWriter(body, turn, answers)
    return server.written(answers, writer, headers, is_stream=bool(body.stream))


async def count_tokens(server: Server, request: Request) -> Response:
    body, headers = await server.read(request, ResponsesRequest)
    turn = await _prepare(server, body, headers)
    return json_response({"object": "response.input_tokens", "input_tokens": len(turn.token_ids)}, headers=headers)


async def _prepare(server: Server, body: ResponsesRequest, headers: dict[str, str]) -> Turn:
    """The turn. Where its prompt is too long and may be cut, it begins with a later message of the user: the first one
    from which on there is room for it and, up to half of the context, for what it asks for."""
    if body.truncation not in (None, "auto", "disabled"):
        raise ApiError(400, f"truncation is {body.truncation[:100]!r} but must be auto or disabled", param="truncation")
    chat, most = as_chat(body, headers), server.model.max_model_len
    most -= min(max(body.max_output_tokens or 1, 1), max(most // 2, 1))
    turn = await prepare(server, chat, headers, NAMES)
    if body.truncation != "auto" or len(turn.token_ids) <= most:
        return turn
    given = chat.messages or []
    starts = [i for i, each in enumerate(given) if each["role"] == "user"]
    head = [each for each in given[: starts[0] if starts else 0] if each["role"] in ("system", "developer")]

    async def cut(number: int) -> Turn:
        chat.messages = head + given[starts[number] :]
        return await prepare(server, chat, {}, NAMES)

    low, high = 0, len(starts) - 1  # the last message stays, whether it fits or not
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if len((await cut(middle)).token_ids) <= most else (middle, high)
    return await cut(high) if high > low else turn


def as_chat(body: ResponsesRequest, headers: dict[str, str]) -> ChatRequest:
    if body.n not in (None, 1):
        raise ApiError(400, f"n is {body.n}, but a response is one answer", param="n")
    check_stream_options(body)
    common = {each.name: getattr(body, each.name) for each in fields(Generation)}
    form = (body.text or {}).get("format")
    if form is not None:
        common["response_format"] = _response_format(form)
    effort = (body.reasoning or {}).get("effort")
    if not isinstance(effort, str | None):
        raise ApiError(400, "reasoning.effort must be a text", param="reasoning")
    choice = body.tool_choice
    if isinstance(choice, dict):
        choice = _choice(choice)
    tools, _ = body.tools_and_names
    warn(headers, [f"tools.{each['type']}" for each in tools if each.get("type") in NO_TOOLS])
    return ChatRequest(
        **common, messages=messages_of(body.input, body.instructions), max_completion_tokens=body.max_output_tokens,
        tools=[_tool(each) for each in tools if each.get("type") not in NO_TOOLS], tool_choice=choice,
        parallel_tool_calls=body.parallel_tool_calls, reasoning_effort=effort,
        chat_template_kwargs=body.chat_template_kwargs,
    )  # fmt: skip


def _response_format(form: Any) -> dict[str, Any]:
    if not isinstance(form, dict):
        raise ApiError(400, "text.format is no object", param="text")
    if form.get("type") != "json_schema":
        return form
    return {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    """As chats have it."""
    if choice.get("type") == "allowed_tools" and isinstance(choice.get("tools"), list):
        allowed = [_tool(each) if isinstance(each, dict) else each for each in choice["tools"]]
        return {"type": "allowed_tools", "allowed_tools": {"mode": choice.get("mode"), "tools": allowed}}
    return _tool(choice)


def _tool(tool: dict[str, Any]) -> dict[str, Any]:
    """A tool, or the choice of one, as chats have it."""
    kind = tool.get("type")
    if kind not in KINDS or kind in tool:
        return tool
    return {"type": kind, kind: {key: value for key, value in tool.items() if key != "type"}}


class ResponseWriter:
    """Makes items of the parts of an answer, and the events that tell of them. Whole responses leave the events out."""

    def __init__(self, body: ResponsesRequest, turn: Turn, answers: Answers) -> None:
        self._body, self._turn, self._answers = body, turn, answers
        self._parser, self._thoughts = turn.parser(), ThoughtCounter(turn)
        _, self._names = body.tools_and_names
        self._id, self._created = f"resp_{uuid.uuid4().hex}", int(time.time())
        self._status = "in_progress"
        self._error: dict[str, str] | None = None
        self._items: list[dict[str, Any]] = []
        self._kind = ""  # of the last item, while it is open
        self._number = 0
        self.events: list[dict[str, Any]] = []

    def take(self, piece: Piece) -> None:
        self._begin()
        for event in self._parser.feed(piece.text, is_last=piece.finish_reason is not None):
            self._take(event)
        self._thoughts.take(piece.token_ids, self._parser)
        if piece.finish_reason is not None:
            self._status = "incomplete" if piece.finish_reason == "length" else "completed"
            is_cut = self._parser.is_in_arguments if self._kind in CALLS else self._status == "incomplete"
            self._close("incomplete" if is_cut else "completed")
            self._tell(f"response.{self._status}", response=self.whole())

    def _begin(self) -> None:
        """Clients take no other event before these."""
        if not self._number:
            for name in ("created", "in_progress"):
                self._tell(f"response.{name}", response=self.whole())

    def last(self, error: ApiError | None) -> bytes:
        if error is None:
            return b""
        self._begin()  # a stream may have begun with a comment alone
        self._status, self._error = "failed", {"code": "server_error", "message": error.message}
        self._tell("response.failed", response=self.whole())
        return b"".join(map(named_event, self.events))

    def whole(self) -> dict[str, Any]:
        body, params = self._body, self._turn.params
        reasoning = {"effort": None, "summary": None} | (body.reasoning or {})
        is_ended = self._status in ("completed", "incomplete")
        return {
            "id": self._id, "object": "response", "created_at": self._created, "status": self._status,
            "background": False, "error": self._error,
            "incomplete_details": {"reason": "max_output_tokens"} if self._status == "incomplete" else None,
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens, "model": self._turn.name,
            "output": self._items, "parallel_tool_calls": body.parallel_tool_calls is not False,
            "previous_response_id": None, "reasoning": reasoning, "store": False, "temperature": params.temperature,
            "text": {"format": {"type": "text"}} | (body.text or {}), "tool_choice": body.tool_choice or "auto",
            "tools": body.tools or [], "top_p": params.top_p, "truncation": body.truncation or "disabled",
            "metadata": body.metadata or {}, "usage": self._usage() if is_ended else None,
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        usage = self._answers.usage()
        return {
            "input_tokens": usage["prompt_tokens"],
            "input_tokens_details": usage["prompt_tokens_details"] | {"cache_write_tokens": 0},
            "output_tokens": usage["completion_tokens"],
            "output_tokens_details": {"reasoning_tokens": self._thoughts.count},
            "total_tokens": usage["total_tokens"],
        }  # fmt: skip

    # --- items

    def _take(self, event: Event) -> None:
        kind = {"arguments": "call", "input": "custom"}.get(event.kind, event.kind)
        if event.kind in CALLS or kind != self._kind:
            self._close("completed")
            self._open(event)
        if event.kind not in CALLS:
            self._add(event.text)

    def _open(self, event: Event) -> None:
        self._kind = event.kind
        number, item = uuid.uuid4().hex, dict[str, Any]()
        if event.kind in CALLS:
            kind, name, _, prefix = CALLS[event.kind]
            item = {
                "type": kind, "id": f"{prefix}_{number}", "call_id": call_id(self._turn.calls),
                **self._names.get(event.text, {"name": event.text}), name: "", "status": "in_progress",
            }  # fmt: skip
        elif event.kind == "reasoning":
            item = {"type": "reasoning", "id": f"rs_{number}", "summary": [], "content": [], "status": "in_progress"}
        else:
            item = {
                "type": "message", "id": f"msg_{number}", "role": "assistant", "content": [], "status": "in_progress",
            }  # fmt: skip
        self._items.append(item)
        self._tell("response.output_item.added", output_index=len(self._items) - 1, item=_copy(item))
        if "content" in item:
            part: dict[str, Any] = {"type": "reasoning_text", "text": ""}
            if event.kind == "content":
                part = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
            item["content"] = [part]
            self._tell("response.content_part.added", **self._place(), content_index=0, part=dict(part))

    def _add(self, text: str) -> None:
        item = self._items[-1]
        if self._kind in CALLS:
            _, name, event, _ = CALLS[self._kind]
            item[name] += text
            self._tell(f"response.{event}.delta", **self._place(), delta=text)
            return
        part = item["content"][0]
        part["text"] += text
        self._tell(f"response.{part['type']}.delta", **self._place(), content_index=0, delta=text, **_logprobs(part))

    def _close(self, status: str) -> None:
        if not self._kind:
            return
        item, place = self._items[-1], self._place()
        item["status"] = status
        if self._kind in CALLS:
            _, name, event, _ = CALLS[self._kind]
            named = {"name": item["name"]} if self._kind == "call" else {}
            self._tell(f"response.{event}.done", **place, **named, **{name: item[name]})
        else:
            part = item["content"][0]
            self._tell(
                f"response.{part['type']}.done", **place, content_index=0, text=part["text"], **_logprobs(part)
            )
            self._tell("response.content_part.done", **place, content_index=0, part=dict(part))
        self._tell("response.output_item.done", output_index=place["output_index"], item=_copy(item))
        self._kind = ""

    def _place(self) -> dict[str, Any]:
        return {"item_id": self._items[-1]["id"], "output_index": len(self._items) - 1}

    def _tell(self, kind: str, **values: Any) -> None:
        if self._body.stream:
            if "response" in values:  # the items go on to change
                values["response"]["output"] = list(map(_copy, values["response"]["output"]))
            self.events.append({"type": kind, "sequence_number": self._number} | values)
        self._number += 1


def _copy(item: dict[str, Any]) -> dict[str, Any]:
    return item | {"content": list(map(dict, item["content"]))} if "content" in item else dict(item)


def _logprobs(part: dict[str, Any]) -> dict[str, Any]:
    """Events of texts have this field, always."""
    return {"logprobs": []} if part["type"] == "output_text" else {}
