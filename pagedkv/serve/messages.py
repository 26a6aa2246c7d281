"""/v1/messages and its count_tokens: Anthropic's API for chats."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, fields
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .answers import Answers, Piece
from .chat import call_id
from .errors import ApiError, json_response
from .message_input import messages_of, offered_tools
from .parser import Event
from .schema import ChatRequest, Generation
from .server import Server
from .sse import Reply, named_event
from .turn import SWITCH, Turn, prepare

NAMES = {"stop": "stop_sequences", "response_format": "output_config.format"}  # of chats, and here
CHOICES = {"auto": "auto", "any": "required", "none": "none"}


@dataclass(kw_only=True)
class MessagesRequest(Generation):
    system: str | list[dict[str, Any]] | None = None
    messages: list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    output_format: dict[str, Any] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


async def messages(server: Server, request: Request) -> Reply:
    body, headers = await server.read(request, MessagesRequest)
    if body.max_tokens is None:
        raise ApiError(400, "max_tokens is missing", param="max_tokens")
    turn = await prepare(server, as_chat(server, body), headers, NAMES)
    answers = server.answers(body, [turn.prompt], turn.params, turn.name, turn.shape_name)
    writer = MessageWriter(turn, answers)
    return server.written(answers, writer, headers, is_stream=bool(body.stream))


async def count_tokens(server: Server, request: Request) -> Response:
    body, headers = await server.read(request, MessagesRequest)
    turn = await prepare(server, as_chat(server, body), headers, NAMES)
    return json_response({"input_tokens": len(turn.token_ids)}, headers=headers)


def as_chat(server: Server, body: MessagesRequest) -> ChatRequest:
    if body.n not in (None, 1):
        raise ApiError(400, f"n is {body.n}, but a message is one answer", param="n")
    common = {each.name: getattr(body, each.name) for each in fields(Generation)}
    if body.stop_sequences is not None:
        common["stop"] = body.stop_sequences
    config = body.output_config or {}
    form = body.output_format or config.get("format")
    if form is not None:
        if not isinstance(form, dict) or form.get("type") != "json_schema":
            raise ApiError(400, "output_config.format must be of type 'json_schema'", param="output_config")
        common["response_format"] = {"type": "json_schema", "json_schema": {"schema": form.get("schema")}}
    effort = config.get("effort")
    if not isinstance(effort, str | None):
        raise ApiError(400, "output_config.effort must be a text", param="output_config")
    chat = messages_of(body.messages, body.system)
    goes_on = chat[-1]["role"] == "assistant" and bool(chat[-1].get("content"))
    choice, is_parallel = _choice(body.tool_choice)
    tools = offered_tools(body.tools or (), body.messages or ())
    return ChatRequest(
        **common, messages=chat, tools=[_tool(i, each) for i, each in enumerate(tools)], tool_choice=choice,
        parallel_tool_calls=is_parallel, reasoning_effort=effort, chat_template_kwargs=_variables(server, body),
        continue_final_message=goes_on, add_generation_prompt=not goes_on,
    )  # fmt: skip


def _variables(server: Server, body: MessagesRequest) -> dict[str, Any]:
    """thinking, for templates that have a switch for it."""
    variables = dict(body.chat_template_kwargs or {})
    kind = (body.thinking or {}).get("type")
    if kind not in (None, "enabled", "disabled", "adaptive", "between_tools"):
        text = f"thinking.type is {str(kind)[:100]!r} but must be enabled, disabled, adaptive or between_tools"
        raise ApiError(400, text, param="thinking")
    if kind in ("enabled", "disabled") and SWITCH in server.model.template(body.tools or None):
        variables.setdefault(SWITCH, kind == "enabled")
    return variables


def _tool(i: int, tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        text = f"tools[{i}] is of type {str(tool.get('type'))[:100]!r}: only tools of the client are served"
        raise ApiError(400, text, param="tools")
    function = {key: tool[key] for key in ("name", "description", "strict") if key in tool}
    return {"type": "function", "function": function | {"parameters": tool.get("input_schema")}}


def _choice(choice: dict[str, Any] | None) -> tuple[Any, bool | None]:
    """tool_choice and parallel_tool_calls in OpenAI's form."""
    if choice is None:
        return None, None
    kind, is_parallel = choice.get("type"), choice.get("disable_parallel_tool_use") is not True
    if kind == "tool":
        return {"type": "function", "function": {"name": choice.get("name")}}, is_parallel
    if not isinstance(kind, str) or kind not in CHOICES:
        text = f"tool_choice.type is {str(kind)[:100]!r} but must be one of {', '.join(CHOICES)}, tool"
        raise ApiError(400, text, param="tool_choice")
    return CHOICES[kind], is_parallel


class MessageWriter:
    """Makes blocks of the parts of an answer, and the events that tell of them. Whole messages leave the events out."""

    def __init__(self, turn: Turn, answers: Answers) -> None:
        self._turn, self._answers, self._parser = turn, answers, turn.parser()
        self._id = f"msg_{uuid.uuid4().hex}"
        self._blocks: list[dict[str, Any]] = []
        self._kind = ""  # of the last block, while it is open
        self._end: dict[str, Any] = {"stop_reason": None, "stop_sequence": None}
        self.events: list[dict[str, Any]] = []
        self._has_started = False

    def take(self, piece: Piece) -> None:
        if not self._has_started:
            self._has_started = True
            start = self.whole()
            start["usage"]["output_tokens"] = 0
            self._tell("message_start", message=start)
        for event in self._parser.feed(piece.text, is_last=piece.finish_reason is not None):
            self._take(event)
        if piece.finish_reason is not None:
            self._close()
            self._end = self._end_of(piece)
            self._tell("message_delta", delta=self._end, usage=self._usage())
            self._tell("message_stop")

    def last(self, error: ApiError | None) -> bytes:
        return b"" if error is None else named_event(error.anthropic_body())

    def whole(self) -> dict[str, Any]:
        return {
            "id": self._id, "type": "message", "role": "assistant", "model": self._turn.name,
            "content": [_shown(block) for block in self._blocks], **self._end, "usage": self._usage(),
        }  # fmt: skip

    def _usage(self) -> dict[str, Any]:
        """Tokens that were found in the cache are counted apart."""
        usage = self._answers.usage()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        return {
            "input_tokens": usage["prompt_tokens"] - cached, "output_tokens": usage["completion_tokens"],
            "cache_read_input_tokens": cached, "cache_creation_input_tokens": 0,
        }  # fmt: skip

    def _end_of(self, piece: Piece) -> dict[str, Any]:
        if piece.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if isinstance(piece.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": piece.stop_reason}
        has_calls = self._parser.num_calls and not self._parser.is_in_arguments
        return {"stop_reason": "tool_use" if has_calls else "end_turn", "stop_sequence": None}

    # --- blocks

    def _take(self, event: Event) -> None:
        kind = "call" if event.kind == "arguments" else event.kind
        if event.kind == "call" or kind != self._kind:
            self._close()
            self._open(event)
        if event.kind != "call":
            self._add(event.text)

    def _open(self, event: Event) -> None:
        self._kind = event.kind
        block: dict[str, Any] = {"type": "text", "text": ""}
        if event.kind == "reasoning":
            block = {"type": "thinking", "thinking": "", "signature": ""}
        elif event.kind == "call":
            block = {"type": "tool_use", "id": call_id(self._turn.calls, "toolu_"), "name": event.text, "input": ""}
        self._blocks.append(block)
        shown = block | ({"input": {}} if event.kind == "call" else {})
        self._tell("content_block_start", index=len(self._blocks) - 1, content_block=dict(shown))

    def _add(self, text: str) -> None:
        name, kind = {
            "reasoning": ("thinking", "thinking_delta"), "content": ("text", "text_delta"),
            "call": ("input", "input_json_delta"),
        }[self._kind]  # fmt: skip
        self._blocks[-1][name] += text
        delta = {"type": kind, "partial_json" if self._kind == "call" else name: text}
        self._tell("content_block_delta", index=len(self._blocks) - 1, delta=delta)

    def _close(self) -> None:
        if self._kind:
            self._tell("content_block_stop", index=len(self._blocks) - 1)
        self._kind = ""

    def _tell(self, kind: str, **values: Any) -> None:
        self.events.append({"type": kind} | values)


def _shown(block: dict[str, Any]) -> dict[str, Any]:
    """The input of a tool is an object. What is none, because it was cut or the model erred, is shown as it is."""
    if block["type"] != "tool_use":
        return dict(block)
    try:
        value = msgspec.json.decode(block["input"])  # it refuses what could not be sent: half of a surrogate pair
    except (msgspec.MsgspecError, ValueError, RecursionError):
        value = None
    return block | {"input": value if isinstance(value, dict) else {"invalid_json": block["input"]}}
