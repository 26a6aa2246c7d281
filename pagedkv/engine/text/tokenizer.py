"""tokenizer.json, read by the `tokenizers` library when it is first needed, and the tokens of the files beside it."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Any

from pagedkv.models.config import refuse_pointer

from .added_tokens import NamedTokens
from .text_stream import TextStream, text_streams

RANDOM = ("dropout", "alpha", "nbest_size")  # settings of a tokenizer's model that draw one of several splits


# Characters: encoding them takes 1 ms and more. Only the library's batch functions let go of the GIL meanwhile.
LONG_TEXT = 4096


class Tokenizer:
    """A prompt becomes the token ids that transformers 5.24 makes of it. docs/files.md has the differences."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokenizer.json"
        self._streams: dict[bool, Callable[[], TextStream]] = {}  # by skip_special_tokens

    def __repr__(self) -> str:
        return f"<Tokenizer of {self.path}>"

    @cached_property
    def exists(self) -> bool:
        return self.path.is_file()

    @cached_property
    def named_tokens(self) -> NamedTokens:
        return NamedTokens.from_folder(self.path.parent)

    @cached_property
    def library(self) -> Any:
        """The tokenizer, of the `tokenizers` library. What its file holds of a training (truncation, padding, random
        splits) is switched off."""
        if not self.exists:
            raise FileNotFoundError(f"{self.path} is missing: without it prompts must be lists of token ids")
        from tokenizers import Tokenizer as Loaded

        refuse_pointer(self.path)
        try:
            library = Loaded.from_file(str(self.path))
        except Exception as error:  # the library raises a bare Exception
            raise ValueError(f"{self.path}: {error}") from None
        self.named_tokens.add_to(library)
        library.encode_special_tokens = self.named_tokens.splits_special_tokens
        library.no_truncation()
        library.no_padding()
        for name in RANDOM:
            if getattr(library.model, name, None) is not None:
                setattr(library.model, name, None)
        return library

    def eos_token_ids(self) -> frozenset[int]:
        """The id of the folder's eos_token, if it names one."""
        text = self.named_tokens.texts().get("eos_token")
        return frozenset([self.library.token_to_id(text)]) if text and self.exists else frozenset()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        tokenizer = self.library
        text.encode()  # UnicodeEncodeError for a lone surrogate; the library's own message does not help
        if len(text) > LONG_TEXT:
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        else:
            encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return ids

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        text: str = self.library.decode(token_ids, skip_special_tokens=skip_special_tokens)
        return text

    def text_stream(self, *, skip_special_tokens: bool = True) -> TextStream:
        """For the tokens of one answer, one at a time."""
        if skip_special_tokens not in self._streams:
            self._streams[skip_special_tokens] = text_streams(self.library, skip_special_tokens=skip_special_tokens)
        return self._streams[skip_special_tokens]()
