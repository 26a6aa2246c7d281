"""/v1/chat/completions: an answer to messages."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request

from .answers import Answers, Piece
from .errors import ApiError
from .logprobs import chat_logprobs
from .schema import ChatRequest, check_messages, params_of
from .server import Form, Server
from .sse import Reply


async def chat(server: Server, request: Request) -> Reply:
    body, headers = await server.read(request, ChatRequest)
    name = server.model.check_name(body.model)
    if body.top_logprobs is not None and not body.logprobs:
        raise ApiError(400, f"top_logprobs is {body.top_logprobs} but logprobs is not true", param="top_logprobs")
    max_tokens = _max_tokens(body, server.model.default_params.max_tokens)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = params_of(body, server.model.default_params, max_tokens=max_tokens, logprobs=logprobs)
    ids = await asyncio.to_thread(
        server.model.encode_chat, check_messages(body.messages), body.chat_template_kwargs,
        body.add_generation_prompt, body.continue_final_message,
    )  # fmt: skip
    return server.reply(body, [ids], params, ChatForm(server, body, name), headers)


def _max_tokens(body: ChatRequest, default: int | None) -> int | None:
    old, new = body.max_tokens, body.max_completion_tokens
    if old is not None and new is not None and old != new:
        raise ApiError(400, f"max_tokens is {old} but max_completion_tokens is {new}", param="max_completion_tokens")
    given = old if new is None else new
    return default if given is None else given


class ChatForm(Form):
    prefix, whole_object, chunk_object = "chatcmpl", "chat.completion", "chat.completion.chunk"
    request: ChatRequest

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._started: set[int] = set()  # answers whose first chunk is written

    def choice(self, piece: Piece, answers: Answers) -> dict[str, Any]:
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return self.add_end({"index": piece.index, "message": message, "logprobs": self._logprobs(piece)}, piece)

    def extra(self, answers: Answers) -> dict[str, Any]:
        return {"prompt_token_ids": answers.prompt_token_ids[0]} if self.request.return_token_ids else {}

    def chunks(self, piece: Piece, answers: Answers) -> list[dict[str, Any]]:
        chunks: list[dict[str, Any]] = []
        if piece.index not in self._started:
            self._started.add(piece.index)
            first = {"role": "assistant", "content": ""}
            chunks.append({"index": piece.index, "delta": first, "logprobs": None, "finish_reason": None})
            if self.request.return_token_ids:
                chunks[0]["prompt_token_ids"] = answers.prompt_token_ids[0]
        if self.is_shown(piece):
            delta = {"content": piece.text} if piece.text else {}
            chunk = {"index": piece.index, "delta": delta, "logprobs": self._logprobs(piece)}
            chunks.append(self.add_end(chunk, piece))
        return chunks

    def _logprobs(self, piece: Piece) -> dict[str, Any] | None:
        if not piece.logprobs:
            return None
        return chat_logprobs(self.model, piece.token_ids, piece.logprobs, self.request.top_logprobs or 0)
