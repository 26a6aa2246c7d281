"""Masks of what a StructuredOutputsParams allows, by xgrammar, which is loaded when the first one is asked for."""

from __future__ import annotations

import json
import re
import threading
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from pagedkv.models.spec import Spec
from pagedkv.optional import load, need

from ..structured_outputs import StructuredOutputsParams
from ..text.tokenizer import Tokenizer

MAX_CACHE = 1 << 28  # bytes of compiled grammars
# What xgrammar 0.2 lets into strings with minLength or maxLength, and what JSON does.
BOUNDED, STRICT = r"[^\"\\\r\n]", r"[^\0-\x1f\"\\]"
WHERE = re.compile(r"\[[0-9:]+\] \S+:[0-9]+: ")  # in xgrammar's sources


class Grammars:
    """Compiles masks for the tokens of a model. For any thread; the caller of mask() waits for the compilation, which
    takes from a millisecond to seconds the first time, and lets go of the interpreter lock meanwhile."""

    def __init__(self, tokenizer: Tokenizer, config: Spec) -> None:
        self._tokenizer, self._vocab_size = tokenizer, config.vocab_size
        self._end_ids = sorted(config.eos_token_ids)
        self._lock = threading.Lock()  # of the making of ...
        self._made: Any = None  # ... the compiler, with a cache of its own

    def mask(self, params: StructuredOutputsParams) -> GrammarMask:
        """For SamplingParams.mask. ValueError: a text that is no schema, regular expression or grammar."""
        compiler, kind = self._compiler(), params.kind
        text: Any = getattr(params, kind)
        spaced = {"any_whitespace": not params.disable_any_whitespace}
        try:
            if kind in ("json", "structural_tag") and ("minLength" in text or "maxLength" in text):
                compiled = compiler.compile_grammar(_strict(kind, text, spaced))
            elif kind == "json":
                compiled = compiler.compile_json_schema(text, **spaced)
            elif kind == "json_object":
                compiled = compiler.compile_json_schema('{"type": "object"}', **spaced)
            elif kind == "choice":
                compiled = compiler.compile_grammar(f"root ::= {' | '.join(map(_quoted, text))}")
            else:
                compiled = getattr(compiler, f"compile_{kind}")(text)
        except (RuntimeError, ValueError, TypeError) as error:
            said = " ".join(WHERE.sub("", str(error)).split())[-300:]
            raise ValueError(f"structured_outputs.{kind} is {text[:200]!r}, of which xgrammar says: {said}") from error
        return GrammarMask(compiled, self._vocab_size, self._end_ids)

    def _compiler(self) -> Any:
        with self._lock:
            if self._made is None:
                if not self._tokenizer.exists:
                    raise ValueError(f"structured_outputs: {self._tokenizer.path} is missing: tokens have no texts")
                need("structured_outputs", "grammar", "xgrammar")
                xgrammar = load("xgrammar")
                if not self._end_ids:
                    path = self._tokenizer.path.parent
                    raise ValueError(f"{path}: the model has no end-of-sequence token, with which an answer could end")
                tokens, kind = _vocabulary(self._tokenizer, self._vocab_size, xgrammar.VocabType)
                info = xgrammar.TokenizerInfo(
                    tokens, kind, vocab_size=self._vocab_size, stop_token_ids=self._end_ids
                )
                self._made = xgrammar.GrammarCompiler(info, cache_limit_bytes=MAX_CACHE)
            return self._made


class GrammarMask:
    """A value for SamplingParams.mask. Each answer has a matcher of its own as long as the answer lives."""

    def __init__(self, compiled: Any, vocab_size: int, end_ids: list[int]) -> None:
        self._compiled, self._num_words, self._end_ids = compiled, -(-vocab_size // 32), end_ids
        self._matchers: WeakKeyDictionary[Any, tuple[Any, int]] = WeakKeyDictionary()  # and how many tokens it has

    def __call__(self, request: Any, tokens: list[int]) -> np.ndarray:
        """int32 [ceil(vocab_size / 32)]: the tokens that may follow these, as bits. Those of a request only become
        more: each is read once."""
        matcher, count = self._matchers.pop(request, (None, 0))  # if a token is refused, it is between two states
        if matcher is None:
            matcher = load("xgrammar").GrammarMatcher(self._compiled)
        for i in range(count, len(tokens)):
            token = tokens[i]
            if not matcher.is_terminated() and not matcher.accept_token(token):
                raise ValueError(f"token {token} does not follow the grammar: another option has forced it")
        self._matchers[request] = matcher, len(tokens)
        bits = np.zeros((1, self._num_words), np.int32)
        if matcher.is_terminated():  # with ignore_eos the answer goes on
            for token in self._end_ids:
                bits[0, token // 32] |= np.int32(np.uint32(1 << (token % 32)).view(np.int32))
        else:
            matcher.fill_next_token_bitmask(bits)
        return bits.reshape(-1)


def _strict(kind: str, text: str, spaced: dict[str, bool]) -> Any:
    """The grammar of a schema or structural tag, without control characters in strings."""
    grammar = load("xgrammar").Grammar
    made = grammar.from_json_schema(text, **spaced) if kind == "json" else grammar.from_structural_tag(text)
    return grammar.from_ebnf(str(made).replace(BOUNDED, STRICT))


def _quoted(text: str) -> str:
    """As a literal of EBNF."""
    return json.dumps(text, ensure_ascii=False)


def _vocabulary(tokenizer: Tokenizer, vocab_size: int, kinds: Any) -> tuple[list[str], Any]:
    """The text of each token id ("" for ids without one), and how xgrammar is to read them."""
    library = tokenizer.library
    special = {token_id for token_id, token in library.get_added_tokens_decoder().items() if token.special}
    tokens = [""] * vocab_size
    for text, token_id in library.get_vocab(with_added_tokens=True).items():
        if token_id < len(tokens) and token_id not in special:
            tokens[token_id] = text
    decoder = str(library.decoder)
    if decoder.startswith("ByteLevel"):
        return tokens, kinds.BYTE_LEVEL
    return tokens, kinds.BYTE_FALLBACK if "ByteFallback" in decoder else kinds.RAW
