"""Chats as text: the Jinja template of a model's folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from contextlib import suppress
from datetime import datetime
from functools import cache, lru_cache
from pathlib import Path
from typing import Any, TypedDict

from pagedkv.checks import check_names
from pagedkv.optional import load

from .messages import REASONING, Chat, check_text_only, easier_forms, join_parts, plain, plain_dicts, plain_messages
from .template_files import read_templates
from .tokenizer import NamedTokens, Tokenizer

# Marks where the final message ends. Its last character, a space, is missing where the template trims the message.
MARKER = "END_OF_THE_FINAL_MESSAGE_OF_PAGEDKV "


class ChatTemplate:
    """Renders as transformers' apply_chat_template does: its variables, filters, functions and tags, in Jinja's sandbox
    for untrusted templates (jinja2.sandbox.ImmutableSandboxedEnvironment). Messages are prepared as there: keys that
    are None are left out, `reasoning` and `thinking` are found as `reasoning_content`, and objects with model_dump(),
    which the clients of servers return, are taken for dicts.

    Seven things differ on purpose. Content in parts, [{"type": "text", "text": ...}, ...], is joined with newlines for
    a template that would lose the parts, as vLLM does. Arguments of tool calls that are JSON texts become dicts for a
    template that fails on texts, and {"invalid_json": ...} where they are no object, as those of a call that was cut.
    For one that fails where a message with calls has no content, as QwQ's and the first Qwen3's do, it is an empty
    text, and an empty list of calls is none. For one that fails where the system says more than the first message, as
    Qwen3.5's does, the messages that follow that one at once are put to it, and later ones are the user's. Each message
    must have a role. Content must not be a number, which many templates lose, nor a dict or a part that this template
    loses. Tools must be JSON schemas, not functions.

    A template that fails, or uses what the sandbox forbids, raises ValueError. The sandbox limits range() to 100,000;
    the results of `*` and `**` are limited, and the text to 64 Mi characters. There is no limit to the time of loops
    without output, nor to the width in a format.
    """

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str], source: str = "") -> None:
        self.templates, self.special_tokens, self.source = dict(templates), dict(special_tokens), source

    @classmethod
    def from_folder(cls, folder: Path) -> ChatTemplate:
        """A folder without any has no templates; then render() needs one."""
        return cls(read_templates(folder), NamedTokens.from_folder(folder).texts(), str(folder))

    def render(
        self,
        messages: SequenceOf[Any],
        *,
        tools: SequenceOf[Any] | None = None,
        documents: SequenceOf[Any] | None = None,
        template: str | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool | str = False,
        **options: Any,
    ) -> str:
        """The text of a chat.

        Args:
            messages: dicts with a "role" and, in most of them, "content": a text, or a list of parts
            tools: JSON schemas of functions that the model may call
            documents: dicts with "title" and "text", for templates that know of them
            template: the text of a template, or the name of one of the folder's; None: "tool_use" where tools are given
                (an empty list, too) and there is one, else "default"
            add_generation_prompt: the text ends with the beginning of an answer; None: unless the last message goes on
            continue_final_message: the text ends within the last message, which the model continues: at the end of its
                content or, where this is a name, of the field of this name, such as "reasoning_content"
            options: other variables of the template
        """
        chat = plain_messages(messages)
        if add_generation_prompt is None:
            add_generation_prompt = not continue_final_message
        if continue_final_message and add_generation_prompt:
            raise ValueError("continue_final_message=True needs add_generation_prompt=False: the last message goes on")
        source = self.find(template, tools)
        variables = self.special_tokens | plain(options)
        variables |= {"tools": plain_dicts("tools", tools), "documents": plain_dicts("documents", documents)}
        variables["add_generation_prompt"] = add_generation_prompt

        def write(chat: Chat) -> str:
            try:
                return run_template(source, variables | {"messages": chat})
            except ValueError:
                for form in easier_forms(chat):
                    with suppress(ValueError):
                        return run_template(source, variables | {"messages": form})
                raise

        chat = join_parts(chat, write)
        if not continue_final_message:
            return write(chat)
        field = continue_final_message if isinstance(continue_final_message, str) else "content"
        return _cut(write(_with_marker(chat, field)), _final_text(chat, field))

    def find(self, template: str | None, tools: object) -> str:
        """The text of the template that render() takes."""
        if template is not None:
            return self.templates.get(template, template)
        for name in ("default",) if tools is None else ("tool_use", "default"):
            if name in self.templates:
                return self.templates[name]
        raise ValueError(f"{self.source}: no chat template in the model's folder; give one (chat_template)")


def _final_text(chat: Chat, field: str) -> str:
    """What is continued: the field of the last message, or the last text part in it."""
    value = chat[-1].get(field)
    if isinstance(value, (list, tuple)):
        texts = [part["text"] for part in value if isinstance(part, dict) and isinstance(part.get("text"), str)]
        value = texts[-1] if texts else None
    if not isinstance(value, str):
        raise ValueError(f"continue_final_message: the last message has no text as its {field}")
    return value


def _with_marker(chat: Chat, field: str) -> Chat:
    """The chat with MARKER behind what _final_text() returns, under all names that it has."""
    last = dict(chat[-1])
    text, names = _final_text(chat, field), REASONING if field in REASONING else (field,)
    for name in names:
        value = last.get(name)
        if isinstance(value, (list, tuple)):
            parts = list(value)
            at = max(k for k, part in enumerate(parts) if isinstance(part, dict) and isinstance(part.get("text"), str))
            parts[at] = {**parts[at], "text": text + MARKER}
            last[name] = parts
        elif value == text:
            last[name] = text + MARKER
    return [*chat[:-1], last]


def _cut(text: str, final: str) -> str:
    """The text up to the marker. Where the template has trimmed the message, the end of the message is trimmed, too."""
    if MARKER.strip() not in text or final.strip() not in text:
        raise ValueError("continue_final_message, but the chat template leaves out the last message or some of it")
    at = text.rindex(MARKER.strip())
    return text[:at] if text[at:].startswith(MARKER) else text[:at].rstrip()


TOKEN_FILES = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
FILES = "chat_template.jinja", "chat_template.json", *TOKEN_FILES


def template_of(folder: Path) -> ChatTemplate:
    """The folder's, which is read again when one of its files is another."""
    paths = [folder / name for name in FILES] + sorted(folder.glob("additional_chat_templates/*.jinja"))
    return _read_template(folder, tuple((path, *_stamp(path)) for path in paths))


def _stamp(path: Path) -> tuple[int, ...]:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return ()
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns


@lru_cache(maxsize=8)
def _read_template(folder: Path, stamps: object) -> ChatTemplate:
    return ChatTemplate.from_folder(folder)


class ChatOptions(TypedDict, total=False):
    """What chat() of LLM and AsyncEngine takes for the template. Those of ChatTemplate.render(), and:

    enable_thinking: whether the model thinks before it answers, for templates that have this switch; None: what the
        template does without it
    chat_template: instead of that of the model's folder
    chat_template_kwargs: other variables of the template
    """

    tools: SequenceOf[Mapping[str, Any]] | None
    enable_thinking: bool | None
    chat_template: str | None
    chat_template_kwargs: Mapping[str, Any] | None
    add_generation_prompt: bool | None
    continue_final_message: bool | str


def encode_chats(
    folder: Path, tokenizer: Tokenizer, chats: SequenceOf[Any], options: ChatOptions
) -> list[Any]:
    """The token ids of chats; with their texts where answers go on with them, see Request.continues_text. A template
    writes the special tokens itself."""
    check_names("chat()", options, list(ChatOptions.__annotations__))
    variables: dict[str, Any] = dict(options)
    chat_template, enable_thinking = variables.pop("chat_template", None), variables.pop("enable_thinking", None)
    others, template = variables.pop("chat_template_kwargs", None), template_of(folder)
    if not isinstance(chat_template, str | None):
        raise TypeError(f"chat_template is {chat_template!r} but must be a text, or None")
    if not isinstance(others, Mapping | None) or not all(isinstance(name, str) for name in others or ()):
        raise TypeError(f"chat_template_kwargs is {others!r} but must be a dict with names as keys, or None")
    variables |= {"template": chat_template, **(others or {})}
    if enable_thinking is not None:
        if not isinstance(enable_thinking, bool):
            raise TypeError(f"enable_thinking is {enable_thinking!r} but must be True, False or None")
        if "enable_thinking" not in template.find(chat_template, variables.get("tools")):
            raise ValueError(f"enable_thinking is {enable_thinking} but the chat template has no such switch")
        variables["enable_thinking"] = enable_thinking
    prompts: list[Any] = []
    for i, messages in enumerate(chats):
        try:
            chat = plain_messages(messages)
            check_text_only(chat)
            text = template.render(chat, **variables)
            ids = tokenizer.encode(text, add_special_tokens=False)
        except Exception as error:
            if len(chats) > 1:
                error.add_note(f"in messages[{i}], of {len(chats)} chats")
            raise
        goes_on = options.get("continue_final_message")
        prompts.append({"prompt": text, "prompt_token_ids": ids} if goes_on else ids)
    return prompts


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
    load("jinja2.sandbox")
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
