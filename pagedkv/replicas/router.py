"""Router: sends each request to the replica that has the fewest tokens to compute for it and before it."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import reprlib
import secrets
import time
from array import array
from collections.abc import AsyncGenerator
from collections.abc import Sequence as SequenceOf
from contextlib import aclosing
from dataclasses import replace
from heapq import nsmallest
from types import TracebackType
from typing import Any, Self

from pagedkv.checks import check_int
from pagedkv.engine.build import read_default_params, read_model
from pagedkv.engine.outputs import RequestOutput
from pagedkv.engine.requests.prompts import (
    Prompt,
    Prompts,
    check_request,
    check_type,
    encode,
    list_of_prompts,
    params_of_each,
    read_prompt,
)
from pagedkv.engine.sampling_params import RequestOutputKind, SamplingParams
from pagedkv.engine.scheduling.sequence import private_salt
from pagedkv.engine.text.tokenizer import LONG_TEXT, Tokenizer
from pagedkv.models.hub import model_folder

from .prefixes import Ids, Life, spans_of
from .replica import NoReplicaError, Replica, ReplicaDied, failed_output

logger = logging.getLogger(__name__)
MAX_ASKED = 8  # replicas that are asked what they have of a prompt
PATIENCE = 0.1  # seconds in which a replica answers that; of one that does not, an estimate counts
# How many queued tokens one is worth that a replica has to compute for the request itself: others will wait for it, and
# it takes a page from what is cached. Over 4 replicas of the trace in docs/parallel.md, 1, 2 and 4 find 18, 23 and 25 %
# of the tokens, and the first token comes after 1.24, 0.97 and 0.83 s.
OWN_TOKEN = 4
MAX_TRIES = 3  # replicas that one request may see die: it may be the cause


class Router:
    """Serves requests by several replicas of one model. Use it in one event loop:

        replicas = [EngineReplica("Qwen3-0.6B", device=f"cuda:{i}") for i in range(2)]
        async with Router.of_model("Qwen3-0.6B", replicas) as router:
            outputs = await router.generate_all(prompts, SamplingParams(max_tokens=100))

    Args:
        replicas: they are started when the router is entered, and closed when it is left
        tokenizer: texts are encoded here, once; None: prompts are token ids
        vocab_size: token ids are less than this
        default_params: of requests that bring none
        table_tokens: tokens of prompts that are remembered for each replica, about as many as its pool holds

    A replica that dies is started again. Its requests of which nothing had been sent are repeated; of the others the
    last output has the error. A request that saw three replicas die is not repeated.
    """

    def __init__(
        self,
        replicas: SequenceOf[Replica],
        tokenizer: Tokenizer | None = None,
        vocab_size: int = 2**31 - 1,
        default_params: SamplingParams | None = None,
        *,
        table_tokens: int = 1 << 20,
    ) -> None:
        if not isinstance(replicas, SequenceOf):
            raise TypeError(f"replicas is {replicas!r} but must be a list of Replicas")
        if not replicas:
            raise ValueError("replicas is empty: at least one is needed")
        self._replicas, self._tokenizer = list(replicas), tokenizer
        self._vocab_size = check_int("vocab_size", vocab_size, 1)
        self._default_params = SamplingParams() if default_params is None else default_params
        self._table_tokens = check_int("table_tokens", table_tokens, 0)
        self._living: dict[Life, Replica] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._failure: Exception = RuntimeError("the router has not been entered")  # why there may be no replica
        self._ids = map((secrets.token_hex(4) + "-{}").format, itertools.count())

    @classmethod
    def of_model(
        cls,
        model: str | os.PathLike[str],
        replicas: SequenceOf[Replica],
        *,
        revision: str | None = None,
        quantization: str | None = None,
        table_tokens: int = 1 << 20,
    ) -> Self:
        """With the tokenizer, vocabulary and parameters of the replicas' model, whose weights are not read."""
        folder = model_folder(model, revision)
        tokenizer = Tokenizer(folder)
        vocab_size = read_model(folder, tokenizer, quantization).vocab_size
        return cls(replicas, tokenizer, vocab_size, read_default_params(folder), table_tokens=table_tokens)

    # --- requests

    async def generate(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, as AsyncEngine.generate() yields them."""
        start, params = time.perf_counter(), self._default_params if params is None else params
        priority = check_request(params, request_id, priority, salt)
        name = next(self._ids) if request_id is None else request_id
        prompt, ids = await self._encode(prompt)
        key = salt if params.prompt_logprobs is None else private_salt(salt)  # such a prompt is computed as a whole
        spans = spans_of(ids, key)
        for tries in itertools.count(1):
            life, num_tokens = await self._choose(ids, spans, key)
            # Each try has an id of its own: one that was given up may go on for a while.
            outputs = self._living[life].generate(prompt, params, next(self._ids), priority=priority, salt=salt)
            life.send(spans, num_tokens)
            has_sent = False
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        if not has_sent:
                            life.arrive(spans, num_tokens)
                        has_sent, output.request_id = True, name
                        yield output
                        if output.finished:
                            return
            except ReplicaDied as death:
                self._lose(life, death)
                if has_sent or tries == MAX_TRIES:
                    yield failed_output(name, prompt, death, start)
                    return
            finally:
                life.running -= 1
                if not has_sent:
                    life.arrive(spans, num_tokens)

    async def generate_all(
        self,
        prompts: Prompts,
        params: SamplingParams | SequenceOf[SamplingParams] | None = None,
        *,
        at_once: int | None = None,
        priority: int = 0,
        salt: bytes = b"",
    ) -> list[RequestOutput]:
        """The last outputs of all requests, in the order of the prompts. What replicas raise are errors of requests.

        at_once: how many are on their way at a time; None: 256 for each replica. The others wait here, so that they are
        routed by what the replicas have then.
        """
        all_prompts = list_of_prompts(prompts)
        all_params = params_of_each(params, self._default_params, len(all_prompts))
        outputs: list[Any] = [None] * len(all_prompts)
        left = enumerate(zip(all_prompts, all_params, strict=True))

        async def work() -> None:
            for number, (prompt, one) in left:
                final = replace(one, output_kind=RequestOutputKind.FINAL_ONLY)
                name, start = next(self._ids), time.perf_counter()
                try:
                    async for output in self.generate(prompt, final, name, priority=priority, salt=salt):
                        outputs[number] = output
                except NoReplicaError:
                    raise
                except Exception as error:
                    outputs[number] = failed_output(name, prompt, error, start)

        for number, prompt in enumerate(all_prompts):  # before any of them is sent
            self._read(f"prompts[{number}]", prompt)
        check_request(self._default_params, None, priority, salt)
        count = 256 * len(self._replicas) if at_once is None else check_int("at_once", at_once, 1)
        workers = [asyncio.create_task(work()) for _ in range(min(count, len(all_prompts)))]
        try:
            await asyncio.gather(*workers)
        finally:
            for each in workers:
                each.cancel()
            await asyncio.gather(*workers, return_exceptions=True)
        return outputs

    async def _encode(self, prompt: Prompt) -> tuple[Prompt, Ids]:
        """The prompt that is sent, with token ids, and these. A prompt that has none is sent as it is: the engine that
        gets it says what is wrong."""
        text, served = self._read("prompt", prompt)
        how: Any = "prompt", served, self._tokenizer, self._vocab_size
        is_long = isinstance(served, str) and len(served) > LONG_TEXT
        ids, error = await asyncio.to_thread(encode, *how) if is_long else encode(*how)
        if error is not None:
            return prompt, array("i")
        return {"prompt": text, "prompt_token_ids": ids}, array("i", ids)

    def _read(self, name: str, prompt: Prompt) -> tuple[str | None, str | SequenceOf[int]]:
        text, served = read_prompt(name, prompt)
        check_type(served)
        if isinstance(served, str) and self._tokenizer is None:
            raise TypeError(f"{name} is {reprlib.repr(served)}, but a router without a tokenizer takes token ids")
        return text, served

    # --- routing

    async def _choose(self, ids: Ids, spans: list[bytes], salt: bytes) -> tuple[Life, int]:
        """A replica, and how many tokens of the prompt it has to compute."""
        while True:
            while not self._living:
                if not self._starting:
                    raise NoReplicaError(f"no replica is left: {self._failure}") from self._failure
                await asyncio.wait(self._starting, return_when=asyncio.FIRST_COMPLETED)
            guesses = {life: len(ids) - life.estimate(spans) for life in self._living}
            asked = nsmallest(MAX_ASKED, guesses, key=lambda life: _cost(life, guesses[life]))
            told = await self._ask(asked, ids, salt)
            # Those that were not asked, too: others may have been sent a lot meanwhile.
            missing = {
                life: len(ids) - (life.known(spans, told[life]) if life in told else life.estimate(spans))
                for life in self._living
            }
            if missing:
                chosen = min(missing, key=lambda life: _cost(life, missing[life]))
                return chosen, missing[chosen]

    async def _ask(self, lives: list[Life], ids: Ids, salt: bytes) -> dict[Life, int]:
        """What each has of the prompt, of those that answer in time."""
        tasks = {asyncio.ensure_future(self._living[life].match(ids, salt)): life for life in lives}
        told = {}
        try:
            done, _ = await asyncio.wait(tasks, timeout=PATIENCE)
            for task in done:
                try:
                    told[tasks[task]] = task.result()
                except ReplicaDied as death:
                    self._lose(tasks[task], death)
        finally:
            for task in tasks:
                task.cancel()
        return told

    # --- life and death

    def _lose(self, life: Life, death: ReplicaDied) -> None:
        """Has a replica started again, once, however many of its requests report its death."""
        replica = self._living.pop(life, None)
        if replica is not None:
            logger.warning("a replica died and is started again: %s", death)
            task = asyncio.create_task(self._restart(replica))
            self._starting.add(task)
            task.add_done_callback(self._starting.discard)

    async def _restart(self, replica: Replica) -> None:
        try:
            await self._start(replica)
        except Exception as error:
            self._failure = error
            logger.exception("a replica could not be started again: %d are left", len(self._living))

    async def _start(self, replica: Replica) -> None:
        await replica.start()
        self._living[Life(self._table_tokens)] = replica

    async def close(self) -> None:
        """Ends all replicas. Their unfinished requests are aborted, or end with an error."""
        self._failure = RuntimeError("the router is closed")
        self._living.clear()  # first: of what has died meanwhile nothing is started again
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*self._starting, return_exceptions=True)
        closed = await asyncio.gather(*(each.close() for each in self._replicas), return_exceptions=True)
        for error in filter(None, closed):
            raise error  # the first, when none is at work any more

    async def __aenter__(self) -> Self:
        self._starting = {asyncio.create_task(self._start(each)) for each in self._replicas}
        try:
            await asyncio.gather(*self._starting)
        except BaseException:
            await self.close()
            raise
        self._starting.clear()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def _cost(life: Life, missing: int) -> tuple[int, int]:
    """Of sending a prompt there of which so many tokens are missing; of equals one with fewer requests is taken."""
    return life.queued + OWN_TOKEN * missing, life.running
