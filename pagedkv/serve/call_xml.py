"""The arguments of a call that has a tag for each: made into JSON by the types of the tool's schema."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

TYPES: dict[type, str] = {
    str: "string", bool: "boolean", int: "integer", float: "number", dict: "object", list: "array", type(None): "null",
}  # fmt: skip
PYTHONS = {"True": "true", "False": "false", "None": "null"}  # as templates write them


class XmlArguments:
    """Texts are shown while they come, anything else when it is complete."""

    def __init__(self, show: Callable[[str], None], schema: Any) -> None:
        self._show, self._root = show, schema if isinstance(schema, Mapping) else {}
        self._count = 0
        self._types, self._choices = set[str](), list[Any]()
        self._held = ""  # of the value: all of it, or a last line break of a text
        self._is_text = self._is_first = False

    def key(self, key: str) -> None:
        self._show(("{" if self._count == 0 else ", ") + json.dumps(key, ensure_ascii=False) + ": ")
        self._count += 1
        properties = self._root.get("properties")
        schema = properties.get(key) if isinstance(properties, Mapping) else None
        self._types = types_of(schema, self._root)
        choices = schema.get("enum") if isinstance(schema, Mapping) else None
        self._choices = choices if isinstance(choices, list) else []
        self._held, self._is_first = "", True
        self._is_text = self._types == {"string"} and not self._choices

    def value(self, text: str) -> None:
        """Some of the value, of which a line break on either side belongs to the tags."""
        if self._is_first and text:
            if self._is_text:
                self._show('"')
            text, self._is_first = text.removeprefix("\n"), False
        self._held += text
        if self._is_text:
            shown = self._held.removesuffix("\n")
            self._held = self._held[len(shown) :]
            self._show(_escaped(shown))

    def end_value(self) -> None:
        if self._is_text:
            self._show('""' if self._is_first else '"')
        elif self._held.strip() in self._choices:
            self._show(json.dumps(self._held.strip(), ensure_ascii=False))
        else:
            self._show(as_json(self._held.removesuffix("\n"), self._types))

    def end(self) -> None:
        self._show("}" if self._count else "{}")


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]


def types_of(schema: Any, root: Mapping[str, Any], depth: int = 0) -> set[str]:
    """The types that a schema allows, as far as it names them; empty: any."""
    if not isinstance(schema, Mapping) or depth > 8:
        return set()
    named = schema.get("type")
    if isinstance(named, str):
        return {named}
    if isinstance(named, list):
        return {each for each in named if isinstance(each, str)}
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return {TYPES[type(each)] for each in values}
    reference = schema.get("$ref")
    if isinstance(reference, str) and reference.startswith("#/"):
        found: Any = root
        for step in reference[2:].split("/"):
            found = found.get(step) if isinstance(found, Mapping) else None
        return types_of(found, root, depth + 1)
    for choice in ("anyOf", "oneOf"):
        if isinstance(schema.get(choice), list):
            several = [types_of(each, root, depth + 1) for each in schema[choice]]
            return set().union(*several) if all(several) else set()
    return set()


def as_json(text: str, types: set[str]) -> str:
    """The value as JSON: what it is by itself where the types allow that, else a text."""
    stripped = text.strip()
    stripped = PYTHONS.get(stripped, stripped)
    try:
        kind = TYPES[type(json.loads(stripped, parse_constant=_refuse))]
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    is_allowed = not types or kind in types or (kind == "integer" and "number" in types)
    return stripped if is_allowed else json.dumps(text, ensure_ascii=False)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no JSON")
