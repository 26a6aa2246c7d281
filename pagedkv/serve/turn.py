"""A turn of a chat, whichever API asks for it: its prompt, how the answer is sampled, and how the answer is read."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from types import MappingProxyType, NoneType
from typing import Any

from pagedkv.engine.requests.prompts import ids_of
from pagedkv.engine.sampling_params import SamplingParams
from pagedkv.engine.text.messages import parse_arguments

from .custom_tools import plain_call
from .errors import ApiError, renamed
from .formats import THINK, THINK_END, CallFormat
from .model import ServedModel
from .parser import Parser
from .schema import ChatRequest, TokenizeRequest, check_messages, params_of
from .server import Server, warn
from .structured import as_format, name_of_shape, of_format, shape_of
from .tools import Tools, grammar_of, read_tools

OWN_NAMES: Mapping[str, str] = MappingProxyType({})
SWITCH = "enable_thinking"  # the variable of templates that can do without thoughts
TAIL = 16  # tokens at the end of a prompt, which show whether it has begun the thoughts


@dataclass
class Turn:
    name: str  # of the model
    prompt: Any  # see encode_chats()
    params: SamplingParams
    tools: Tools
    calls: CallFormat | None  # None: what looks like a call is text
    start: str  # see Parser

    thoughts_end: int | None  # the token
    shape_name: str  # the field that the grammar of the answer comes from

    @property
    def token_ids(self) -> list[int]:
        return ids_of(self.prompt)

    def parser(self) -> Parser:
        start = self.start
        if start == "answer" and self.calls is not None and self.tools.must_be_called:
            start = self.calls.forced
        most = None if self.tools.is_parallel else 1
        return Parser(self.calls, self.tools.schemas, start, most, self.tools.custom)


async def prepare(
    server: Server, body: ChatRequest, headers: dict[str, str], names: Mapping[str, str] = OWN_NAMES
) -> Turn:
    """headers: of the answer; names: what the client calls fields of a chat, where it has sent something else. A body
    that is wrong, or asks for what the model cannot do, raises ApiError."""
    with renamed(names):
        turn = await _prepare(server, body, headers)
    turn.shape_name = names.get(turn.shape_name, turn.shape_name)
    return turn


async def _prepare(server: Server, body: ChatRequest, headers: dict[str, str]) -> Turn:
    name, model = server.model.check_name(body.model), server.model
    if body.top_logprobs and not body.logprobs:
        raise ApiError(400, f"top_logprobs is {body.top_logprobs} but logprobs is not true", param="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    default = model.default_params
    max_tokens = _max_tokens(body, default.max_tokens)
    limit = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    with renamed({"logprobs": "top_logprobs", "max_tokens": limit}):
        params = params_of(body, default, model.vocab_size, max_tokens=max_tokens, logprobs=logprobs)
    tools, shape = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls), shape_of(body)
    template, prompt, start = await asyncio.to_thread(_write, model, body, tools, headers)
    calls = model.call_format(template) if tools.may_be_called else None
    if tools.may_be_called and calls is None:
        text = "tools are given, but the chat template writes none that are known (--tool-call-parser names a format)"
        raise ApiError(400, text, param="tools")
    can_be_strict = calls is not None and calls.trigger is not None and find_spec("xgrammar") is not None
    if tools.strict and not tools.must_be_called and tools.may_be_called and not can_be_strict:
        tools.strict.clear()
        warn(headers, ["tools.strict"])
    if tools.has_grammars and tools.may_be_called:
        warn(headers, ["tools.format"])
    if shape is not None and start == "answer" and calls is None:
        params = replace(params, structured_outputs=shape)
    else:
        grammar = grammar_of(tools, calls, None if shape is None else as_format(shape), start)
        params = params if grammar is None else replace(params, structured_outputs=of_format(grammar))
    if calls is not None and calls.has_special_tokens and body.skip_special_tokens is None:
        params = replace(params, skip_special_tokens=False)
    shape_name = "tools" if shape is None else name_of_shape(body)
    return Turn(name, prompt, params, tools, calls, start, model.token_id(THINK_END), shape_name)


def _write(
    model: ServedModel, body: ChatRequest, tools: Tools, headers: dict[str, str]
) -> tuple[str, Any, str]:
    """The template, the prompt that it writes, and the state in which the answer begins. It may take long."""
    given = tools.definitions if tools.may_be_called else None
    template = model.template(given)
    variables = dict(body.chat_template_kwargs or {})
    _apply_effort(body.reasoning_effort, variables, template, headers)
    messages, prompt = encode_messages(model, body, given, template, variables)
    if not model.has_thoughts(template):
        return template, prompt, "answer"
    goes_on = body.continue_final_message
    return template, prompt, _start(messages[-1]) if goes_on else _start_of_ids(model.decode(prompt[-TAIL:]))


def encode_messages(
    model: ServedModel, body: ChatRequest | TokenizeRequest, tools: list[dict[str, Any]] | None, template: str,
    variables: Mapping[str, Any] | None,
) -> tuple[list[dict[str, Any]], Any]:  # fmt: skip
    """The messages as the template gets them, and the prompt: see encode_chats()."""
    messages = _messages(check_messages(body.messages), template)
    goes_on = body.continue_final_message
    return messages, model.encode_chat(messages, variables, body.add_generation_prompt, goes_on, tools)


def _max_tokens(body: ChatRequest, default: int | None) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(400, f"max_tokens is {old} but max_completion_tokens is {new}", param="max_completion_tokens")
    given = old if new is None else new
    return default if given is None else given


def _apply_effort(effort: str | None, variables: dict[str, Any], template: str, headers: dict[str, str]) -> None:
    """reasoning_effort for templates that know of it, and "none" for those that can do without thoughts."""
    if effort is None:
        return
    if "reasoning_effort" in template:
        variables.setdefault("reasoning_effort", effort)
    elif effort == "none" and SWITCH in template:
        variables.setdefault(SWITCH, False)
    else:
        warn(headers, ["reasoning_effort"])


def _messages(messages: list[dict[str, Any]], template: str) -> list[dict[str, Any]]:
    """With the arguments of calls as dicts, which some templates need and others write as JSON; calls of custom tools
    as those of functions; and "system" for the role "developer", which few templates know."""
    if '"developer"' not in template and "'developer'" not in template:
        messages = [{**each, "role": "system"} if each.get("role") == "developer" else each for each in messages]
    for i, message in enumerate(messages):
        content, calls = message.get("content"), message.get("tool_calls")
        if not isinstance(content, (str, list, NoneType)):  # a template would write it as Python does
            text = f"messages[{i}]: content is of type {type(content).__name__!r} but must be a text or a list of parts"
            raise ApiError(400, text, param="messages")
        if calls is not None and not (isinstance(calls, list) and all(isinstance(each, dict) for each in calls)):
            raise ApiError(400, f"messages[{i}]: tool_calls is no list of calls", param="messages")
    called = [[plain_call(each) for each in message.get("tool_calls") or ()] for message in messages]
    return parse_arguments([m | {"tool_calls": c} if c else m for m, c in zip(messages, called, strict=True)])


def _start_of_ids(tail: str) -> str:
    """Of a prompt that ends so."""
    tail = tail.rstrip()
    if tail.endswith(THINK):
        return "think"
    return "answer" if tail.endswith(THINK_END) else "begin"


def _start(message: dict[str, Any]) -> str:
    """Of an answer that goes on with a message."""
    content = message.get("content")
    text = content if isinstance(content, str) else ""
    if text.rfind(THINK) > text.rfind(THINK_END):
        return "think"
    return "answer" if text.strip() else "begin"


class ThoughtCounter:
    """How many tokens of an answer are thoughts; 0 where their end is no token of its own."""

    def __init__(self, turn: Turn) -> None:
        self._end = turn.thoughts_end
        self._is_open = turn.start != "answer" and self._end is not None
        self._has_begun = turn.start == "think"
        self._num_open = self._num_ended = 0

    def take(self, token_ids: list[int], parser: Parser) -> None:
        if not self._is_open:
            return
        self._has_begun |= parser.is_thinking
        if self._end in token_ids:
            self._is_open, self._num_ended = False, self._num_open + token_ids.index(self._end) + 1
        self._num_open += len(token_ids)

    @property
    def count(self) -> int:
        return self._num_open if self._is_open and self._has_begun else self._num_ended
