"""/v1/completions: a text goes on, behind itself where `echo` asks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from starlette.requests import Request

from pagedkv.engine.text.detokenizer import Detokenizer

from .answers import Answers, Piece
from .logprobs import top_of
from .model import ServedModel
from .schema import CompletionRequest, params_of, prompts_of
from .server import Form, Server
from .sse import Reply
from .structured import name_of_shape, shape_of

MAX_TOKENS = 16  # OpenAI's default


async def completions(server: Server, request: Request) -> Reply:
    body, headers = await server.read(request, CompletionRequest)
    name = server.model.check_name(body.model)
    max_tokens = MAX_TOKENS if body.max_tokens is None else body.max_tokens
    model = server.model
    params = params_of(body, model.default_params, model.vocab_size, max_tokens=max_tokens, logprobs=body.logprobs)
    params = replace(params, structured_outputs=shape_of(body))
    if body.echo and body.logprobs is not None:  # without a token to sample no prompt is computed
        params = replace(params, prompt_logprobs=body.logprobs, max_tokens=max(max_tokens, 1))
    form = CompletionForm(server, body, name, name_of_shape(body))
    return server.reply(body, prompts_of("prompt", body.prompt), params, form, headers)


class CompletionForm(Form):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offsets: dict[int, int] = {}  # by answer: characters of its text so far, an echo's among them
        self._texts: dict[int, Detokenizer] = {}  # by answer

    def choice(self, piece: Piece, answers: Answers) -> dict[str, Any]:
        if self._is_echo_alone:
            end = piece.finish_reason and "length"
            piece = replace(piece, text="", token_ids=[], logprobs=[], finish_reason=end, stop_reason=None)
        is_first = piece.index not in self._offsets
        self._offsets.setdefault(piece.index, 0)
        text, found = piece.text, TokenTexts(self.model)
        if is_first and self._echoes:
            echo = self._prompt_text(piece, answers)
            text, self._offsets[piece.index] = echo + text, len(echo)
            if logprobs := answers.prompt_logprobs[piece.prompt]:
                found.add(answers.prompt_token_ids[piece.prompt], logprobs, self._starts_in_prompt(piece, answers))
        if piece.logprobs:
            grown = self._grown_text(piece.index, isinstance(answers.prompts[piece.prompt], str))
            *starts, self._offsets[piece.index] = starts_of(piece.token_ids, grown, self._offsets[piece.index])
            found.add(piece.token_ids, piece.logprobs, starts)
        choice: dict[str, Any] = {"index": piece.index, "text": text, "logprobs": found.columns if found else None}
        if self.request.return_token_ids and is_first:
            choice["prompt_token_ids"] = answers.prompt_token_ids[piece.prompt]
        return self.add_end(choice, piece)

    def chunks(self, piece: Piece, answers: Answers) -> list[dict[str, Any]]:
        is_start = self._echoes and piece.index not in self._offsets
        return [self.choice(piece, answers)] if is_start or self.is_shown(piece) else []

    def usage(self, answers: Answers) -> dict[str, Any]:
        usage = answers.usage()
        if self._is_echo_alone:
            usage |= {"completion_tokens": 0, "total_tokens": usage["prompt_tokens"]}
        return usage

    @property
    def _echoes(self) -> bool:
        return isinstance(self.request, CompletionRequest) and bool(self.request.echo)

    @property
    def _is_echo_alone(self) -> bool:
        return self._echoes and self.request.max_tokens == 0

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

    def _starts_in_prompt(self, piece: Piece, answers: Answers) -> list[int]:
        """Where the texts of the prompt's tokens begin in the echo."""
        given = answers.prompts[piece.prompt]
        if isinstance(given, str):
            return self.model.tokenizer.starts(given)
        return starts_of(answers.prompt_token_ids[piece.prompt], self._detokenizer(), 0)[:-1]

    def _grown_text(self, index: int, goes_on: bool) -> Detokenizer | None:
        if index not in self._texts and (made := self._detokenizer(goes_on)) is not None:
            self._texts[index] = made
        return self._texts.get(index)

    def _detokenizer(self, goes_on: bool = False) -> Detokenizer | None:
        """None: the model has no texts."""
        if not self.model.tokenizer.exists:
            return None
        skips = self.request.skip_special_tokens
        return self.model.tokenizer.detokenizer(skip_special_tokens=True if skips is None else skips, goes_on=goes_on)


def starts_of(token_ids: Sequence[int], grown: Detokenizer | None, offset: int) -> list[int]:
    """Where the text of each token begins, and where the last one ends. grown: the text that ends at the offset."""
    starts = [offset]
    for token in token_ids:
        if grown is not None:
            grown.push(token)
            offset += len(grown.text)
            grown.mark_sent()
        starts.append(offset)
    return starts


class TokenTexts:
    """Tokens with their log probabilities, as the columns that completions have."""

    def __init__(self, model: ServedModel) -> None:
        self._model = model
        self.columns: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}

    def __bool__(self) -> bool:
        return bool(self.columns["tokens"])

    def add(
        self, token_ids: Sequence[int], logprobs: Sequence[dict[int, float] | None], starts: Sequence[int]
    ) -> None:
        """starts: where their texts begin. None in place of log probabilities: the first token of a prompt."""
        for token, of_ids, offset in zip(token_ids, logprobs, starts, strict=True):
            ranked = [] if of_ids is None else top_of(of_ids)
            top: dict[str, float] = {}
            for each, logprob in ranked:
                top.setdefault(self._model.token_text(each), logprob)  # tokens may have the same text
            row = self._model.token_text(token), dict(ranked).get(token), top or None, offset
            for column, value in zip(self.columns.values(), row, strict=True):
                column.append(value)
