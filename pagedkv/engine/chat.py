"""Chats as text: the Jinja template of a model's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

from .added_tokens import NamedTokens

MAX_CHARS = 1 << 26  # of a rendered chat
MAX_BITS = 1 << 16  # of an integer that a template computes by * or **
MARKER = "\ue000end of the final message\ue001"  # private code points, which texts do not have


class ChatTemplate:
    """Renders as transformers' apply_chat_template does: its variables, filters, functions and tags, in Jinja's sandbox
    for untrusted templates (jinja2.sandbox.ImmutableSandboxedEnvironment).

    A template that fails, or uses what the sandbox forbids, raises ValueError. The sandbox limits range() to 100,000;
    the results of `*` and `**` are limited, and the text to 64 Mi characters. There is no limit to the time of loops
    without output, nor to the width in a format.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], source: str = "") -> None:
        self.templates, self.special_tokens, self.source = dict(templates), dict(special_tokens), source

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate:
        """From chat_template.jinja and additional_chat_templates/, or chat_template.json, or tokenizer_config.json.
        A folder without any has no templates; then render() needs one."""
        config = _read_json(folder / "tokenizer_config.json")
        found = config.get("chat_template") or _read_json(folder / "chat_template.json").get("chat_template") or {}
        if isinstance(found, str):
            found = {"default": found}
        elif isinstance(found, list):  # of {"name", "template"}
            found = {each["name"]: each["template"] for each in found}
        templates: dict[str, str] = dict(found)
        if (folder / "chat_template.jinja").is_file():
            templates["default"] = (folder / "chat_template.jinja").read_text("utf-8")
        for path in sorted(folder.glob("additional_chat_templates/*.jinja")):
            templates[path.stem] = path.read_text("utf-8")
        return cls(templates, NamedTokens.from_folder(folder).texts(), str(folder))

    def render(
        self,
        messages: SequenceOf[Mapping[str, Any]],
        *,
        tools: SequenceOf[Mapping[str, Any]] | None = None,
        template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        **options: Any,
    ) -> str:
        """The text of a chat.

        Args:
            messages: dicts with a "role" and, in most of them, "content"
            tools: JSON schemas of functions that the model may call
            template: the text of a template, or the name of one of the folder's; None: "tool_use" where tools are given
                and there is one, else "default"
            add_generation_prompt: the text ends with the beginning of an answer; None: unless the last message goes on
            continue_final_message: the text ends within the last message, which the model continues
            options: variables of the template
        """
        check_messages(messages)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message=True needs add_generation_prompt=False: the last message goes on")
        chat = [dict(message) for message in messages]
        if continue_final_message:
            if not isinstance(chat[-1].get("content"), str):
                raise ValueError("continue_final_message=True needs a last message whose content is a text")
            chat[-1]["content"] += MARKER
        text = self._run(
            self.find(template, tools),
            self.special_tokens
            | {"messages": chat, "tools": tools, "documents": None, "add_generation_prompt": add_generation_prompt}
            | options,
        )
        if not continue_final_message:
            return text
        if MARKER not in text:
            raise ValueError("continue_final_message=True, but the template leaves out the last message")
        return text[: text.rindex(MARKER)]

    def find(self, template: str | None, tools: object) -> str:
        """The text of the template that render() takes."""
        if template is not None:
            return self.templates.get(template, template)
        for name in ("tool_use", "default") if tools else ("default",):
            if name in self.templates:
                return self.templates[name]
        raise ValueError(f"{self.source}: no chat template in the model's folder; give one (chat_template)")

    @staticmethod
    def _run(template: str, variables: Mapping[str, Any]) -> str:
        environment = _environment()
        parts, length = [], 0
        try:
            for part in environment.from_string(template).generate(**variables):
                parts.append(part)
                length += len(part)
                if length > MAX_CHARS:
                    raise ValueError(f"it wrote more than {MAX_CHARS:,} characters")
        except Exception as error:  # a division by zero, a wrong type, an endless recursion, or any other error
            raise ValueError(f"the chat template failed: {type(error).__name__}: {error}") from error
        return "".join(parts)


def render_chats(
    template: ChatTemplate,
    chats: SequenceOf[Any],
    *,
    enable_thinking: bool | None = None,
    chat_template: str | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> list[str]:
    """The texts of chats, with the options of LLM.chat()."""
    options |= {"template": chat_template, **(chat_template_kwargs or {})}
    if enable_thinking is not None:
        if not isinstance(enable_thinking, bool):
            raise TypeError(f"enable_thinking is {enable_thinking!r} but must be True, False or None")
        if "enable_thinking" not in template.find(chat_template, options.get("tools")):
            raise ValueError(f"enable_thinking is {enable_thinking} but the chat template has no such switch")
        options["enable_thinking"] = enable_thinking
    return [template.render(messages, **options) for messages in chats]


def check_messages(messages: object, name: str = "messages") -> None:
    """Raises unless it is a list of dicts that have a role, and not empty."""
    if isinstance(messages, (str, bytes)) or not isinstance(messages, SequenceOf):
        raise TypeError(f"{name} is {messages!r} but must be a list of messages")
    if not messages:
        raise ValueError(f"{name} is empty")
    for i, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TypeError(f"{name}[{i}] is {message!r} but must be a dict with role and content")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{name}[{i}]: role is {message.get('role')!r} but must be a text such as 'user'")


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path}: holds no JSON object")
    return value


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
    try:
        from jinja2 import TemplateError, ext, nodes
        from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError
    except ModuleNotFoundError as error:
        raise ImportError("chat templates need Jinja2 (pip install pagedkv[chat]), which is not installed") from error

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

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, ext.loopcontrols])
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment
