"""EngineClient: what callers ask of an engine's core, from any thread.

LLM, Engine and AsyncEngine are faces of it. Requests go to the core as they are; what comes back to a receiver is plain
data (see Update), of which a Reply makes outputs in the caller's thread.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from queue import SimpleQueue
from typing import Any, TypeVar

from pagedkv import OutOfBlocks
from pagedkv.checks import check_int
from pagedkv.models.pooling import read_normalizes
from pagedkv.models.spec import Spec

from .core import EngineCore
from .outputs import EngineStats
from .requests.prompts import Prompt, check_vocabulary, encode, read_prompt
from .requests.request import Receiver, Reply, Request, Update
from .sampling_params import RequestOutputKind, SamplingParams
from .scheduling.sequence import Call, Sequence, private_salt
from .text.detokenizer import Detokenizer
from .text.tokenizer import Tokenizer

T = TypeVar("T")
IndexedOutputs = Generator[tuple[int, Any], None, None]  # RequestOutputs or EmbeddingOutputs
FINAL_ONLY = RequestOutputKind.FINAL_ONLY
EMBED = SamplingParams(max_tokens=1, temperature=0, detokenize=False, output_kind=FINAL_ONLY)


@dataclass(eq=False, kw_only=True)
class EngineClient:
    """Made by build().

    default_params: of requests without params
    memory: of a GPU, in bytes, by use
    identity: what a saved cache must agree with; the first call reads all weights
    seed: starts the generator of seeds for requests without one; None: the operating system's randomness
    """

    core: EngineCore
    spec: Spec
    tokenizer: Tokenizer
    folder: Path
    device: str
    dtype: str
    kv_cache_dtype: str
    default_params: SamplingParams
    memory: dict[str, int]
    seed: int | None
    identity: Callable[[], dict[str, str]]

    def __post_init__(self) -> None:
        self._random = random.Random(self.seed)
        self._sequence_ids, self._request_ids = itertools.count(), itertools.count()

    # --- requests

    def generate(
        self, prompts: list[Prompt], params: list[SamplingParams], *, name: str = "prompts[{}]", **options: Any
    ) -> IndexedOutputs:
        """The outputs of a batch of requests, as they come, and which of the requests each is of.

        A wrong argument raises at once. The requests are queued with the first next(), and what has not ended is
        aborted when the iterator is closed. The options are those of prepare(); `name` is what messages call a prompt.
        """
        mailbox: SimpleQueue[Update] = SimpleQueue()
        call = Call()
        replies = [
            self.prepare(prompt, one, mailbox, call, name=name.format(i), **options)
            for i, (prompt, one) in enumerate(zip(prompts, params, strict=True))
        ]
        return self._outputs(replies, mailbox)

    def _outputs(self, replies: list[Reply], mailbox: SimpleQueue[Update]) -> IndexedOutputs:
        by_key = {reply.request.key: (i, reply) for i, reply in enumerate(replies)}
        num_left = len(replies)
        try:
            self.submit(replies)
            while num_left:
                self.core.refuse_own_thread()
                update = mailbox.get()
                num_left -= update.is_last
                index, reply = by_key[update.key]
                yield index, reply.output(update)
        finally:  # after an error or an interrupt no request keeps pages
            self.cancel(replies)

    def embed(self, prompts: list[Prompt], **options: Any) -> IndexedOutputs:
        """As generate(), for vectors."""
        return self.generate(prompts, [EMBED] * len(prompts), wants_embedding=True, **options)

    @cached_property
    def _normalizes(self) -> bool:
        """Whether a vector's length becomes 1; raises where the folder asks for another pooling than ours."""
        return read_normalizes(self.folder)

    def prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        receiver: Receiver,
        call: Call | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
        output_kind: RequestOutputKind | None = None,
        request_id: str | None = None,
        wants_embedding: bool = False,
        name: str = "prompt",
    ) -> Reply:
        """A request that is checked, encoded, and not queued yet: submit() does that.

        Args:
            receiver: gets its updates
            call: the batch that it belongs to; None: it is alone
            output_kind: None: that of params
            request_id: None: a number
            name: what messages call the prompt

        A wrong type or option raises. A request that cannot be served gets its error when it is submitted.
        """
        start_time = time.perf_counter()
        params = self.default_params if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params is {params!r} but must be SamplingParams")
        if request_id is not None and not isinstance(request_id, str):
            raise TypeError(f"request_id is {request_id!r} but must be a string")
        priority = check_int("priority", priority, -(2**31), 2**31 - 1)
        if not isinstance(salt, bytes):
            raise TypeError(f"salt is {salt!r} but must be bytes")
        if params.prompt_logprobs is not None:  # which come from computing the prompt, not from the cache
            salt = private_salt(salt)
        text, served = read_prompt(name, prompt)
        token_ids, error = encode(name, served, self.tokenizer, self.spec.vocab_size)
        kind = params.output_kind if output_kind is None else output_kind
        # Which answers are the best is known only at the end.
        is_streamed = kind is not FINAL_ONLY and params.num_sequences == params.n
        request = Request(self._free_id() if request_id is None else request_id, params, receiver, is_streamed)
        max_tokens = self.core.scheduler.max_tokens(len(token_ids), params.max_tokens)
        for index in range(params.num_sequences):
            seq = Sequence(
                next(self._sequence_ids), [] if error else token_ids, params, self._seed_of(params, index),
                self.spec.eos_token_ids, start_time, max_tokens=max_tokens, call=call, priority=priority, salt=salt,
            )  # fmt: skip
            call = seq.call
            seq.request, seq.index, seq.wants_embedding, seq.error = request, index, wants_embedding, error
            if index > 0:
                seq.prompt_logprobs = None  # those of the first answer hold for all
            request.sequences.append(seq)
        if error is None:
            try:
                self.core.scheduler.check(request.sequences[0])
                check_vocabulary(params, self.spec.vocab_size)
                self._prepare_text(request)
            except (ValueError, OutOfBlocks) as problem:
                request.sequences[0].error = problem
        normalizes = self._normalizes if wants_embedding else None
        return Reply(request, text, token_ids, kind, self.tokenizer, start_time, normalizes)

    def _prepare_text(self, request: Request) -> None:
        """Gives a detokenizer to sequences whose text is needed before their end, and turns bad_words into tokens."""
        params, has_text = request.params, self.tokenizer.exists
        if (params.stop or params.bad_words) and not has_text:
            name, texts = ("stop", params.stop) if params.stop else ("bad_words", params.bad_words)
            raise ValueError(f"{name} is {list(texts)!r} but {self.tokenizer.path} is missing: there is no text")
        bad_words = self.tokenizer.encode_words(params.bad_words) if params.bad_words else []
        needs_text = params.stop or (request.is_streamed and params.detokenize and has_text)
        for seq in request.sequences:
            seq.bad_words = bad_words
            if needs_text:
                stream = self.tokenizer.text_stream(skip_special_tokens=params.skip_special_tokens)
                seq.detokenizer = Detokenizer(stream, tuple(params.stop), params.include_stop_str_in_output)

    def _free_id(self) -> str:
        """The next number that no caller took as an id."""
        while True:
            request_id = str(next(self._request_ids))
            if self.core.book.find(request_id) is None:
                return request_id

    def _seed_of(self, params: SamplingParams, index: int) -> int:
        """The seed of an answer: the i-th answer to a request with a seed has that seed + i."""
        drawn = self._random.getrandbits(63) if params.seed is None else params.seed + index
        return (drawn + 2**63) % 2**64 - 2**63

    def submit(self, replies: list[Reply]) -> None:
        """Queues requests that were asked for together. ValueError: one has an id that an unfinished request has."""
        self.core.submit([reply.request for reply in replies])

    def cancel(self, replies: list[Reply]) -> None:
        """Ends those of these requests which have not ended."""
        self.core.abort([reply.request for reply in replies])

    def abort(self, request_id: str) -> bool:
        """Ends the request between two steps, with finish_reason "abort". Its id is free at once. False where no
        request has this id: it may have ended by itself."""
        request = self.core.book.find(request_id)
        return request is not None and self.core.abort([request])

    # --- the engine

    def call(self, action: Callable[[], T]) -> T:
        """Runs the action between two steps, and returns its result or raises its error."""
        return self.core.call(action)

    def stats(self) -> EngineStats:
        """What runs and waits now, sums since the start, and percentiles of the last answers' times."""
        return self.core.book.stats(self.core.counters)

    def explain(self, request_id: str) -> str:
        """What the request is doing or, if it waits, why. KeyError where no unfinished request has this id."""
        request = self.core.book.find(request_id)
        if request is None:
            raise KeyError(f"request_id is {request_id!r}, but no request that is not finished has it")
        return self.call(lambda: self.core.book.explain(request))

    def health(self) -> None:
        """Raises RuntimeError where nothing can be served any more: after close(), or after an error that ended the
        engine's thread, which is the cause of the RuntimeError."""
        self.core.check_health()

    def close(self) -> None:
        """Aborts unfinished requests and frees the memory of weights and KV cache. Closing twice is fine."""
        self.core.close()
