"""Jinja's sandbox, with what transformers gives to chat templates: its filters, functions and tags."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from functools import cache, lru_cache
from typing import Any

MAX_CHARS = 1 << 26  # of a rendered chat
MAX_BITS = 1 << 16  # of an integer that a template computes by * or **


def run_template(template: str, variables: Mapping[str, Any]) -> str:
    """What the template writes. A template that fails in any way raises ValueError."""
    environment = _environment()
    parts, length = [], 0
    try:
        for part in _compiled(environment, template).generate(**variables):
            parts.append(part)
            length += len(part)
            if length > MAX_CHARS:
                raise ValueError(f"it wrote more than {MAX_CHARS:,} characters")
    except Exception as error:  # a division by zero, a wrong type, an endless recursion, or any other error
        raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error
    return "".join(parts)


@lru_cache(maxsize=8)
def _compiled(environment: Any, template: str) -> Any:
    return environment.from_string(template)


def _is_too_large(operator: str, left: object, right: object) -> bool:
    """Whether left * right or left ** right would be too long, or an integer of too many bits."""
    if isinstance(left, int) and isinstance(right, int):
        lengths = left.bit_length(), right.bit_length()
        return (lengths[0] * max(right, 0) if operator == "**" else sum(lengths)) > MAX_BITS
    for sized, times in ((left, right), (right, left)):
        if isinstance(sized, (str, bytes, list, tuple)) and isinstance(times, int):
            return len(sized) * times > MAX_CHARS
    return False


@cache
def _environment() -> Any:
    from jinja2 import TemplateError, ext, nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

    class Generation(ext.Extension):  # type: ignore[misc]
        """{% generation %} ... {% endgeneration %} marks what the model has written; here it changes nothing."""

        tags = frozenset({"generation"})

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return nodes.Scope(body).set_lineno(line)

    class Sandbox(ImmutableSandboxedEnvironment):  # type: ignore[misc]
        def unsafe_undefined(self, obj: Any, attribute: str) -> Any:  # Jinja's own writes an empty text for it
            raise SecurityError(f"{attribute!r} of a {type(obj).__name__} is not for templates")

        intercepted_binops = frozenset({"*", "**"})

        def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
            if _is_too_large(operator, left, right):
                raise SecurityError(f"what {operator} makes here is too large")
            return super().call_binop(context, operator, left, right)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def tojson(
        value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
