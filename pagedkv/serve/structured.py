"""What an answer has to look like: response_format and structured_outputs of a request, as the engine's own option."""

from __future__ import annotations

import json
import re
from dataclasses import fields
from typing import Any

from pagedkv.checks import hint_of
from pagedkv.engine.structured_outputs import StructuredOutputsParams

from .errors import ApiError, of_request
from .schema import Generation

FORMATS = ("text", "json_object", "json_schema", "grammar", "regex", "structural_tag")
MAX_CHARS, MAX_DEPTH = 100_000, 64  # of a shape: compilation takes seconds for these, and hours for some larger ones
KNOWN = [each.name for each in fields(StructuredOutputsParams)]


def shape_of(request: Generation) -> StructuredOutputsParams | None:
    """None: any text."""
    given = {name: value for name, value in (request.structured_outputs or {}).items() if value is not None}
    form = request.response_format
    if form is not None and form.get("type") != "text":
        if given:
            text = "response_format and structured_outputs are both given, but are the same option"
            raise ApiError(400, text, param="structured_outputs")
        given = _of_format(form)
    if not given:
        return None
    for name in given:
        if name not in KNOWN:
            text = f"structured_outputs has no {name[:100]!r}{hint_of(name, KNOWN)}"
            raise ApiError(400, text, param="structured_outputs")
    return _checked(**given)


def name_of_shape(request: Generation) -> str:
    """What the client calls the option that shape_of() makes."""
    is_given = request.response_format is not None and request.response_format.get("type") != "text"
    return "response_format" if is_given else "structured_outputs"


def _of_format(form: dict[str, Any]) -> dict[str, Any]:
    kind = form.get("type")
    if kind not in FORMATS:
        text = f"response_format.type is {str(kind)[:100]!r} but must be one of {', '.join(FORMATS)}"
        raise ApiError(400, text, param="response_format")
    if kind == "json_object":
        return {"json_object": True}
    if kind == "structural_tag":
        return {"structural_tag": form}
    name, value, is_right = kind, form.get(kind), isinstance(form.get(kind), str)
    if kind == "json_schema":
        value = value.get("schema") if isinstance(value, dict) else None
        name, is_right = "json_schema.schema", isinstance(value, dict)
    if not is_right:
        wanted = "JSON schema" if kind == "json_schema" else "text"
        text = f"response_format.{name} is {'missing' if value is None else 'wrong'}: it must be a {wanted}"
        raise ApiError(400, text, param="response_format")
    return {"json" if kind == "json_schema" else kind: value}


def as_format(shape: StructuredOutputsParams) -> dict[str, Any]:
    """As a part of a structural tag."""
    spaced = {"max_whitespace_cnt": 1} if shape.disable_any_whitespace else {}
    try:
        if shape.json is not None:
            return {"type": "json_schema", "json_schema": json.loads(str(shape.json)), **spaced}
        if shape.structural_tag is not None:
            return dict(json.loads(str(shape.structural_tag))["format"])
    except (ValueError, KeyError, TypeError, RecursionError):
        text = f"structured_outputs.{shape.kind} is no JSON of this kind"
        raise ApiError(400, text, param="structured_outputs") from None
    if shape.choice is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": each} for each in shape.choice]}
    if shape.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}, **spaced}
    if shape.regex is not None:
        return {"type": "regex", "pattern": shape.regex}
    return {"type": "grammar", "grammar": shape.grammar}


def of_format(form: dict[str, Any]) -> StructuredOutputsParams:
    return _checked(structural_tag={"type": "structural_tag", "format": form})


def _checked(**given: Any) -> StructuredOutputsParams:
    try:
        shape = StructuredOutputsParams(**given)
    except (TypeError, ValueError, RecursionError) as error:
        raise of_request(error) from None
    text = shape.choice if shape.kind == "choice" else getattr(shape, shape.kind)
    size = sum(map(len, text or ())) if isinstance(text, tuple) else len(str(text))
    if size > MAX_CHARS or _depth(str(text)) > MAX_DEPTH:
        limits = f"{MAX_CHARS:,} characters and brackets within each other {MAX_DEPTH} deep"
        text = f"structured_outputs.{shape.kind} is too large: the schemas of an answer may have {limits}"
        raise ApiError(400, text, param="structured_outputs")
    return shape


def _depth(text: str) -> int:
    """Of the brackets of a text, whatever they mean there."""
    depth = deepest = 0
    for bracket in re.findall(r"[\[{(\])}]", text):
        depth += 1 if bracket in "[{(" else -1
        deepest = max(deepest, depth)
    return deepest
