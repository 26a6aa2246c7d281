"""StructuredOutputsParams: what an answer has to look like, as plain data."""

from __future__ import annotations

import json
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass
from typing import Any

from pagedkv.checks import check_texts

KINDS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """One of the first six, with vLLM's names and meanings. The engine makes masks of it, by the package xgrammar.

    The end-of-sequence token is allowed where the answer is complete, and nowhere else. An answer that reaches
    max_tokens is cut off.

    Args:
        json: a JSON schema, as a dict or its text
        regex: a regular expression, which matches the whole answer
        choice: the answer is one of these texts
        grammar: EBNF in llama.cpp's form, whose first rule is `root`
        json_object: True: any JSON object
        structural_tag: a structural tag of xgrammar, as a dict or its text: schemas and grammars between texts
        disable_any_whitespace: JSON has no white space but single blanks after commas and colons
    """

    json: str | Mapping[str, Any] | None = None
    regex: str | None = None
    choice: SequenceOf[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | Mapping[str, Any] | None = None
    disable_any_whitespace: bool = False

    def __post_init__(self) -> None:
        given = self._given()
        if len(given) != 1:
            names = " and ".join(given) or "nothing"
            raise ValueError(f"structured_outputs has {names} but must have one of {', '.join(KINDS)}")
        for name in ("json", "structural_tag"):
            if isinstance(getattr(self, name), Mapping):
                object.__setattr__(self, name, json.dumps(getattr(self, name)))
        for name in ("json", "regex", "grammar", "structural_tag"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise TypeError(f"structured_outputs.{name} is {value!r} but must be a text")
        for name in ("json_object", "disable_any_whitespace"):
            if not isinstance(getattr(self, name), bool | None):
                raise TypeError(f"structured_outputs.{name} is {getattr(self, name)!r} but must be True or False")
        if self.choice is not None:
            object.__setattr__(self, "choice", check_texts("structured_outputs.choice", self.choice))
            if not self.choice:
                raise ValueError("structured_outputs.choice is empty: there is nothing to choose")

    @property
    def kind(self) -> str:
        return self._given()[0]

    def _given(self) -> list[str]:
        given = ((name, getattr(self, name)) for name in KINDS)
        return [name for name, value in given if value is not None and value is not False]
