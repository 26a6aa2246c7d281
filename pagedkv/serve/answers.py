"""The answers to one HTTP request while they grow: what a reader has not taken yet is merged, however slow it is."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from pagedkv.engine.client import EngineClient
from pagedkv.engine.lora_request import LoRARequest
from pagedkv.engine.outputs import RequestOutput
from pagedkv.engine.sampling_params import SamplingParams

from .errors import ApiError, of_engine, of_request


@dataclass(slots=True)
class Piece:
    """What is new of one answer."""

    index: int  # among all answers to the HTTP request
    prompt: int  # which of its prompts
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[dict[int, float]] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class Gate:
    """Bounds how many answers are in work or wait at a time."""

    def __init__(self, size: int) -> None:
        self.size, self.num_inside = size, 0

    def enter(self, count: int) -> None:
        if count > self.size:
            raise ApiError(400, f"the request asks for {count} answers, and the server takes {self.size} at a time")
        if self.num_inside + count > self.size:
            raise ApiError(429, f"the server has {self.num_inside} answers to give; it takes {self.size} at a time")
        self.num_inside += count

    def leave(self, count: int) -> None:
        self.num_inside -= count


class Answers:
    """All answers to the prompts of an HTTP request. Iterate over pieces() once; whoever leaves it ends them.

    The engine's outputs are taken as they come, by a task for each prompt, so that none waits for the reader: a slow
    one finds several tokens in a piece, and its answers take the memory of their own tokens and no more.
    """

    def __init__(
        self, client: EngineClient, gate: Gate, prompts: Sequence[str | list[int]],
        params: SamplingParams, *, lora_request: LoRARequest | None, priority: int, salt: bytes,
    ) -> None:  # fmt: skip
        self._gate, self._n = gate, params.n
        self.prompt_token_ids: list[list[int]] = [[] for _ in prompts]
        self._num_cached, self._num_new = [0] * len(prompts), 0
        self._streams = [
            client.generate(each, params, lora_request=lora_request, priority=priority, salt=salt) for each in prompts
        ]
        self._pending: dict[int, Piece] = {}  # by index
        self._news, self._num_left = asyncio.Event(), len(prompts)
        self._error: Exception | None = None

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """What is new, at least one piece at a time. An error of one prompt is the request's."""
        self._gate.enter(len(self._streams) * self._n)
        tasks = [asyncio.create_task(self._take_all(i, stream)) for i, stream in enumerate(self._streams)]
        for task in tasks:  # when the engine has done its part, however long the reader takes
            task.add_done_callback(lambda _: self._gate.leave(self._n))
        try:
            while self._num_left or self._pending or self._error:
                await self._news.wait()
                self._news.clear()
                if self._error is not None:
                    raise self._error
                pieces, self._pending = list(self._pending.values()), {}
                if pieces:
                    yield pieces
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def whole(self) -> list[Piece]:
        """The complete answers, in order."""
        answers: dict[int, Piece] = {}
        async with aclosing(self.pieces()) as all_pieces:
            async for pieces in all_pieces:
                for piece in pieces:
                    _merge(answers, piece)
        return [answers[index] for index in sorted(answers)]

    def usage(self) -> dict[str, Any]:
        num_prompt = sum(map(len, self.prompt_token_ids))
        return {
            "prompt_tokens": num_prompt, "completion_tokens": self._num_new,
            "total_tokens": num_prompt + self._num_new,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }  # fmt: skip

    async def _take_all(self, prompt: int, stream: AsyncIterator[RequestOutput]) -> None:
        try:
            async with aclosing(stream) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    self._take(prompt, output)
                    self._news.set()
        except Exception as error:  # raised again by pieces()
            self._error = self._error or _told(error)
        finally:
            self._num_left -= 1
            self._news.set()

    def _take(self, prompt: int, output: RequestOutput) -> None:
        if output.error is not None:
            raise of_engine(output.error)
        self.prompt_token_ids[prompt], self._num_cached[prompt] = output.prompt_token_ids, output.num_cached_tokens
        for one in output.outputs:
            if one.finish_reason == "abort":
                raise ApiError(503, "the server has ended this answer")
            self._num_new += len(one.token_ids)
            _merge(
                self._pending,
                Piece(
                    prompt * self._n + one.index, prompt, one.text or "", list(one.token_ids), list(one.logprobs or ()),
                    one.finish_reason, one.stop_reason,
                ),
            )  # fmt: skip


def _told(error: Exception) -> Exception:
    """What the client is told of an error that generate() raised: an option is wrong, or the engine is closed."""
    if isinstance(error, (TypeError, ValueError)):
        return of_request(error)
    if isinstance(error, RuntimeError):
        return ApiError(503, f"the engine serves nothing any more: {error}")
    return error


def _merge(pieces: dict[int, Piece], new: Piece) -> None:
    old = pieces.setdefault(new.index, new)
    if old is not new:
        old.text += new.text
        old.token_ids += new.token_ids
        old.logprobs += new.logprobs
        old.finish_reason, old.stop_reason = new.finish_reason, new.stop_reason
