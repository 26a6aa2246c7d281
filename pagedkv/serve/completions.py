"""/v1/completions: a text goes on, behind itself where `echo` asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from pagedkv.engine.text.detokenizer import Detokenizer

from .answers import Answers, Piece
from .errors import ApiError
from .logprobs import top_of
from .model import ServedModel
from .schema import CompletionRequest, params_of, prompts_of
from .server import Form, Server
from .sse import Reply
from .structured import shape_of

MAX_TOKENS = 16  # OpenAI's default


async def completions(server: Server, request: Request) -> Reply:
    body, headers = await server.read(request, CompletionRequest)
    name = server.model.check_name(body.model)
    max_tokens = MAX_TOKENS if body.max_tokens is None else body.max_tokens
    model = server.model
    params = params_of(body, model.default_params, model.vocab_size, max_tokens=max_tokens, logprobs=body.logprobs)
    params = replace(params, structured_outputs=shape_of(body))
    if body.echo and body.logprobs is not None:
        if max_tokens == 0:
            text = "max_tokens is 0 but must be at least 1 for the logprobs of an echo"
            raise ApiError(400, text, param="max_tokens")
        params = replace(params, prompt_logprobs=body.logprobs)
    return server.reply(body, prompts_of("prompt", body.prompt), params, CompletionForm(server, body, name), headers)


class CompletionForm(Form):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offsets: dict[int, int] = {}  # by answer: characters of its text so far, an echo's among them
        self._texts: dict[int, Detokenizer] = {}  # by answer

    def choice(self, piece: Piece, answers: Answers) -> dict[str, Any]:
        is_first = piece.index not in self._offsets
        self._offsets.setdefault(piece.index, 0)
        text, found = piece.text, TokenTexts(self.model)
        if is_first and self._echoes:
            echo = self._prompt_text(piece, answers)
            text, self._offsets[piece.index] = echo + text, len(echo)
            ids, logprobs = answers.prompt_token_ids[piece.prompt], answers.prompt_logprobs[piece.prompt]
            found.add(ids if logprobs else (), logprobs, 0, self._detokenizer())
        if piece.logprobs:
            self._offsets[piece.index] = found.add(
                piece.token_ids, piece.logprobs, self._offsets[piece.index], self._grown_text(piece.index)
            )
        choice: dict[str, Any] = {"index": piece.index, "text": text, "logprobs": found.columns if found else None}
        if self.request.return_token_ids and is_first:
            choice["prompt_token_ids"] = answers.prompt_token_ids[piece.prompt]
        return self.add_end(choice, piece)

    def chunks(self, piece: Piece, answers: Answers) -> list[dict[str, Any]]:
        is_start = self._echoes and piece.index not in self._offsets
        return [self.choice(piece, answers)] if is_start or self.is_shown(piece) else []

    @property
    def _echoes(self) -> bool:
        return isinstance(self.request, CompletionRequest) and bool(self.request.echo)

    def _prompt_text(self, piece: Piece, answers: Answers) -> str:
        """As it was given; of token ids what they say, where the model has texts."""
        given = answers.prompts[piece.prompt]
        if isinstance(given, str):
            return given
        grown = self._detokenizer()
        if grown is None:
            return ""
        for token in given:
            grown.push(token)
        grown.finish()
        return grown.text

    def _grown_text(self, index: int) -> Detokenizer | None:
        if index not in self._texts and (made := self._detokenizer()) is not None:
            self._texts[index] = made
        return self._texts.get(index)

    def _detokenizer(self) -> Detokenizer | None:
        """None: the model has no texts."""
        if not self.model.tokenizer.exists:
            return None
        skips = self.request.skip_special_tokens
        return self.model.tokenizer.detokenizer(skip_special_tokens=True if skips is None else skips)


class TokenTexts:
    """Tokens with their log probabilities, as the columns that completions have."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def __bool__(self) -> bool:
        return bool(self.columns["tokens"])

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, float] | None], offset: int,
        grown: Detokenizer | None,
    ) -> int:  # fmt: skip
        """offset: where the text of the first token begins; grown: the text as it grows. None in place of log
        probabilities: the first token of a prompt. Returns where the text of the next one begins."""
        for token, of_ids in zip(token_ids, logprobs, strict=True):
            ranked = [] if of_ids is None else top_of(of_ids)
            top: dict[str, float] = {}
            for each, logprob in ranked:
                top.setdefault(self._model.token_text(each), logprob)  # tokens may have the same text
            row = self._model.token_text(token), dict(ranked).get(token), top or None, offset
            for column, value in zip(self.columns.values(), row, strict=True):
                column.append(value)
            if grown is not None:
                grown.push(token)
                offset += len(grown.text)
                grown.mark_sent()
        return offset
