"""The text of an answer as it grows, and the stop strings that end it.

A Detokenizer gives the text that each token adds, in whole characters, at a cost that does not grow with the text.
"""

from __future__ import annotations

import codecs
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any


def detokenizers(
    tokenizer: Any, *, skip_special_tokens: bool, goes_on: bool = False
) -> Callable[..., Detokenizer]:
    """What makes Detokenizers for this tokenizer (of the `tokenizers` library), given their stop strings. They share
    the bytes of its tokens, so it should be kept as long as the tokenizer is, and no longer.

    goes_on: another text is before this one: see text_before()."""
    if _is_byte_level(tokenizer):
        return partial(ByteDetokenizer, _BytesOfTokens(tokenizer, skip_special_tokens))
    skipped = _special_ids(tokenizer) if skip_special_tokens else frozenset()
    return partial(WindowDetokenizer, tokenizer, skipped, text_before(tokenizer) if goes_on else [])


def text_before(tokenizer: Any) -> list[int]:
    """A token that stands for the text before another one: the space of SentencePiece. Decoders of its kind take away
    the space with which the first token of all begins, and other tokenizers have no such token."""
    token_id = tokenizer.token_to_id("\u2581")
    return [] if token_id is None else [token_id]


def bytes_of_tokens(tokenizer: Any) -> Mapping[int, bytes] | None:
    """By token ids; None: a token of this tokenizer does not stand for its bytes."""
    return _BytesOfTokens(tokenizer, False) if _is_byte_level(tokenizer) else None


def _is_byte_level(tokenizer: Any) -> bool:
    from tokenizers.decoders import ByteLevel

    return isinstance(tokenizer.decoder, ByteLevel)


class Detokenizer(ABC):
    """The text of one answer: what the tokenizer makes of all its tokens at once.

    Text that may be the beginning of a stop string is held back until it is known not to be. If a token completes
    several stop strings, the one that begins first counts; of those that begin at one place, the first in the list.
    """

    def __init__(self, stop: tuple[str, ...] = (), include_stop_str_in_output: bool = False) -> None:
        self._stop, self._includes_stop = stop, include_stop_str_in_output
        self.num_tokens = 0  # how many were pushed
        self._pieces: list[str] = []  # see text
        self._held = ""
        self._has_ended = False

    @property
    def text(self) -> str:
        """All that may be shown, and was not marked as sent."""
        return "".join(self._pieces)

    def mark_sent(self) -> None:
        """The reader has `text`."""
        self._pieces.clear()

    def push(self, token_id: int, *, check_stop: bool = True) -> str | None:
        """Takes a token; returns the stop string that it completes, which ends the text (check_stop: if one may)."""
        new = self._add(token_id)
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
        self._show(self._held + self._rest())
        self._held = ""

    @abstractmethod
    def _add(self, token_id: int) -> str:
        """The text that the token adds. Bytes that the next token may complete to a character are held back."""

    @abstractmethod
    def _rest(self) -> str:
        """The text of what was held back. No token follows."""

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


class ByteDetokenizer(Detokenizer):
    """For byte-level BPE, Qwen3's kind: a token stands for its bytes."""

    def __init__(self, bytes_of_tokens: _BytesOfTokens, *stop: Any) -> None:
        super().__init__(*stop)
        self._bytes = bytes_of_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def _add(self, token_id: int) -> str:
        return self._decoder.decode(self._bytes[token_id])

    def _rest(self) -> str:
        return self._decoder.decode(b"", final=True)


class _BytesOfTokens(dict[int, bytes]):
    """The bytes of each token, filled in when a token is first met."""

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skipped = _special_ids(tokenizer) if skip_special_tokens else frozenset()

    def __missing__(self, token_id: int) -> bytes:
        token = None if token_id in self._skipped else self._tokenizer.id_to_token(token_id)
        value = self[token_id] = b"" if token is None else _bytes_of_token(token)
        return value


def _bytes_of_token(token: str) -> bytes:
    """Each character stands for a byte. A token with any other character was added later, and is its own text."""
    table = _byte_of_char()
    if any(char not in table for char in token):
        return token.encode()
    return bytes(table[char] for char in token)


@cache
def _byte_of_char() -> dict[str, int]:
    """GPT-2's table: printable characters of Latin-1 are their bytes; the other bytes follow in order from U+0100 on
    (https://github.com/openai/gpt-2/blob/master/src/encoder.py, bytes_to_unicode)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _special_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens that decoding skips. The flag of a token does not say it: one that was special once stays so, and one
    that is normalised may be known by another text."""

    def text(token_id: int, skips: bool) -> str:
        decoded: str = tokenizer.decode([token_id], skip_special_tokens=skips)
        return decoded

    return frozenset(i for i in tokenizer.get_added_tokens_decoder() if text(i, True) != text(i, False))


class WindowDetokenizer(Detokenizer):
    """For any other tokenizer: decodes the last tokens with and without the new one.

    Where bytes have tokens of their own and some of a run are not UTF-8, the library writes U+FFFD for each byte of the
    run. Here those stay that were a character before: a stream has told them.
    """

    MAX_HELD = 8  # tokens without text: more than a character has bytes

    def __init__(self, tokenizer: Any, skipped: frozenset[int], before: list[int], *stop: Any) -> None:
        super().__init__(*stop)
        self._tokenizer, self._skipped = tokenizer, skipped
        self._window = before[:]
        self._num_read = len(before)  # how many of them have been returned, and ...
        self._read = self._decode(before)  # ... their text

    def _add(self, token_id: int) -> str:
        if token_id in self._skipped or self._tokenizer.id_to_token(token_id) is None:
            return ""
        self._window.append(token_id)
        text = self._decode(self._window)
        is_cut = text.endswith("\ufffd") and len(self._window) - self._num_read < self.MAX_HELD
        if is_cut or len(text) <= len(self._read):
            return ""
        new = text[len(self._read) :]
        self._window = self._window[self._num_read :]
        self._num_read, self._read = len(self._window), self._decode(self._window)
        return new

    def _rest(self) -> str:
        return self._decode(self._window)[len(self._read) :]

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=False)
        return text
