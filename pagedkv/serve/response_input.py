"""The input of /v1/responses as messages of a chat, and its tools as those of a chat."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from .custom_tools import arguments_of
from .errors import ApiError

TEXTS = ("input_text", "output_text", "text", "summary_text", "reasoning_text", "refusal")


def messages_of(given: Any, instructions: str | None) -> list[dict[str, Any]]:
    """Of a text, or a list of items."""
    messages = Messages()
    if instructions:
        messages.add("system", instructions)
    if isinstance(given, str):
        messages.add("user", given)
    elif isinstance(given, list) and given and all(isinstance(item, dict) for item in given):
        for i, item in enumerate(given):
            messages.take(f"input[{i}]", item)
    else:
        missing = " is missing: it" if given is None else ""
        raise ApiError(400, f"input{missing} must be a text or a list of items", param="input")
    return messages.found


def flat_tools(tools: Iterable[dict[str, Any]], given: Any) -> tuple[list[dict[str, Any]], dict[str, dict[str, str]]]:
    """The tools, with those that the input adds, of which those in namespaces have names of both; and, by these names,
    the fields of a call of one."""
    flat, names = list[dict[str, Any]](), dict[str, dict[str, str]]()
    items = [each for each in given if isinstance(each, dict)] if isinstance(given, list) else []
    added = [_tools("input", each) for each in items if each.get("type") == "additional_tools"]
    for tool in chain(tools, *added):
        if tool.get("type") != "namespace":
            flat.append(tool)
            continue
        space = tool.get("name")
        for each in _tools("tools", tool):
            flat.append(each | {"name": f"{space}.{each.get('name')}"})
            names[flat[-1]["name"]] = {"name": each.get("name", ""), "namespace": str(space)}
    return flat, names


def _tools(where: str, holder: dict[str, Any]) -> list[dict[str, Any]]:
    tools = holder.get("tools")
    if not isinstance(tools, list) or not all(isinstance(each, dict) for each in tools):
        raise ApiError(400, f"{where}: an item of type {holder['type']!r} has no list of tools", param=where)
    return tools


class Messages:
    """Thoughts, the text and the calls of a turn are items of their own, and one message of a chat."""

    def __init__(self) -> None:
        self.found: list[dict[str, Any]] = []

    def add(self, role: str, content: Any) -> None:
        self.found.append({"role": role, "content": content})

    def take(self, where: str, item: dict[str, Any]) -> None:
        kind = item.get("type", "message")
        if kind == "message":
            self._take_message(where, item)
        elif kind in ("function_call", "custom_tool_call"):
            name = _text(where, item, "name")
            if isinstance(item.get("namespace"), str):  # see flat_tools()
                name = f"{item['namespace']}.{name}"
            is_custom = kind == "custom_tool_call"
            arguments = arguments_of(_text(where, item, "input")) if is_custom else _text(where, item, "arguments")
            function = {"name": name, "arguments": arguments}
            call = {"id": _text(where, item, "call_id"), "type": "function", "function": function}
            self._turn("tool_calls").setdefault("tool_calls", []).append(call)
        elif kind in ("function_call_output", "custom_tool_call_output"):
            content = "\n".join(_texts(f"{where}.output", item.get("output")))
            self.found.append({"role": "tool", "tool_call_id": _text(where, item, "call_id"), "content": content})
        elif kind == "reasoning":
            parts = item.get("content") or item.get("summary") or []
            thoughts = "\n".join(_texts(f"{where}.content", parts))
            if thoughts:
                self.found.append({"role": "assistant", "reasoning_content": thoughts})
        elif kind == "additional_tools":  # see flat_tools()
            return
        else:
            raise ApiError(400, f"{where} is of type {str(kind)[:100]!r}, which is not served", param="input")

    def _take_message(self, where: str, item: dict[str, Any]) -> None:
        role = item.get("role")
        if not isinstance(role, str):
            text = f"{where}: role is {str(role)[:100]!r} but must be a text such as 'user'"
            raise ApiError(400, text, param="input")
        texts = _texts(f"{where}.content", item.get("content"))
        if role == "assistant":
            self._turn("content")["content"] = "".join(texts)
        else:
            self.add(role, "\n".join(texts))

    def _turn(self, new: str) -> dict[str, Any]:
        """The assistant's message that the new part belongs to."""
        last = self.found[-1] if self.found else {}
        goes_on = last.get("role") == "assistant"
        if new == "content":
            goes_on = goes_on and "content" not in last and "tool_calls" not in last
        if not goes_on:
            self.found.append({"role": "assistant"})
        return self.found[-1]


def _texts(where: str, value: Any) -> list[str]:
    """Of a text, or of parts that are texts."""
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ApiError(400, f"{where} must be a text or a list of parts", param="input")
    texts = []
    for part in value:
        kind = part.get("type") if isinstance(part, dict) else None
        text = part.get("refusal" if kind == "refusal" else "text") if kind in TEXTS else None
        if not isinstance(text, str):
            raise ApiError(400, f"{where} has a part of type {str(kind)[:100]!r}: only text is read", param="input")
        texts.append(text)
    return texts


def _text(where: str, item: dict[str, Any], name: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{where}: {name} is {str(value)[:100]!r} but must be a text", param="input")
    return value
