"""Messages as people send them, made into the plain dicts that chat templates are written for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import numpy as np

Chat = list[dict[str, Any]]
# What servers call the thoughts of an answer; templates read the first.
REASONING = ("reasoning_content", "thinking", "reasoning")
MEDIA = ("image", "audio", "video", "file")
PARTS = ("image", "image_url", "input_image", "audio", "audio_url", "input_audio", "video", "video_url", "input_video")


def is_message(value: object) -> bool:
    """A dict, or an object that has one: a dataclass, or a model of pydantic, as the clients of servers return."""
    return isinstance(value, Mapping) or _has_fields(value) or callable(getattr(value, "model_dump", None))


def _has_fields(value: object) -> bool:
    return is_dataclass(value) and not isinstance(value, type)


def plain(value: Any) -> Any:
    """The value in JSON's own types, built anew: a template gets nothing of the caller's to change or to call. Anything
    else becomes the name of its type, such as "<ndarray>"."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):  # an enum, say
            return str.__str__(value) if kind is str else kind(value)
    if isinstance(value, Mapping):
        return {plain(key): plain(each) for key, each in value.items()}
    for sequence in (list, tuple):
        if isinstance(value, sequence):
            return sequence(map(plain, value))
    if isinstance(value, np.generic):
        return plain(value.item())
    if _has_fields(value):
        return {each.name: plain(getattr(value, each.name)) for each in fields(value)}
    if callable(getattr(value, "model_dump", None)):
        return plain(value.model_dump())
    return f"<{type(value).__name__}>"


def plain_messages(messages: object) -> Chat:
    """The messages as dicts without the keys that are None. Raises unless they are a list that is not empty, and each
    has a role. Thoughts are also found under the names that templates read."""
    messages = getattr(messages, "messages", messages)
    if isinstance(messages, (str, bytes)) or not isinstance(messages, SequenceOf):
        raise TypeError(f"messages is {messages!r} but must be a list of messages")
    if not messages:
        raise ValueError("messages is empty")
    chat = []
    for i, given in enumerate(messages):
        if not is_message(given):
            raise TypeError(f"messages[{i}] is {given!r} but must be a dict with role and content")
        message = {key: value for key, value in plain(given).items() if value is not None}
        raw = given.get("content") if isinstance(given, Mapping) else message.get("content")
        if not (raw is None or isinstance(raw, (str, list, tuple)) or is_message(raw)):
            raise TypeError(f"messages[{i}]: content is {raw!r} but must be a text, or a list of parts")
        if isinstance(message.get("content"), dict) and _text_of(message["content"]) is not None:
            message["content"] = [message["content"]]  # a part, in no list
        if not isinstance(message.get("role"), str):
            raise ValueError(f"messages[{i}]: role is {message.get('role')!r} but must be a text such as 'user'")
        thoughts = [message[key] for key in REASONING if key in message]
        if thoughts:
            message = {"thinking": thoughts[0]} | message | {"reasoning_content": thoughts[0]}
        chat.append(message)
    return chat


def plain_dicts(name: str, values: object) -> list[Any] | None:
    """Tools or documents as dicts; None: there are none."""
    if values is None:
        return None
    if not isinstance(values, (list, tuple)):
        raise TypeError(f"{name} is {values!r} but must be a list of dicts, or None")
    for i, value in enumerate(values):
        if not is_message(value):
            raise TypeError(f"{name}[{i}] is {value!r} but must be a dict")
    return [plain(value) for value in values]


def check_text_only(messages: Chat) -> None:
    """Raises where a message has a part that the model cannot see. One without a type tells it by its keys."""
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, Mapping) and content.get("type") in PARTS:  # in no list; another one is a tool's result
            content = [content]
        for k, part in enumerate(content if isinstance(content, (list, tuple)) else ()):
            if isinstance(part, Mapping) and (kind := _media(part)) is not None:
                raise ValueError(f"messages[{i}]: part {k} of its content is of type {kind!r}: only text is read")


def _media(part: Mapping[str, Any]) -> str | None:
    if "type" not in part:
        return next((key for key in PARTS if key in part), None)
    kind = str(part["type"])
    return kind if any(word in kind for word in MEDIA) else None


# --- content in parts


def join_parts(messages: Chat, write: Callable[[Chat], str]) -> Chat:
    """The messages with content as a text instead of a list of parts where the template would lose parts of the list.

    Qwen3's own template writes nothing for a list, others write Python's notation of it. Whether a template writes the
    parts is seen when it does: it gets the chat once with lists and once with texts, in which each part carries a mark
    (of characters that Python's notation writes otherwise).
    """
    _check_dicts(messages, write)
    lists = {i: m["content"] for i, m in enumerate(messages) if isinstance(m.get("content"), (list, tuple))}
    if not lists:
        return messages
    marks = {i: [f"\ue000{i}.{k}\ue001" for k in range(len(parts) + 1)] for i, parts in lists.items()}
    marked = {i: _with_marks(parts, marks[i]) for i, parts in lists.items()}
    as_lists = _attempt(write, _with_contents(messages, marked))
    as_texts = _attempt(write, _with_contents(messages, {i: _joined(parts) for i, parts in marked.items()}))
    if as_texts is None:
        return messages

    def is_lost(i: int) -> bool:
        return as_lists is None or any(mark in as_texts and mark not in as_lists for mark in marks[i])

    for i, parts in lists.items():
        for k, part in enumerate(parts if is_lost(i) else ()):
            if _text_of(part) is None:
                raise ValueError(f"messages[{i}]: part {k} of its content is {part!r}, which the template leaves out")
    return _with_contents(messages, {i: _joined(parts) for i, parts in lists.items() if is_lost(i)})


def _check_dicts(messages: Chat, write: Callable[[Chat], str]) -> None:
    """Raises where the template leaves out a content that is a dict, such as a tool's result, as Qwen3's own does."""
    dicts = {i: m["content"] for i, m in enumerate(messages) if isinstance(m.get("content"), Mapping) and m["content"]}
    text = _attempt(write, messages) if dicts else None
    for i, content in dicts.items():
        if text is not None and text == _attempt(write, _with_contents(messages, {i: ""})):
            raise ValueError(f"messages[{i}]: content is {content!r}, which the template leaves out: give a text")


def _text_of(part: Any) -> str | None:
    """Of a text or a dict such as {"type": "text", "text": ...}; None: it has none."""
    text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else part
    return text if isinstance(text, str) else None


def _joined(parts: SequenceOf[Any]) -> str:
    """As vLLM joins them."""
    return "\n".join(text for text in map(_text_of, parts) if text is not None)


def _with_marks(parts: SequenceOf[Any], marks: list[str]) -> list[Any]:
    """The parts with a mark at the end of each text. A list without a text gets one, which is the last mark."""
    marked: list[Any] = []
    for part, mark in zip(parts, marks[:-1], strict=True):
        if isinstance(part, str):
            marked.append(part + mark)
        elif isinstance(part, Mapping):
            texts = {key: part[key] + mark for key in ("text", "refusal") if isinstance(part.get(key), str)}
            marked.append({**part, **texts})
        else:
            marked.append(part)
    has_text = any(_text_of(part) is not None for part in parts)
    return marked if has_text else [*marked, {"type": "text", "text": marks[-1]}]


def _with_contents(messages: Chat, contents: Mapping[int, Any]) -> Chat:
    return [message | ({"content": contents[i]} if i in contents else {}) for i, message in enumerate(messages)]


def _attempt(write: Callable[[Chat], str], messages: Chat) -> str | None:
    try:
        return write(messages)
    except ValueError:
        return None


# --- the arguments of tool calls


def parse_arguments(messages: Chat, *, only_objects: bool = False) -> Chat:
    """The messages with the arguments of tool calls as dicts where they are JSON texts, as servers send them.

    only_objects: others, of a call that was cut, say, are {"invalid_json": what they are}, and none are {}.
    """
    parse = partial(_parsed, only_objects=only_objects)
    return [m | {"tool_calls": list(map(parse, m["tool_calls"]))} if m.get("tool_calls") else m for m in messages]


def easier_forms(messages: Chat) -> list[Chat]:
    """For a template that fails: with the arguments of calls as dicts; with an empty text where there is no content and
    without empty lists of calls; with both; and each of these with one message of the system, which is the first."""
    parsed = parse_arguments(messages, only_objects=True)
    forms = [messages, parsed, _complete(messages), _complete(parsed)]
    return [form for form in [*forms, *map(_with_one_system, forms)] if form != messages]


def _complete(messages: Chat) -> Chat:
    filled = [{**message, "content": message.get("content", "")} for message in messages]
    return [{key: value for key, value in m.items() if (key, value) != ("tool_calls", [])} for m in filled]


def _with_one_system(messages: Chat) -> Chat:
    """Those that follow the first at once are put to it; later ones are the user's, so the prompt begins as before."""
    own = [message["role"] in ("system", "developer") for message in messages]
    count = [*own, False].index(False)
    contents = [message.get("content", "") for message in messages[:count]]
    is_text = all(isinstance(each, str) for each in contents)
    whole: Any = "\n\n".join(contents) if is_text else [part for each in contents for part in _parts(each)]
    head = [messages[0] | {"role": "system", "content": whole}] if count else []
    return head + [m | {"role": "user"} if later else m for m, later in zip(messages[count:], own[count:], strict=True)]


def _parts(content: Any) -> SequenceOf[Any]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}]
    return content if isinstance(content, (list, tuple)) else [content]


def _parsed(call: Any, *, only_objects: bool) -> Any:
    if not isinstance(call, Mapping):
        return call
    changed = {"function": _parsed(call["function"], only_objects=only_objects)} if "function" in call else {}
    value = call.get("arguments")
    if isinstance(value, str):
        try:
            changed["arguments"] = value = json.loads(value or "{}")
        except (ValueError, RecursionError):
            pass  # a text that is no JSON is left to the template
    if only_objects and "arguments" in call and not isinstance(value, Mapping):
        changed["arguments"] = {} if value is None else {"invalid_json": call["arguments"]}
    return {**call, **changed}
