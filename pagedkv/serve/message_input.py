"""The messages of /v1/messages as messages of a chat in OpenAI's form."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from .errors import ApiError
from .schema import check_messages

ROLES = ("user", "assistant", "system")
CHANGES = ("tool_addition", "tool_removal")  # blocks of the system: see offered_tools()
NAMES_OF_TEXT = {"text": "text", "tool_reference": "tool_name"}  # the latter: a search has found that tool


def messages_of(messages: list[dict[str, Any]] | None, system: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if system:
        found.append({"role": "system", "content": "\n".join(_texts("system", system))})
    last = max((i for i, each in enumerate(check_messages(messages)) if each.get("role") == "user"), default=0)
    for i, message in enumerate(messages or ()):
        if message.get("clear_at") == "next_user_message" and i < last:
            continue
        where, role, content = f"messages[{i}]", message.get("role"), message.get("content")
        if role not in ROLES:
            raise ApiError(400, f"{where}: role is {str(role)[:100]!r} but must be user or assistant", param="messages")
        if isinstance(content, str):
            found.append({"role": role, "content": content})
        elif not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
            raise ApiError(400, f"{where}: content must be a text or a list of blocks", param="messages")
        elif role == "assistant":
            found.append(_assistant(where, content))
        else:
            found += _user(where, str(role), content)
    return check_messages(found)


def offered_tools(tools: Iterable[dict[str, Any]], messages: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools after all that messages of the system add or remove. Deferred ones are there from the start."""
    found = list(tools)
    known = list(found)
    contents = [each.get("content") for each in messages if each.get("role") == "system"]
    for block in (block for content in contents if isinstance(content, list) for block in content):
        if not isinstance(block, dict) or block.get("type") not in CHANGES:
            continue
        tool = block["tool"] if isinstance(block.get("tool"), dict) else {}
        if isinstance(tool.get("definition"), dict):
            tool = tool["definition"]
            known.append(tool)
        own = [each for each in known if each.get("name") == tool.get("name")]
        if not own:
            text = f"{block['type']} names the tool {str(tool.get('name'))[:100]!r}, which is none of the tools"
            raise ApiError(400, text, param="messages")
        others = [each for each in found if each.get("name") != tool.get("name")]
        if block["type"] == "tool_removal":
            found = others
        elif found == others or tool is own[-1]:
            found = [*others, own[-1]]
    return found


def _assistant(where: str, blocks: list[dict[str, Any]]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    for k, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "text":
            message["content"] += _string(f"{where}.content[{k}]", block, "text")
        elif kind == "thinking":
            thoughts = _string(f"{where}.content[{k}]", block, "thinking")
            message["reasoning_content"] = message.get("reasoning_content", "") + thoughts
        elif kind == "tool_use":
            name, number = (_string(f"{where}.content[{k}]", block, each) for each in ("name", "id"))
            function = {"name": name, "arguments": json.dumps(block.get("input") or {}, ensure_ascii=False)}
            message.setdefault("tool_calls", []).append({"id": number, "type": "function", "function": function})
        elif kind != "redacted_thinking":
            raise _refusal(f"{where}.content[{k}]", kind)
    return message


def _user(where: str, role: str, blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results of tools are messages of their own."""
    found: list[dict[str, Any]] = []
    texts: list[str] = []
    for k, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "text":
            texts.append(_string(f"{where}.content[{k}]", block, "text"))
        elif kind in CHANGES and role == "system":
            continue
        elif kind == "tool_result":
            content = "\n".join(_texts(f"{where}.content[{k}].content", block.get("content") or ""))
            number = _string(f"{where}.content[{k}]", block, "tool_use_id")
            found.append({"role": "tool", "tool_call_id": number, "content": content})
        else:
            raise _refusal(f"{where}.content[{k}]", kind)
    return found + ([{"role": role, "content": "\n".join(texts)}] if texts or not blocks else [])


def _texts(where: str, value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if not isinstance(value, list):
        raise ApiError(400, f"{where} must be a text or a list of blocks", param=where.partition("[")[0])
    for k, block in enumerate(value):
        kind = block.get("type") if isinstance(block, dict) else None
        if not isinstance(kind, str) or kind not in NAMES_OF_TEXT:
            raise _refusal(f"{where}[{k}]", kind)
    return [_string(f"{where}[{k}]", block, NAMES_OF_TEXT[block["type"]]) for k, block in enumerate(value)]


def _string(where: str, block: dict[str, Any], name: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise ApiError(400, f"{where}: {name} is {str(value)[:100]!r} but must be a text", param="messages")
    return value


def _refusal(where: str, kind: object) -> ApiError:
    text = f"{where} is of type {str(kind)[:100]!r}: only text and calls of tools are read"
    return ApiError(400, text, param="messages")
