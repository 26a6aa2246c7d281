"""Forbidden texts: which tokens would complete one of them."""

from __future__ import annotations

from collections.abc import Iterable

from ..text.tokenizer import Tokenizer


class BadWords:
    """The forbidden texts of one sequence, each as it is tokenised at the start of a text and after a space.

    As in vLLM, other ways to split the same text into tokens are not forbidden.
    """

    def __init__(self, words: Iterable[str], tokenizer: Tokenizer) -> None:
        self._token_ids: list[list[int]] = []
        for word in words:
            for text in (word, " " + word.lstrip()):
                ids = tokenizer.encode(text, add_special_tokens=False)
                if ids and ids not in self._token_ids:
                    self._token_ids.append(ids)

    def next_forbidden(self, tokens: list[int]) -> set[int]:
        """Token ids that would complete a forbidden text after these tokens."""
        forbidden = set()
        for *before, last in self._token_ids:
            if not before or tokens[-len(before) :] == before:
                forbidden.add(last)
        return forbidden
