"""Custom tools, whose input is a text. For the model each is a function with one argument, `input`, which its call has
as JSON; clients get the text itself."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Callable
from typing import Any

from .errors import ApiError

SCHEMA = {
    "type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"],
    "additionalProperties": False,
}  # fmt: skip
BEGIN = re.compile(r'\s*\{\s*"input"\s*:\s*"')
# All of a JSON string but for an escape that is not complete yet. What is no escape at all stays as it is.
PART = re.compile(r'(?:[^"\\]++|\\u[0-9a-fA-F]{4}|\\u(?=[0-9a-fA-F]{0,3}[^0-9a-fA-F])|\\[^u])*+', re.DOTALL)
ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))", re.DOTALL)
ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", '"': '"', "\\": "\\", "/": "/"}


def function_of(where: str, tool: dict[str, Any]) -> tuple[dict[str, Any], bool]:
    """The function that the model is shown, and whether a grammar is a part of its description: of a text within JSON
    none can be enforced."""
    custom = tool.get("custom")
    form = custom.get("format") if isinstance(custom, dict) else None
    form = {"type": "text"} if form is None else form
    if not isinstance(custom, dict) or not isinstance(form, dict) or form.get("type") not in ("text", "grammar"):
        text = f"{where}: custom is {str(custom)[:100]!r} but must have a name, and a format of type text or grammar"
        raise ApiError(400, text, param="tools")
    description = custom.get("description") or ""
    if form["type"] == "grammar":
        grammar = form.get("grammar", form)  # as chats have it, or as responses do
        given = [grammar.get(each) for each in ("syntax", "definition")] if isinstance(grammar, dict) else [None]
        if given[0] not in ("lark", "regex") or not isinstance(given[1], str):
            text = f"{where}: its format must have a syntax, lark or regex, and a definition, which is a text"
            raise ApiError(400, text, param="tools")
        description = f"{description}\n\nThe input follows this {given[0]} grammar:\n{given[1]}".lstrip()
    described = {"description": description} if description else {}
    function = {"name": custom.get("name"), **described, "parameters": SCHEMA}
    return {"type": "function", "function": function}, form["type"] == "grammar"


def arguments_of(text: str) -> str:
    """Those of a call with this input."""
    return json.dumps({"input": text}, ensure_ascii=False)


def plain_call(call: dict[str, Any]) -> dict[str, Any]:
    """A call of a message, as one of a function."""
    custom = call.get("custom")
    if not isinstance(custom, dict):
        return call
    if not all(isinstance(custom.get(each), str) for each in ("name", "input")):
        text = f"tool_calls: custom is {str(custom)[:100]!r} but must have a name and an input"
        raise ApiError(400, text, param="messages")
    function = {"name": custom["name"], "arguments": arguments_of(custom["input"])}
    return {"id": call.get("id"), "type": "function", "function": function}


class InputReader:
    """Shows the input while the arguments come. Arguments without one are shown as they are, at the end."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show, self._held = show, ""
        self._has_begun = self._has_ended = False
        self._pairs = codecs.getincrementaldecoder("utf-16-le")("replace")  # holds half a surrogate pair

    def feed(self, text: str) -> None:
        if self._has_ended:
            return
        self._held += text
        if not self._has_begun:
            begin = BEGIN.match(self._held)
            if begin is None:
                return
            self._has_begun, self._held = True, self._held[begin.end() :]
        end = PART.match(self._held).end()  # type: ignore[union-attr]  # it matches nothing, too
        part, self._held = ESCAPE.sub(_unescaped, self._held[:end]), self._held[end:]
        self._has_ended = self._held.startswith('"')
        self._show(self._pairs.decode(part.encode("utf-16-le", "surrogatepass")))

    def finish(self) -> None:
        """Nothing more comes."""
        self._show(self._pairs.decode(b"", True) if self._has_begun else self._held)


def _unescaped(found: re.Match[str]) -> str:
    return chr(int(found[1], 16)) if found[1] else ESCAPED.get(found[2], found[0])
