"""The answers to one HTTP request while they grow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from pagedkv.engine.client import EngineClient
from pagedkv.engine.lora_request import LoRARequest
from pagedkv.engine.outputs import RequestOutput
from pagedkv.engine.sampling_params import SamplingParams

from .errors import ENDED, ApiError, of_engine, of_request, renamed
from .gate import Gate

Stream = AsyncIterator[RequestOutput]


@dataclass(slots=True)
class Piece:
    """What is new of one answer."""

    index: int  # among all answers to the HTTP request
    prompt: int  # which of its prompts
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, float]]
    finish_reason: str | None
    stop_reason: int | str | None
    weight_version: int | str = 0


class Answers:
    """All answers to the prompts of an HTTP request. Iterate over pieces() once; leaving the loop early ends them.

    Nothing of the engine waits for the reader: a slow one finds several tokens in a piece, because the streams of an
    EngineClient put together what has not been taken.
    """

    def __init__(
        self, client: EngineClient, gate: Gate, prompts: Sequence[str | list[int]], params: SamplingParams, *,
        lora_request: LoRARequest | None, priority: int, salt: bytes, shape_name: str = "structured_outputs",
        shows_aborts: bool = False,
    ) -> None:  # fmt: skip
        """shape_name: what the client calls structured_outputs; shows_aborts: one that the server ends is an answer as
        far as it came, else an error."""
        gate.check(len(prompts) * params.n)  # before there is a stream for each
        self._gate, self._n, self._shows_aborts = gate, params.n, shows_aborts
        self._names = {"structured_outputs": shape_name}
        self.prompts = prompts
        self.prompt_token_ids: list[list[int]] = [[] for _ in prompts]
        self.prompt_logprobs: list[list[dict[int, float] | None]] = [[] for _ in prompts]  # see RequestOutput
        self._num_cached, self._num_new = [0] * len(prompts), 0
        self._streams = [
            client.generate(each, params, lora_request=lora_request, priority=priority, salt=salt) for each in prompts
        ]

    async def pieces(self) -> AsyncGenerator[list[Piece], None]:
        """What is new, at least one piece at a time. An error of one prompt is the request's."""
        num_answers = len(self._streams) * self._n
        self._gate.enter(num_answers)
        try:
            with renamed(self._names):
                async with aclosing(_together(self._streams)) as outputs:
                    async for prompt, output in outputs:
                        yield self._take(prompt, output)
        except (TypeError, ValueError, ImportError, RuntimeError) as error:  # ImportError: an option needs a package
            with renamed(self._names):
                raise _told(error) from error
        finally:
            self._gate.leave(num_answers)

    async def whole(self) -> list[Piece]:
        """The complete answers, in order."""
        answers: dict[int, Piece] = {}
        async with aclosing(self.pieces()) as all_pieces:
            async for pieces in all_pieces:
                for piece in pieces:
                    answers[piece.index] = piece
        return [answers[index] for index in sorted(answers)]

    def usage(self) -> dict[str, Any]:
        num_prompt = sum(map(len, self.prompt_token_ids))
        return {
            "prompt_tokens": num_prompt, "completion_tokens": self._num_new,
            "total_tokens": num_prompt + self._num_new,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached)},
        }  # fmt: skip

    def _take(self, prompt: int, output: RequestOutput) -> list[Piece]:
        if output.error is not None:
            raise of_engine(output.error, f"prompt[{prompt}]" if len(self.prompts) > 1 else "")
        self.prompt_token_ids[prompt], self._num_cached[prompt] = output.prompt_token_ids, output.num_cached_tokens
        self.prompt_logprobs[prompt] = output.prompt_logprobs or self.prompt_logprobs[prompt]
        pieces = []
        for one in output.outputs:
            if one.finish_reason == "abort" and not self._shows_aborts:
                raise ApiError(503, ENDED)
            self._num_new += len(one.token_ids)
            pieces.append(
                Piece(
                    prompt * self._n + one.index, prompt, one.text or "", one.token_ids, one.logprobs or [],
                    one.finish_reason, one.stop_reason, output.weight_version,
                )
            )  # fmt: skip
        return pieces


async def _together(streams: list[Stream]) -> AsyncGenerator[tuple[int, RequestOutput], None]:
    """The outputs of several streams with their numbers, as they come: a task for each takes the next one when that
    before has been read. One stream needs no task."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as outputs:  # type: ignore[type-var]
            async for output in outputs:
                yield 0, output
        return
    ready: asyncio.Queue[tuple[int, RequestOutput] | BaseException | None] = asyncio.Queue(1)

    async def follow(number: int, stream: Stream) -> None:
        try:
            async with aclosing(stream) as outputs:  # type: ignore[type-var]
                async for output in outputs:
                    await ready.put((number, output))
            await ready.put(None)
        except Exception as error:  # raised again by the reader
            await ready.put(error)

    tasks = [asyncio.create_task(follow(number, stream)) for number, stream in enumerate(streams)]
    num_left = len(streams)
    try:
        while num_left:
            each = await ready.get()
            if isinstance(each, BaseException):
                raise each
            if each is None:
                num_left -= 1
            else:
                yield each
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _told(error: Exception) -> ApiError:
    """What the client is told of an error that generate() raised: an option is wrong, or the engine is closed."""
    if isinstance(error, RuntimeError):
        return ApiError(503, f"the engine serves nothing any more: {error}")
    return of_request(error)
