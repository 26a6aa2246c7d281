"""Answers that follow a JSON schema, a regular expression or a grammar, through masks of xgrammar.

    from pagedkv.integrations.xgrammar import Grammars

    grammars = Grammars(llm)
    params = SamplingParams(mask=grammars.json_schema({"type": "object", "properties": {"age": {"type": "integer"}}}))
    llm.generate("Her age as JSON: ", params)

The end-of-sequence token is allowed where the grammar may end, and nowhere else. An answer that reaches max_tokens is
cut off. This module needs the package xgrammar (pip install xgrammar).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from pagedkv.engine import Engine

try:
    import xgrammar
except ModuleNotFoundError as error:
    raise ImportError(
        f"pagedkv.integrations.xgrammar needs {error.name} (pip install xgrammar), which is not installed"
    ) from error


class Grammars:
    """Compiles masks for the tokens of an engine's model. A mask may serve any number of requests at a time.

    A text that is no schema, regular expression or grammar raises ValueError.
    """

    def __init__(self, engine: Engine) -> None:
        config = engine.config
        self._vocab_size, self._end_ids = config.vocab_size, sorted(config.eos_token_ids)
        if not self._end_ids:
            raise ValueError(f"{engine.folder}: the model has no end-of-sequence token, with which an answer could end")
        tokens, kind = _vocabulary(engine)
        self._compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo(tokens, kind, vocab_size=self._vocab_size, stop_token_ids=self._end_ids)
        )

    def json_schema(self, schema: str | Mapping[str, Any], **options: Any) -> GrammarMask:
        """JSON that a schema (its text, or the dict) allows; `options` are those of xgrammar's compile_json_schema."""
        text = schema if isinstance(schema, str) else json.dumps(schema)
        return self._compiled("json_schema", text, **options)

    def regex(self, pattern: str) -> GrammarMask:
        """Answers that a regular expression matches as a whole."""
        return self._compiled("regex", pattern)

    def grammar(self, ebnf: str) -> GrammarMask:
        """Answers that a grammar allows: EBNF in llama.cpp's form, whose first rule is `root`."""
        return self._compiled("grammar", ebnf)

    def _compiled(self, kind: str, text: str, **options: Any) -> GrammarMask:
        if not isinstance(text, str):
            raise TypeError(f"{kind} is {text!r} but must be a string")
        try:
            compiled = getattr(self._compiler, f"compile_{kind}")(text, **options)
        except RuntimeError as error:
            raise ValueError(f"{kind} is {text!r}, of which xgrammar says: {error}") from error
        return GrammarMask(compiled, self._vocab_size, self._end_ids)


class GrammarMask:
    """A value for SamplingParams.mask. Each answer has a matcher of its own as long as the answer lives."""

    def __init__(self, compiled: Any, vocab_size: int, end_ids: list[int]) -> None:
        self._compiled, self._num_words, self._end_ids = compiled, -(-vocab_size // 32), end_ids
        self._matchers: WeakKeyDictionary[Any, tuple[Any, list[int]]] = WeakKeyDictionary()

    def __call__(self, request: Any, tokens: list[int]) -> np.ndarray:
        """int32 [ceil(vocab_size / 32)]: the tokens that may follow these, as bits."""
        matcher, seen = self._matchers.get(request, (None, []))
        if matcher is None or tokens[: len(seen)] != seen:
            matcher, seen = xgrammar.GrammarMatcher(self._compiled), []
        self._matchers.pop(request, None)  # if a token is refused, the matcher is between two states
        for token in tokens[len(seen) :]:
            if not matcher.is_terminated() and not matcher.accept_token(token):
                raise ValueError(f"token {token} does not follow the grammar: another option has forced it")
        self._matchers[request] = matcher, list(tokens)
        bits = np.zeros((1, self._num_words), np.int32)
        if matcher.is_terminated():  # with ignore_eos the answer goes on
            for token in self._end_ids:
                bits[0, token // 32] |= np.int32(np.uint32(1 << (token % 32)).view(np.int32))
        else:
            matcher.fill_next_token_bitmask(bits)
        return bits.reshape(-1)


def _vocabulary(engine: Engine) -> tuple[list[str], Any]:
    """The text of each token id ("" for ids without one), and how xgrammar is to read them."""
    library = engine.tokenizer.library
    special = {token_id for token_id, token in library.get_added_tokens_decoder().items() if token.special}
    tokens = [""] * engine.config.vocab_size
    for text, token_id in library.get_vocab(with_added_tokens=True).items():
        if token_id < len(tokens) and token_id not in special:
            tokens[token_id] = text
    decoder = str(library.decoder)
    kinds = xgrammar.VocabType
    if decoder.startswith("ByteLevel"):
        return tokens, kinds.BYTE_LEVEL
    return tokens, kinds.BYTE_FALLBACK if "ByteFallback" in decoder else kinds.RAW
