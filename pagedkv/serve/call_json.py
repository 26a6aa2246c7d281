"""A call as a JSON object, read while it comes: its name, then its arguments as they are written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection

IN_STRING, OUT_OF_STRING, AFTER_SCALAR = re.compile(r'["\\]'), re.compile(r'["{}\[\]]'), re.compile(r"[\s,}\]]")
CONTROL = re.compile(r"[\0-\x1f]")
BLANK = re.compile(r"[ \t\r\n]*")
NAME_KEY, ARGUMENTS_KEYS = "name", ("arguments", "parameters")


class JsonValue:
    """Finds the end of a value. It does not look whether the value is right."""

    def __init__(self) -> None:
        self._depth, self._has_begun, self.is_done = 0, False, False
        self.in_string = self.is_escaped = False

    def feed(self, text: str, at: int) -> int:
        """The position behind what belongs to the value."""
        while at < len(text) and not self.is_done:
            if self.is_escaped:
                self.is_escaped, at = False, at + 1
            elif self.in_string:
                at = self._seek(IN_STRING, text, at)
            elif self._depth:
                at = self._seek(OUT_OF_STRING, text, at)
            elif not self._has_begun:
                self._has_begun = True
                self.is_done = text[at] in ",}]"  # there is no value at all
                if text[at] in '"{[':
                    self._take(text[at])
                at += not self.is_done
            else:
                found = AFTER_SCALAR.search(text, at)
                self.is_done, at = found is not None, found.start() if found else len(text)
        return at

    def _seek(self, pattern: re.Pattern[str], text: str, at: int) -> int:
        found = pattern.search(text, at)
        if found is None:
            return len(text)
        self._take(found[0])
        return found.end()

    def _take(self, char: str) -> None:
        if char == "\\":
            self.is_escaped = True
        elif char == '"':
            self.in_string = not self.in_string
        else:
            self._depth += 1 if char in "{[" else -1
        self.is_done = not self.in_string and not self._depth


class ArgumentsReader:
    """Arguments that stand alone, as a JSON value."""

    def __init__(self, show: Callable[[str], None]) -> None:
        self._show, self._value, self._held = show, JsonValue(), ""
        self._is_object: bool | None = None  # None: it has not begun
        self.is_done = False

    @property
    def is_open(self) -> bool:
        return not self.is_done

    def feed(self, text: str, at: int) -> int:
        start = at if self._is_object is not None else BLANK.match(text, at).end()  # type: ignore[union-attr]
        state = self._value.in_string, self._value.is_escaped
        end = self._value.feed(text, start)
        if end > start and self._is_object is None:
            self._is_object = text[start] == "{"
        new = text[start:end]
        if self._is_object:
            self._show(_escaped(new, *state))
        else:  # a text that holds them, say
            self._held += new
        self.is_done = self._value.is_done
        if self.is_done and not self._is_object:
            self._show(_within(self._held))
        return end

    def finish(self) -> None:
        if not self.is_done and self._held:
            self._show(self._held)


class CallReader:
    """{"name": ..., "arguments": {...}} in any order.

    start: is called with the name, before the arguments are shown. Nothing is shown of what fails before; a failure
    after it is the end.
    known: the names of tools, where nothing else tells a call from another object; None: any name is one
    """

    def __init__(
        self, start: Callable[[str], None], show: Callable[[str], None], known: Collection[str] | None
    ) -> None:
        self._start, self._show, self._known = start, show, known
        self._phase: Callable[[str, int], int] = self._open
        self._key, self._held, self._value = "", "", JsonValue()
        self._early: list[str] = []  # arguments before the name
        self._arguments: ArgumentsReader | None = None
        self.name: str | None = None
        self.is_done = self.has_failed = False

    @property
    def is_open(self) -> bool:
        """Whether there is a name, and no end of the arguments."""
        has_arguments = self._arguments is not None and self._arguments.is_done
        return self.name is not None and not (self.is_done or has_arguments)

    def feed(self, text: str, at: int) -> int:
        """The position behind what belongs to the object, or before what does not."""
        while at < len(text) and not (self.is_done or self.has_failed):
            if self._phase in (self._open, self._next_key, self._colon, self._begin_value):
                at = BLANK.match(text, at).end()  # type: ignore[union-attr]
                if at == len(text):
                    break
            at = self._phase(text, at)
        return at

    def finish(self) -> None:
        """Nothing more comes."""
        if self.name is None:
            self.has_failed = True
        elif self._arguments is not None:
            self._arguments.finish()

    def _fail(self, at: int) -> int:
        self.has_failed = self.name is None
        self.is_done = not self.has_failed
        return at

    def _open(self, text: str, at: int) -> int:
        if text[at] != "{":
            return self._fail(at)
        self._phase = self._next_key
        return at + 1

    def _next_key(self, text: str, at: int) -> int:
        if text[at] == "}":
            if self.name is None:
                return self._fail(at)
            if self._arguments is None:
                self._show("{}")
            self.is_done = True
            return at + 1
        if text[at] == ",":
            return at + 1
        if text[at] != '"':
            return self._fail(at)
        self._phase, self._value, self._held = self._read_key, JsonValue(), ""
        return at

    def _read_key(self, text: str, at: int) -> int:
        end = self._hold(text, at)
        if self._value.is_done:
            self._key, self._phase = self._held, self._colon
            try:
                self._key = json.loads(self._held)
            except ValueError:
                return self._fail(end)
            if self._known is not None and self._key not in (NAME_KEY, "type", "id", *ARGUMENTS_KEYS):
                return self._fail(end)
        return end

    def _colon(self, text: str, at: int) -> int:
        if text[at] != ":":
            return self._fail(at)
        self._phase = self._begin_value
        return at + 1

    def _begin_value(self, text: str, at: int) -> int:
        self._value, self._held = JsonValue(), ""
        if self._key in ARGUMENTS_KEYS and self._arguments is None:
            self._arguments, self._phase = ArgumentsReader(self._show_or_keep), self._read_arguments
        else:
            self._phase = self._read_name if self._key == NAME_KEY else self._pass
        return at

    def _read_arguments(self, text: str, at: int) -> int:
        assert self._arguments is not None
        end = self._arguments.feed(text, at)
        if self._arguments.is_done:
            self._phase = self._next_key
        return end

    def _show_or_keep(self, text: str) -> None:
        if self.name is None:
            self._early.append(text)
        else:
            self._show(text)

    def _pass(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        if self._value.is_done:
            self._phase = self._next_key
        return end

    def _read_name(self, text: str, at: int) -> int:
        end = self._hold(text, at)
        if self._value.is_done:
            self._phase = self._next_key
            try:
                name = json.loads(self._held)
            except ValueError:
                return self._fail(end)
            if not isinstance(name, str) or not name or not (self._known is None or name in self._known):
                return self._fail(end)
            if self.name is None:
                self.name = name
                self._start(name)
                for early in self._early:
                    self._show(early)
        return end

    def _hold(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        self._held += text[at:end]
        return end


def _within(text: str) -> str:
    """Arguments that are no object: a JSON text of them, or null."""
    try:
        value = json.loads(text or "null", strict=False)
    except (ValueError, RecursionError):
        return text
    if value is None:
        return "{}"
    return _escaped(value if isinstance(value, str) else text)


def _escaped(text: str, in_string: bool = False, is_escaped: bool = False) -> str:
    """A part of JSON without control characters in its strings. It begins in a string, or behind a backslash there."""
    if CONTROL.search(text) is None:
        return text
    chars = []
    for char in text:
        is_control = in_string and char < " "
        chars.append(json.dumps(char)[1 + is_escaped : -1] if is_control else char)
        in_string ^= char == '"' and not is_escaped
        is_escaped = in_string and char == "\\" and not is_escaped
    return "".join(chars)
