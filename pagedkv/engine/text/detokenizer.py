"""The text of an answer as it grows, and the stop strings that end it."""

from __future__ import annotations

from .tokenizer import Tokenizer


class Detokenizer:
    """The text of one answer.

    Text that may be the beginning of a stop string is held back until it is known not to be. If a token completes
    several stop strings, the one that begins first counts; of those that begin at one place, the first in the list.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        stop: tuple[str, ...] = (),
        include_stop_str_in_output: bool = False,
    ) -> None:
        self._stream = tokenizer.text_stream(skip_special_tokens=skip_special_tokens)
        self._stop, self._includes_stop = stop, include_stop_str_in_output
        self.num_tokens = 0  # how many were pushed
        self._pieces: list[str] = []  # what may be shown so far; it only grows
        self.num_told = 0  # how many of them earlier outputs have shown
        self._joined = 0, ""  # how many of them text_until() has joined, and their text
        self._held = ""
        self._has_ended = False

    @property
    def text(self) -> str:
        """All that may be shown so far."""
        return "".join(self._pieces)

    @property
    def num_pieces(self) -> int:
        return len(self._pieces)

    def text_between(self, start: int, end: int) -> str:
        """The text of the pieces [start, end)."""
        return "".join(self._pieces[start:end])

    def text_until(self, end: int) -> str:
        """All text up to the piece `end`. Each piece is joined once, where calls come in order."""
        count, text = self._joined
        if count > end:
            return self.text_between(0, end)
        text += self.text_between(count, end)
        self._joined = end, text
        return text

    def push(self, token_id: int, *, check_stop: bool = True) -> str | None:
        """Takes a token; returns the stop string that it completes, which ends the text (check_stop: if one may)."""
        new = self._stream.push(token_id)
        self.num_tokens += 1
        if not self._stop:
            self._show(new)
            return None
        num_old, held = len(self._held), self._held + new
        found = self._find(held, num_old) if check_stop and new else None
        if found is not None:
            at, stop = found
            self._held, self._has_ended = "", True
            self._show(held[: at + len(stop)] if self._includes_stop else held[:at])
            return stop
        start = self._start_of_stop(held)
        self._show(held[:start])
        self._held = held[start:]
        return None

    def finish(self) -> None:
        """No more tokens come: shows what was held back, except after a stop string. A second call changes nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        self._show(self._held + self._stream.finish())
        self._held = ""

    def _show(self, text: str) -> None:
        if text:
            self._pieces.append(text)

    def _find(self, text: str, num_old: int) -> tuple[int, str] | None:
        """The first stop string that ends after the first num_old characters, and where it begins."""
        found = None
        for stop in self._stop:
            at = text.find(stop, max(num_old - len(stop) + 1, 0))
            if at >= 0 and (found is None or at < found[0]):
                found = at, stop
        return found

    def _start_of_stop(self, text: str) -> int:
        """Where the longest suffix of the text starts with which a stop string begins."""
        longest = max(len(stop) for stop in self._stop) - 1
        for start in range(max(len(text) - longest, 0), len(text)):
            end = text[start:]
            if any(stop.startswith(end) for stop in self._stop):
                return start
        return len(text)
