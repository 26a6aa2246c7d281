"""The tokens that a model's folder names beside tokenizer.json, and how they come into its tokenizer.

They stand in tokenizer_config.json (added_tokens_decoder, extra_special_tokens or additional_special_tokens, bos_token
and every other name that ends in _token) and, in older folders, in special_tokens_map.json and added_tokens.json. What
is added, in which order and with which flags, is what transformers 5.24 adds to the tokenizer of a folder that has
tokenizer.json: prompts must become the token ids that the model was trained with.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pagedkv.models.config import read_json

if TYPE_CHECKING:
    from tokenizers import AddedToken, Tokenizer

NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
# What a tokenizer class names where the folder does not.
DEFAULTS = {"Qwen2Tokenizer": dict.fromkeys(("unk_token", "eos_token", "pad_token"), "<|endoftext|>")}


class NamedTokens(NamedTuple):
    """What a folder's files say of tokens, as JSON has it: a token is a text, or a dict with "content" and FLAGS."""

    named: dict[str, Any]  # by a name such as "eos_token"; None: there shall be none
    extra: list[Any]  # special tokens without a name
    listed: dict[int, Any]  # added_tokens_decoder, by token id; without it the older files count
    older: dict[str, int]  # added_tokens.json, which has no flags
    splits_special_tokens: bool  # special tokens in a prompt are ordinary text

    @staticmethod
    def from_folder(folder: Path) -> NamedTokens:
        settings = read_json(folder / "tokenizer_config.json", missing={})
        special: dict[str, Any] = {}
        older: dict[str, int] = {}
        if settings.get("added_tokens_decoder") is None:
            special = read_json(folder / "special_tokens_map.json", missing={})
            special = {name: {**t, "special": True} if isinstance(t, dict) else t for name, t in special.items()}
            older = read_json(folder / "added_tokens.json", missing={})
        try:
            named, extra = _named_and_extra(settings, special)
            listed = {int(token_id): t for token_id, t in (settings.get("added_tokens_decoder") or {}).items()}
            for token in [*filter(None, named.values()), *extra, *listed.values()]:
                _text(token)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}: tokenizer_config.json or special_tokens_map.json: {error}") from None
        return NamedTokens(named, extra, listed, older, bool(settings.get("split_special_tokens", False)))

    def texts(self) -> dict[str, str]:
        """The texts of the tokens with names: what a chat template may write."""
        return {name: _text(token) for name, token in self.named.items() if token is not None}

    def add_to(self, tokenizer: Tokenizer) -> None:
        """Adds those that the tokenizer lacks. One that it has as a word of its vocabulary keeps its id."""
        present, older = tokenizer.get_added_tokens_decoder(), self._older_tokens()
        named = self.named
        if tokenizer.padding is not None:
            named = _in_order({"pad_token": tokenizer.padding["pad_token"]} | named)
        named = {name: token for name, token in named.items() if token is not None}
        listed = {token_id: _added({"special": False} | token) for token_id, token in self.listed.items()}
        listed |= {token_id: older[text] for text, token_id in self.older.items() if token_id not in present}
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
    extra, more = settings.get("extra_special_tokens"), special.get("extra_special_tokens")
    for each in (extra, more):
        own |= each if isinstance(each, dict) else {}
    if not extra or isinstance(extra, dict):
        extra = settings.get("additional_special_tokens", extra)
    lists = [each for each in (extra, more) if isinstance(each, list)]
    lists = lists or [special.get("additional_special_tokens") or []]
    return _in_order(usual | own), [token for each in lists for token in each]


def _own(tokens: dict[str, Any], kind: type | tuple[type, ...]) -> dict[str, Any]:
    """Those with a name that not all tokenizers know, such as "image_token"."""
    names = [name for name in tokens if name.endswith("_token") and name not in NAMES]
    return {name: tokens[name] for name in names if isinstance(tokens[name], kind)}


def _in_order(named: dict[str, Any]) -> dict[str, Any]:
    """The usual names first."""
    return {name: named[name] for name in NAMES if name in named} | named


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _text(token: Any) -> str:
    if not _is_token(token):
        raise ValueError(f"{token!r} is no token: neither a text nor a dict with a content")
    return str(token["content"] if isinstance(token, dict) else token)


def _has_type(token: Any) -> bool:
    """Whether it is a dict as transformers has written it, with all flags that the token has."""
    return isinstance(token, dict) and "__type" in token


def _added(token: Any) -> AddedToken:
    """A token for the library. It is special, unless its flags say otherwise."""
    from tokenizers import AddedToken

    given = token if isinstance(token, dict) else {"content": token}
    flags = {name: given[name] for name in FLAGS if name in given}
    return AddedToken(given["content"], **{"special": not _has_type(token)} | flags)
