"""/v1/completions: a text goes on."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from starlette.requests import Request

from pagedkv.engine.text.detokenizer import Detokenizer

from .answers import Answers, Piece
from .logprobs import top_of
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
    return server.reply(body, prompts_of("prompt", body.prompt), params, CompletionForm(server, body, name), headers)


class CompletionForm(Form):
    prefix, whole_object, chunk_object = "cmpl", "text_completion", "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._offsets: dict[int, int] = {}  # by answer: characters of its text so far
        self._texts: dict[int, Detokenizer] = {}  # by answer

    def choice(self, piece: Piece, answers: Answers) -> dict[str, Any]:
        is_first = piece.index not in self._offsets
        choice: dict[str, Any] = {"index": piece.index, "text": piece.text, "logprobs": self._logprobs(piece)}
        if self.request.return_token_ids and is_first:
            choice["prompt_token_ids"] = answers.prompt_token_ids[piece.prompt]
        return self.add_end(choice, piece)

    def chunks(self, piece: Piece, answers: Answers) -> list[dict[str, Any]]:
        return [self.choice(piece, answers)] if self.is_shown(piece) else []

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        offset = self._offsets.setdefault(piece.index, 0)
        if not piece.logprobs:
            return None
        grown = self._grown_text(piece.index)
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        for token, of_ids in zip(piece.token_ids, piece.logprobs, strict=True):
            ranked = top_of(of_ids)
            text = self.model.token_text(token)
            top: dict[str, float] = {}
            for each, logprob in ranked:
                top.setdefault(self.model.token_text(each), logprob)  # tokens may have the same text
            found["tokens"].append(text)
            found["token_logprobs"].append(dict(ranked)[token])
            found["top_logprobs"].append(top)
            found["text_offset"].append(offset)
            if grown is not None:
                grown.push(token)
                offset += len(grown.text)
                grown.mark_sent()
        self._offsets[piece.index] = offset
        return found

    def _grown_text(self, index: int) -> Detokenizer | None:
        """None: the model has no texts."""
        if index not in self._texts and self.model.tokenizer.exists:
            skips = self.request.skip_special_tokens
            self._texts[index] = self.model.tokenizer.detokenizer(skip_special_tokens=True if skips is None else skips)
        return self._texts.get(index)
