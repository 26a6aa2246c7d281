"""tokenizer.json, read by the `tokenizers` library when the first text must be encoded or decoded."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

from .text_stream import TextStream, text_stream


class Tokenizer:
    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokenizer.json"

    @cached_property
    def exists(self) -> bool:
        return self.path.is_file()

    @cached_property
    def library(self) -> Any:
        """The tokenizer, of the `tokenizers` library."""
        if not self.exists:
            raise FileNotFoundError(f"{self.path} is missing: without it prompts must be lists of token ids")
        from tokenizers import Tokenizer as Loaded

        try:
            return Loaded.from_file(str(self.path))
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"{self.path}: {error}") from None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self.library
        text.encode()  # UnicodeEncodeError for a lone surrogate; the library's own message does not help
        ids: list[int] = tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.library.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def text_stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """For the tokens of one answer, one at a time."""
        return text_stream(self.library, skip_special_tokens=skip_special_tokens)
