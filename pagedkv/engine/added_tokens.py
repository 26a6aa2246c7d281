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

    named: dict[str, Any]  # by a name such as "eos_token"
    extra: list[Any]  # special tokens without a name
    listed: dict[int, Any] | None  # added_tokens_decoder, by token id; None: the older files count
    older: dict[str, int]  # added_tokens.json, which has no flags
    splits_special_tokens: bool  # special tokens in a prompt are ordinary text

    @staticmethod
    def from_folder(folder: Path) -> NamedTokens:
        settings, older = read_json(folder / "tokenizer_config.json", missing={}), {}
        listed = settings.get("added_tokens_decoder")
        if listed is None:
            special = read_json(folder / "special_tokens_map.json", missing={})
            special = {name: {**t, "special": True} if isinstance(t, dict) else t for name, t in special.items()}
            both = [*_items(settings.get("extra_special_tokens")), *_items(special.get("extra_special_tokens"))]
            settings = settings | special | ({"extra_special_tokens": both} if both else {})
            older = read_json(folder / "added_tokens.json", missing={})
        try:
            extra = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
            tokens = DEFAULTS.get(str(settings.get("tokenizer_class")).removesuffix("Fast"), {}) | settings
            own = [name for name in tokens if name.endswith("_token") and name not in NAMES]
            own.sort(key=lambda name: isinstance(tokens[name], str))  # those with flags are added first
            named = {name: tokens[name] for name in (*NAMES, *own) if _is_token(tokens.get(name))}
            named |= extra if isinstance(extra, dict) else {}
            extra = [] if isinstance(extra, dict) else list(extra)
            listed = None if listed is None else {int(token_id): token for token_id, token in listed.items()}
            for token in [*named.values(), *extra, *(listed or {}).values()]:
                _text(token)
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"{folder}: tokenizer_config.json or special_tokens_map.json: {error}") from None
        return NamedTokens(named, extra, listed, older, bool(settings.get("split_special_tokens", False)))

    def texts(self) -> dict[str, str]:
        """The texts of the tokens with names: what a chat template may write."""
        return {name: _text(token) for name, token in self.named.items()}

    def add_to(self, tokenizer: Tokenizer) -> None:
        """Adds those that the tokenizer lacks. One that it has as a word of its vocabulary keeps its id."""
        present = tokenizer.get_added_tokens_decoder()
        named, texts = dict(self.named), {token.content for token in present.values()}
        if tokenizer.padding is not None:
            named.setdefault("pad_token", tokenizer.padding["pad_token"])
        special = {_text(token) for token in [*(self.named.get(name, "") for name in NAMES), *self.extra]}
        listed = {token_id: _added(token) for token_id, token in (self.listed or {}).items()}
        for text, token_id in self.older.items():
            if token_id not in present:
                listed[token_id] = _added({"content": text, "special": text in special})
        new = [token for _, token in sorted(listed.items(), key=lambda each: each[0])]
        new = [token for token in new if repr(token) not in map(repr, present.values())]
        texts |= {token.content for token in new}
        for token in [*named.values(), *self.extra]:
            if _text(token) not in texts:
                new.append(_added({"special": True} | (token if isinstance(token, dict) else {"content": token})))
        names = {_text(token) for token in named.values()}
        for token in new:
            token.special = token.special or token.content in names
        tokenizer.add_tokens(new)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _is_token(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, dict) and isinstance(value.get("content"), str))


def _text(token: Any) -> str:
    if not _is_token(token):
        raise ValueError(f"{token!r} is no token: neither a text nor a dict with a content")
    return str(token["content"] if isinstance(token, dict) else token)


def _added(token: Any) -> AddedToken:
    from tokenizers import AddedToken

    flags = {name: token[name] for name in FLAGS if name in token} if isinstance(token, dict) else {}
    return AddedToken(_text(token), **flags)
