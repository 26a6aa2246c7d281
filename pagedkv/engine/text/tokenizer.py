"""tokenizer.json, read by the `tokenizers` library when it is first needed, and the tokens of the files beside it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedkv.models.files import read_json, refuse_pointer
from pagedkv.optional import load

from .detokenizer import Detokenizer, bytes_of_tokens, detokenizers, text_before

if TYPE_CHECKING:
    import tokenizers
    from tokenizers import AddedToken

RANDOM = ("dropout", "alpha", "nbest_size")  # settings of a tokenizer's model that draw one of several splits


# Characters: encoding them takes 1 ms and more. Only the library's batch functions let go of the GIL meanwhile.
LONG_TEXT = 4096


class Tokenizer:
    """A prompt becomes the token ids that transformers 5.24 makes of it. docs/files.md has the differences."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "tokenizer.json"
        self._detokenizers: dict[tuple[bool, bool], Callable[..., Detokenizer]] = {}  # by skip_special_tokens, goes_on

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
        tokenizers = load("tokenizers")
        refuse_pointer(self.path)
        try:
            library = tokenizers.Tokenizer.from_file(str(self.path))
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
        """Raises ValueError for a text that has no tokens."""
        tokenizer = self.library
        text.encode()  # UnicodeEncodeError for a lone surrogate; the library's own message does not help
        try:
            if len(text) > LONG_TEXT:
                (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
            else:
                encoding = tokenizer.encode(text, add_special_tokens=add_special_tokens)
        except BaseException as error:
            if type(error) is not Exception and type(error).__name__ != "PanicException":
                raise
            # The library's own error, of a character without a token, say; or it has failed, which is no Exception
            raise ValueError(f"the tokenizer cannot encode the text: {error}") from None
        ids: list[int] = encoding.ids
        return ids

    def starts(self, text: str) -> list[int]:
        """Where each of its tokens begins in the text, in characters. One that the tokenizer adds begins where the one
        before it does."""
        return list(accumulate((start for start, _ in self.library.encode(text).offsets), max))

    def encode_words(self, words: Iterable[str]) -> list[list[int]]:
        """The tokens of each word, as it stands at the start of a text and after a space. As in vLLM, other ways to
        split the same text into tokens are left out."""
        texts = dict.fromkeys(text for word in words for text in (word, " " + word.lstrip()))
        return [ids for ids in (self.encode(text, add_special_tokens=False) for text in texts) if ids]

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True, goes_on: bool = False) -> str:
        """The text that a Detokenizer makes of them; goes_on: another text is before this one, from which a space may
        part it."""
        before = self._text_before if goes_on else []
        text: str = self.library.decode(before + token_ids, skip_special_tokens=skip_special_tokens)
        if "\ufffd" in text and self.bytes_of_tokens is None:  # see WindowDetokenizer
            grown = self.detokenizer(skip_special_tokens=skip_special_tokens, goes_on=goes_on)
            for token_id in token_ids:
                grown.push(token_id)
            grown.finish()
            return grown.text
        return text[len(self.library.decode(before, skip_special_tokens=skip_special_tokens)) :] if before else text

    @cached_property
    def _text_before(self) -> list[int]:
        return text_before(self.library)

    @cached_property
    def bytes_of_tokens(self) -> Mapping[int, bytes] | None:
        """See detokenizer.bytes_of_tokens()."""
        return bytes_of_tokens(self.library)

    def detokenizer(
        self, stop: tuple[str, ...] = (), include_stop_str_in_output: bool = False, skip_special_tokens: bool = True,
        goes_on: bool = False,
    ) -> Detokenizer:  # fmt: skip
        """For the tokens of one answer, one at a time; goes_on: see decode()."""
        make = self._detokenizers.get((skip_special_tokens, goes_on))
        if make is None:
            make = detokenizers(self.library, skip_special_tokens=skip_special_tokens, goes_on=goes_on)
            self._detokenizers[skip_special_tokens, goes_on] = make
        return make(stop, include_stop_str_in_output)


NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# What a tokenizer class names where the folder does not.
DEFAULTS = {"Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")}


class NamedTokens(NamedTuple):
    """What a folder's files say of tokens, as JSON has it: a token is a text, or a dict with "content" and FLAGS."""

    named: dict[str, Any]  # by a name such as "eos_token"; None: there shall be none
    extra: list[Any]  # special tokens without a name
    listed: dict[int, Any] | None  # added_tokens_decoder, by token id; without it the older files count
    older: dict[str, int]  # added_tokens.json, which has no flags
    splits_special_tokens: bool  # special tokens in a prompt are ordinary text

    @staticmethod
    def from_folder(folder: Path) -> NamedTokens:
        settings = read_json(folder / "tokenizer_config.json", missing={})
        special: dict[str, Any] = {}
        older: dict[str, int] = {}
        decoder = settings.get("added_tokens_decoder")
        if decoder is None:
            special = read_json(folder / "special_tokens_map.json", missing={})
            special = {name: {**t, "special": True} if isinstance(t, dict) else t for name, t in special.items()}
            older = read_json(folder / "added_tokens.json", missing={})
        try:
            named, extra = _named_and_extra(settings, special)
            listed = None if decoder is None else {int(token_id): token for token_id, token in decoder.items()}
            for token in [*(each for each in named.values() if each is not None), *extra, *(listed or {}).values()]:
                _check(token)
            if not all(isinstance(each, dict) for each in (listed or {}).values()):
                raise ValueError(f"added_tokens_decoder is {decoder!r} but must hold tokens with flags")
            if not all(isinstance(each, int) for each in older.values()):
                raise ValueError(f"added_tokens.json holds {older!r} but must hold token ids")
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}: tokenizer_config.json or special_tokens_map.json: {error}") from None
        return NamedTokens(named, extra, listed, older, bool(settings.get("split_special_tokens", False)))

    def texts(self) -> dict[str, str]:
        """The texts of the tokens with names: what a chat template may write."""
        return {name: _text(token) for name, token in self.named.items() if token is not None}

    def add_to(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Adds those that the tokenizer lacks. One that it has as a word of its vocabulary keeps its id."""
        present, older = tokenizer.get_added_tokens_decoder(), self._older_tokens()
        named = self.named
        if tokenizer.padding is not None:
            named = _in_order({"pad_token": tokenizer.padding["pad_token"]} | named)
        named = {name: token for name, token in named.items() if token is not None}
        listed = {token_id: _added({"special": False} | token) for token_id, token in (self.listed or {}).items()}
        if self.listed is None:
            listed = {token_id: older[text] for text, token_id in self.older.items()} | present
        new = [token for _, token in sorted(listed.items(), key=lambda each: each[0])]
        texts = {token.content for token in [*present.values(), *new]}
        given = [token for token in named.values() if _text(token) not in texts]
        given += [token for token in self.extra if _text(token) not in texts and token not in given]
        usual = [named.get(name) for name in NAMES]
        new += [older.get(_text(each), _added(each)) if each in usual else _added(each) for each in given]
        names = {_text(token) for token in named.values()}
        for token in new:
            token.special = token.special or token.content in names
        tokenizer.add_tokens(new)

    def _older_tokens(self) -> dict[str, AddedToken]:
        """The tokens of added_tokens.json, by their texts. Special are those that another file calls so."""
        others = [*(self.named.get(name) for name in NAMES), *self.extra]
        special = {_text(token) for token in others if token is not None and not _has_type(token)}
        return {
            text: _added({"content": text, "special": text in special, "normalized": text not in special})
            for text in self.older
        }


def _named_and_extra(settings: dict[str, Any], special: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Of tokenizer_config.json, and of special_tokens_map.json, which counts before it for the usual names."""
    defaults = DEFAULTS.get(str(settings.get("tokenizer_class")).removesuffix("Fast"), {})
    usual = {name: token for name, token in (defaults | settings | special).items() if name in NAMES}
    texts, flagged = _own(settings, str), _own(settings, dict)
    own = flagged | _own(special, (str, dict)) | texts  # the texts are added last
    named, extra = _extra(settings, special)
    return _in_order(usual | own | named), extra


EXTRA, ADDITIONAL = "extra_special_tokens", "additional_special_tokens"  # the second is the older name


def _extra(settings: dict[str, Any], special: dict[str, Any]) -> tuple[dict[str, Any], list[Any]]:
    """Tokens beside the usual ones, with names of their own and without. A null counts where no key would not."""
    named: dict[str, Any] = {}
    found = {key: settings[key] for key in (EXTRA, ADDITIONAL) if key in settings}
    if ADDITIONAL in found and not found.get(EXTRA):
        found[EXTRA] = found.pop(ADDITIONAL)
    for more in ({}, special):
        if ADDITIONAL in more:
            found[ADDITIONAL] = more[ADDITIONAL]
        if isinstance(more.get(EXTRA), list):
            found[EXTRA] = [*(found.get(EXTRA) or []), *more[EXTRA]]
        elif EXTRA in more:
            found[EXTRA] = more[EXTRA]
        if isinstance(found.get(EXTRA), dict):
            named |= found.pop(EXTRA)
    return named, found.get(EXTRA, found.get(ADDITIONAL)) or []


def _own(tokens: dict[str, Any], kind: type | tuple[type, ...]) -> dict[str, Any]:
    """Those with a name that not all tokenizers know, such as "image_token"."""
    names = [name for name in tokens if name.endswith("_token") and name not in NAMES]
    return {name: tokens[name] for name in names if isinstance(tokens[name], kind)}


def _in_order(named: dict[str, Any]) -> dict[str, Any]:
    """The usual names first."""
    return {name: named[name] for name in NAMES if name in named} | named


def _text(token: Any) -> str:
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        raise ValueError(f"{token!r} is no token: neither a text nor a dict with a content")
    return text


def _check(token: Any) -> None:
    _text(token).encode()  # raises for a lone surrogate
    flags = {name: token[name] for name in FLAGS if name in token} if isinstance(token, dict) else {}
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise ValueError(f"{token!r} is no token: {name} must be true or false")


def _has_type(token: Any) -> bool:
    """Whether it is a dict as transformers has written it, with all flags that the token has."""
    return isinstance(token, dict) and "__type" in token


def _added(token: Any) -> AddedToken:
    """A token for the library. It is special, unless its flags say otherwise."""
    from tokenizers import AddedToken

    given = token if isinstance(token, dict) else {"content": token}
    flags = {name: given[name] for name in FLAGS if name in given}
    return AddedToken(given["content"], **{"special": not _has_type(token)} | flags)
