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
        self._shown: list[str] = []
        self._num_taken = 0  # how many of them new_text() has returned
        self._held = ""
        self._has_ended = False

    @property
    def text(self) -> str:
        """All that may be shown so far."""
        return "".join(self._shown)

    def new_text(self) -> str:
        """What may be shown since the last call."""
        new = "".join(self._shown[self._num_taken :])
        self._num_taken = len(self._shown)
        return new

    def push(self, token_id: int, *, check_stop: bool = True) -> str | None:
        """Takes a token; returns the stop string that it completes, which ends the text (check_stop: if one may)."""
        new = self._stream.push(token_id)
        if not self._stop:
            self._shown.append(new)
            return None
        num_old, held = len(self._held), self._held + new
        found = self._find(held, num_old) if check_stop and new else None
        if found is not None:
            at, stop = found
            self._held, self._has_ended = "", True
            self._shown.append(held[: at + len(stop)] if self._includes_stop else held[:at])
            return stop
        start = self._start_of_stop(held)
        self._shown.append(held[:start])
        self._held = held[start:]
        return None

    def finish(self) -> None:
        """No more tokens come: shows what was held back, except after a stop string. A second call changes nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        self._shown.append(self._held + self._stream.finish())
        self._held = ""

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
