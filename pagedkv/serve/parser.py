"""What an answer consists of: thoughts, text, calls of tools. One machine, for streams and for whole texts.

It goes through the states of a table (formats.py). A literal may be cut anywhere: text that may be its beginning is
held back until that is known, so that the events of all pieces, put together, do not depend on where the pieces end.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from functools import cache, partial
from typing import Any, NamedTuple

from .call_json import ArgumentsReader, CallReader
from .call_xml import XmlArguments
from .custom_tools import InputReader
from .formats import NO_CALLS, THOUGHTS, CallFormat, State

IN_CALL = ("inside", "key", "value")


class Event(NamedTuple):
    """kind: "reasoning", "content"; "call" (its text is the name) and "arguments", or of a custom tool "custom" and
    "input"; call: its number, from 0."""

    kind: str
    text: str
    call: int = -1


class Exits(NamedTuple):
    """The literals that end a state, prepared for the search."""

    literals: tuple[str, ...]
    pattern: re.Pattern[str]  # of two that begin at one place the longer one
    starts: str
    longest: int

    def may_begin(self, text: str) -> bool:
        """Whether the text is the beginning of a literal, and not all of it."""
        return any(len(literal) > len(text) and literal.startswith(text) for literal in self.literals)


@cache
def exits_of(literals: tuple[str, ...]) -> Exits:
    longest_first = sorted(literals, key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) if literals else r"(?!)")
    starts = "".join(sorted({literal[0] for literal in literals}))
    return Exits(literals, pattern, starts, max(map(len, literals), default=0))


class Parser:
    """Reads one answer.

    Args:
        calls: None: calls are text
        tools: the schemas of the parameters, by the names of functions
        start: the first state: of the table of calls, or "begin" or "think" where there are thoughts
        max_calls: further calls are left out
        custom: the names of those that are custom tools
    """

    def __init__(
        self, calls: CallFormat | None, tools: Mapping[str, Any], start: str, max_calls: int | None = None,
        custom: Collection[str] = (),
    ) -> None:  # fmt: skip
        self._table: Mapping[str, State] = {**(calls.table if calls else NO_CALLS), **THOUGHTS}
        self._plain, self._known = (calls.plain, set(tools) if calls.is_bare else None) if calls else ("answer", None)
        self._has_calls, self._tools, self._max_calls = calls is not None, tools, max_calls
        self._buffer, self._events = "", list[Event]()
        self._raw, self._is_pending = "", False  # what may be the beginning of a call whose name is not known yet
        self._blank = ""  # white space at the end of content or thoughts, of which it is not known if it is shown
        self._is_trimmed = self._has_thoughts = False  # whether the next content loses its white space; or the thoughts
        self._word = ""  # a name or a key, as far as it is there
        self._reader: CallReader | ArgumentsReader | None = None
        self._xml: XmlArguments | None = None
        self._custom = custom
        self._input: InputReader | None = None
        self.num_calls = 0
        self._state = self._table[start]
        self._exits = exits_of(tuple(self._state.exits))
        self._is_pending = self._state.text in ("name", "call")

    @property
    def is_thinking(self) -> bool:
        return self._state.text == "reasoning"

    @property
    def is_in_arguments(self) -> bool:
        """Whether those of the last call have begun, or have to, and have no end: the answer has ended within them."""
        reader = self._reader
        return (self._xml is not None or (reader is not None and reader.is_open)) and self._is_wanted()

    def feed(self, text: str, *, is_last: bool = False) -> list[Event]:
        """What is new."""
        if self._is_plain(text) and not is_last:
            self._take(text)
        else:
            self._buffer += text
            while self._step(is_last):
                pass
            if is_last:
                self._end()
        events, self._events = self._events, []
        return _merged(events) if len(events) > 1 else events

    def _is_plain(self, text: str) -> bool:
        """Whether no literal can begin in it, as in most pieces."""
        state = self._state
        if self._buffer or state.other is not None or state.text in ("call", "arguments"):
            return False
        return not any(char in text for char in self._exits.starts)

    # --- one step: whether anything has changed

    def _step(self, is_last: bool) -> bool:
        if self._state.text in ("call", "arguments"):
            return self._read_json()
        other = self._state.other
        if other is not None and self._is_other(is_last):
            if self._is_pending:
                self._give_up()
            else:
                self._go(other)
            return True
        at, literal = self._find(is_last)
        if literal is None and (other is not None or not at):
            return False  # white space, the beginning of a literal, or nothing
        if other is None and at:
            self._take(self._cut(at))
        if literal is None:
            return False
        passed = self._cut((at if other is not None else 0) + (0 if literal == self._state.kept else len(literal)))
        following = self._state.exits[literal]
        if self._is_pending and self._table[following].text == "content":
            self._raw += passed
            self._give_up()
            return True
        self._go(following)
        if self._is_pending:
            self._raw += passed
        return True

    def _cut(self, count: int) -> str:
        text, self._buffer = self._buffer[:count], self._buffer[count:]
        return text

    def _find(self, is_last: bool) -> tuple[int, str | None]:
        """Where the first exit begins, and which it is; None: where the beginning of one may be."""
        exits, buffer = self._exits, self._buffer
        found = exits.pattern.search(buffer)
        at = found.start() if found else len(buffer)
        if not is_last:
            for i in range(max(len(buffer) - exits.longest + 1, 0), min(at + 1, len(buffer))):
                if buffer[i] in exits.starts and exits.may_begin(buffer[i:]):
                    return i, None
        return at, found[0] if found else None

    def _is_other(self, is_last: bool) -> bool:
        """Whether there is a character that is neither white space nor begins an exit."""
        rest = self._buffer.lstrip()
        if not rest or self._exits.pattern.match(rest):
            return False
        return is_last or not self._exits.may_begin(rest)

    def _read_json(self) -> bool:
        if self._reader is None and self._state.text == "call":
            self._reader = CallReader(self._begin_call, self._show_arguments, self._known)
        elif self._reader is None:
            self._begin_call(self._word.strip())
            self._reader = ArgumentsReader(self._show_arguments)
        at = self._reader.feed(self._buffer, 0)
        passed = self._cut(at)
        if self._is_pending:
            self._raw += passed
        if isinstance(self._reader, CallReader) and self._reader.has_failed:
            self._give_up()
        elif self._reader.is_done:
            self._go(str(self._state.other))
        else:
            return False
        return True

    # --- what belongs to a state

    def _take(self, text: str) -> None:
        kind = self._state.text
        if self._is_pending:
            self._raw += text
        if kind == "content":
            self._show_content(text)
        elif kind == "reasoning":
            self._show_reasoning(text)
        elif kind == "value" and self._xml is not None:
            self._xml.value(text)
        elif kind in ("name", "key"):
            self._word += text

    def _go(self, name: str) -> None:
        old, self._state, self._reader = self._state, self._table[name], None
        self._exits = exits_of(tuple(self._state.exits))
        kind = self._state.text
        self._is_pending = kind in ("before", "name", "call") or (self._is_pending and kind == "arguments")
        if old.text == "reasoning":
            self._blank, self._is_trimmed = "", True
        if kind in ("name", "key"):
            self._word = ""
        if kind == "inside" and self._xml is None:
            self._begin_call(self._word.strip())
            self._xml = XmlArguments(self._show_arguments, self._tools.get(self._word.strip()))
        elif kind == "value" and self._xml is not None:
            self._xml.key(self._word.strip())
        elif old.text == "value" and self._xml is not None:
            self._xml.end_value()
        if kind not in IN_CALL and self._xml is not None:
            self._xml.end()
            self._xml = None
        if kind not in IN_CALL and self._input is not None:
            self._input.finish()
            self._input = None

    def _give_up(self) -> None:
        """It was no call."""
        text, self._raw = self._raw, ""
        self._go(self._plain)
        self._show_content(text)

    def _end(self) -> None:
        if self._reader is not None:
            self._reader.finish()
        if self._input is not None:
            self._input.finish()
        if self._is_pending:
            self._raw += self._cut(len(self._buffer))
            self._give_up()
        if self._state.text == "content":
            self._show_content(self._cut(len(self._buffer)))
            if self._blank and not self.num_calls:
                self._events.append(Event("content", self._blank))
        self._blank = ""

    # --- events

    def _show_content(self, text: str) -> None:
        if self._is_trimmed:
            text = text.lstrip()
            self._is_trimmed = not text
        if self._has_calls:
            text = self._blank + text
            shown = text.rstrip()
            self._blank = text[len(shown) :]
            text = shown
        if text:
            self._events.append(Event("content", text))

    def _show_reasoning(self, text: str) -> None:
        text = self._blank + text
        if not self._has_thoughts:
            text = text.lstrip()
        shown = text.rstrip()
        self._blank = text[len(shown) :]
        if shown:
            self._has_thoughts = True
            self._events.append(Event("reasoning", shown))

    def _begin_call(self, name: str) -> None:
        self._raw, self._is_pending, self._blank, self._is_trimmed = "", False, "", True
        self.num_calls += 1
        self._input = InputReader(partial(self._show_part, "input")) if name in self._custom else None
        self._show_part("call" if self._input is None else "custom", name)

    def _show_arguments(self, text: str) -> None:
        if self._input is None:
            self._show_part("arguments", text)
        else:
            self._input.feed(text)

    def _show_part(self, kind: str, text: str) -> None:
        """Of the last call. A name is shown even if it is empty."""
        if (text or kind in ("call", "custom")) and self._is_wanted():
            self._events.append(Event(kind, text, self.num_calls - 1))

    def _is_wanted(self) -> bool:
        return self._max_calls is None or self.num_calls <= self._max_calls


def _merged(events: list[Event]) -> list[Event]:
    merged: list[Event] = []
    for event in events:
        is_name = event.kind in ("call", "custom")
        if merged and not is_name and (merged[-1].kind, merged[-1].call) == (event.kind, event.call):
            event = event._replace(text=merged.pop().text + event.text)
        merged.append(event)
    return merged
