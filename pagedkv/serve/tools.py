"""The tools of a request: read, checked, and made into the grammar of an answer that has to call one."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from .custom_tools import function_of
from .errors import ApiError
from .formats import THINK, THINK_END, CallFormat

NAME = re.compile(r"[A-Za-z0-9_.-]{1,128}")
CHOICES = ("auto", "none", "required")
# What stands between the end of thoughts and what follows them.
GAP = {"type": "regex", "pattern": r"[ \n]{0,4}"}


@dataclass
class Tools:
    """definitions: what the template gets; schemas: of the parameters, by name; choice: of CHOICES, or a name; custom:
    the names of those whose input is a text; has_grammars: for such texts."""

    definitions: list[dict[str, Any]] = field(default_factory=list)
    schemas: dict[str, Any] = field(default_factory=dict)
    strict: set[str] = field(default_factory=set)
    custom: set[str] = field(default_factory=set)
    has_grammars: bool = False
    choice: str = "none"
    is_parallel: bool = True

    @property
    def may_be_called(self) -> bool:
        return self.choice != "none"

    @property
    def must_be_called(self) -> list[str]:
        """The names of the tools one of which has to be called; empty: none has to."""
        if self.choice in self.schemas:
            return [self.choice]
        return list(self.schemas) if self.choice == "required" else []


def read_tools(tools: Any, choice: Any, is_parallel: bool | None) -> Tools:
    """As /v1/chat/completions has them. A tool may have the name of a choice: {"function": {"name": "auto"}}."""
    found = Tools(is_parallel=is_parallel is not False)
    for i, tool in enumerate(tools or ()):
        is_custom = tool.get("type") == "custom"
        if is_custom:
            tool, has_grammar = function_of(f"tools[{i}]", tool)
            found.has_grammars |= has_grammar
        if tool.get("type") != "function":
            text = f"tools[{i}] is of type {str(tool.get('type'))[:100]!r}: only functions and custom tools are served"
            raise ApiError(400, text, param="tools")
        if not isinstance(tool.get("function"), dict):
            raise ApiError(400, f"tools[{i}] has no function", param="tools")
        _add(found, i, tool)
        if is_custom:
            found.custom.add(tool["function"]["name"])
    if isinstance(choice, dict) and choice.get("type") == "allowed_tools":
        choice = _allow(choice, found)
    found.choice = _choice(choice, found)
    return found


def _allow(choice: dict[str, Any], tools: Tools) -> Any:
    """The mode of {"type": "allowed_tools", "allowed_tools": {"mode", "tools"}}. Other tools are as if not given."""
    allowed = choice.get("allowed_tools")
    given = allowed.get("tools") if isinstance(allowed, dict) else None
    names = {_choice(each, tools) for each in given if isinstance(each, dict)} if isinstance(given, list) else set()
    if not isinstance(allowed, dict) or allowed.get("mode") not in ("auto", "required") or not names:
        text = f"tool_choice is {json.dumps(choice)[:200]} but must have a mode, auto or required, and tools"
        raise ApiError(400, text, param="tool_choice")
    tools.definitions = [each for each in tools.definitions if each["function"]["name"] in names]
    tools.schemas = {name: schema for name, schema in tools.schemas.items() if name in names}
    tools.strict &= names
    return allowed["mode"]


def _add(found: Tools, i: int, tool: dict[str, Any]) -> None:
    function = tool["function"]
    name, schema = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not NAME.fullmatch(name) or name in CHOICES:
        text = f"tools[{i}]: its name is {str(name)[:200]!r} but must be 1 to 128 letters, digits and . _ -"
        raise ApiError(400, text, param="tools")
    if name in found.schemas:
        raise ApiError(400, f"tools[{i}]: there are two tools with the name {name!r}", param="tools")
    if not isinstance(schema, dict | None):
        raise ApiError(400, f"tools[{i}]: its parameters are no JSON schema", param="tools")
    found.definitions.append({**tool, "function": {key: each for key, each in function.items() if key != "strict"}})
    found.schemas[name] = schema or {"type": "object", "properties": {}}
    if function.get("strict") is True:
        found.strict.add(name)


def _choice(choice: Any, tools: Tools) -> str:
    if choice is None:
        return "auto" if tools.schemas else "none"
    if isinstance(choice, dict):
        kind = choice.get("type")
        named = choice.get(kind) if kind in ("function", "custom") else None
        name = named.get("name") if isinstance(named, dict) else None
        if not isinstance(name, str) or name not in tools.schemas or (name in tools.custom) != (kind == "custom"):
            text = f"tool_choice is {json.dumps(choice)[:200]}, which is no function of tools, and no custom tool"
            raise ApiError(400, text, param="tool_choice")
        return name
    if choice not in CHOICES:
        text = f"tool_choice is {choice[:100]!r} but must be one of {', '.join(CHOICES)}, or name a function"
        raise ApiError(400, text, param="tool_choice")
    if choice == "required" and not tools.schemas:
        raise ApiError(400, "tool_choice is 'required' but there are no tools", param="tool_choice")
    return str(choice) if tools.schemas else "none"


# --- grammars, as formats of structural tags


def grammar_of(
    tools: Tools, calls: CallFormat | None, shape: dict[str, Any] | None, start: str
) -> dict[str, Any] | None:
    """Of an answer that begins in this state; None: any text.

    shape: of the content, where it has to have one. Calls may come instead, unless a special token tells them from
        content: a grammar has none.
    """
    names = tools.must_be_called
    if calls is not None and names:
        body = _calls(tools, names, calls, stop_after_first=len(names) == 1 and tools.choice != "required")
    elif calls is not None and tools.may_be_called and shape is not None and not calls.has_special_tokens:
        body = {"type": "or", "elements": [shape, _calls(tools, list(tools.schemas), calls, stop_after_first=False)]}
    elif calls is not None and tools.may_be_called and tools.strict and calls.trigger:
        tags = [_tag(name, tools.schemas[name], calls) for name in tools.schemas]
        body = {"type": "triggered_tags", "triggers": [calls.trigger], "tags": tags}
    elif shape is not None:
        body = shape
    else:
        return None
    begin = THINK if start == "begin" else ""
    thoughts = {"type": "tag", "begin": begin, "content": {"type": "any_text"}, "end": THINK_END}
    if start == "think":
        return {"type": "sequence", "elements": [thoughts, GAP, body]}
    if start == "begin":
        with_gap = {"type": "optional", "content": {"type": "sequence", "elements": [thoughts, GAP]}}
        return {"type": "sequence", "elements": [with_gap, body]}
    return body


def _calls(tools: Tools, names: list[str], calls: CallFormat, *, stop_after_first: bool) -> dict[str, Any]:
    tags = {
        "type": "tags_with_separator", "tags": [_tag(name, tools.schemas[name], calls) for name in names],
        "separator": calls.separator, "at_least_one": True,
        "stop_after_first": stop_after_first or not tools.is_parallel,
    }  # fmt: skip
    before, after = ({"type": "const_string", "value": text} for text in calls.around)
    return {"type": "sequence", "elements": [before, tags, after]} if calls.around[0] else tags


def _tag(name: str, schema: Mapping[str, Any], calls: CallFormat) -> dict[str, Any]:
    content = {"type": "json_schema", "json_schema": schema, "style": calls.style}
    return {"type": "tag", "begin": calls.begin.replace("NAME", name), "content": content, "end": calls.end}
