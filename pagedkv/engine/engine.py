"""Engine: a model, its KV cache, a scheduler, and requests that come and go between any two steps."""

from __future__ import annotations

import logging
import os
import threading
import time
from html import escape
from inspect import Parameter, Signature, signature
from queue import SimpleQueue
from typing import Any, Self, cast

from pagedkv.checks import check_names

from .build import build
from .cache import snapshot
from .cache.pool import num_blocks_of, resize_pool
from .options import EngineOptions, describe
from .outputs import EngineStats, RequestOutput
from .requests.prompts import Prompt
from .requests.request import Reply, Update
from .runner.model_runner import ModelRunner
from .sampling_params import SamplingParams

logger = logging.getLogger(__name__)


class Mailbox:
    """Where updates of requests made by add_request() wait for step(). Any thread may add requests and receive."""

    def __init__(self) -> None:
        self._updates: SimpleQueue[Update] = SimpleQueue()
        # By Request.key; single operations of a dict are atomic.
        self._replies: dict[int, Reply] = {}
        self._expected: dict[int, None] = {}  # a set: which have updates to come
        self._lock = threading.Lock()  # of the one who waits

    def expect(self, reply: Reply) -> None:
        """Its updates come here, the last of them for sure."""
        key = reply.request.key
        self._replies[key], self._expected[key] = reply, None

    def expect_no_more(self, key: int) -> None:
        self._expected.pop(key, None)
        self._replies.pop(key, None)

    @property
    def expects_anything(self) -> bool:
        return bool(self._expected) or not self._updates.empty()

    def put(self, update: Update) -> None:
        self._updates.put(update)
        if update.is_last:  # nobody waits for it, even if an interrupt ends the receive() that has it
            self._expected.pop(update.key, None)

    def receive(self) -> list[RequestOutput]:
        """The outputs of all updates that are there, of which there is one at least unless nothing is expected. Who
        comes second waits for the first, because it may take the last there is."""
        with self._lock:
            outputs: list[RequestOutput] = []
            while not outputs and self.expects_anything:
                self._receive(self._updates.get(), outputs)
                while not self._updates.empty():
                    self._receive(self._updates.get(), outputs)
            return outputs

    def _receive(self, update: Update, outputs: list[RequestOutput]) -> None:
        reply = self._replies.get(update.key)
        if update.is_last:  # put() may not have come to it yet, and nothing would follow
            self.expect_no_more(update.key)
        if reply is not None:  # else add_request() was interrupted: nobody knows of the request
            outputs.append(cast(RequestOutput, reply.output(update)))


class Engine:
    __doc__ = f"""Continuous batching for a Qwen3 folder in the Hugging Face layout.

    Args:
        model: folder with config.json, safetensors and, for text, tokenizer.json; or a name on the Hugging Face hub,
            such as "Qwen/Qwen3-0.6B" (see model_folder)
{describe(EngineOptions, indent=8)}

    Attributes to read: `config`, `default_params` (the SamplingParams of requests without any: what the model's
    generation_config.json says), `counters` (EngineCounters), `manager` (the BlockManager), `max_model_len`, `dtype`,
    `memory` (on a GPU, bytes by use, as the driver counts them at the start; there is room for the graphs of steps that
    filter, penalise or report tokens, which are captured when they are needed).

    Every method may be called from any thread. A thread of the engine's own makes the steps while there are requests,
    and calls masks. An engine that nobody refers to any more is freed as if it were closed.
    """

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        check_names(type(self).__name__, options, list(signature(EngineOptions).parameters))
        start = time.perf_counter()
        checked = EngineOptions(**options)
        self._client = client = build(model, checked, type(self).__name__)
        self._core, self._book, self.counters = client.core, client.core.book, client.core.counters
        self.scheduler, self.manager = client.core.scheduler, client.core.scheduler.manager
        self.folder, self.device, self.config, self.dtype = client.folder, client.device, client.spec, client.dtype
        self.kv_cache_dtype, self.max_model_len = client.kv_cache_dtype, self.scheduler.max_model_len
        self.tokenizer, self.default_params, self.memory = client.tokenizer, client.default_params, client.memory
        self._mailbox = Mailbox()  # of requests made by add_request()
        logger.info("%s is ready after %.1f s: %s", self.folder, time.perf_counter() - start, repr(self))

    # What **options may be, for help() and inspect.
    __init__.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "model")]
        + list(signature(EngineOptions, eval_str=True).parameters.values())
    )

    # --- requests

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        priority: int = 0,
        salt: bytes = b"",
    ) -> str:
        """Queues a request, whose outputs step() returns, and returns its id.

        Args:
            prompt: a text, or token ids
            request_id: a string that no unfinished request has; None: a number
            priority: requests of lower priority values are served first, and take the places of those of higher ones
            salt: requests share cached pages only with requests of the same salt

        A prompt or an option of the wrong type raises TypeError, an id that is in use ValueError. A request that cannot
        be served, because it is too long or a token id is not in the vocabulary, gets an output with `error`.
        """
        reply = self._client.prepare(
            prompt, params, self._mailbox, priority=priority, salt=salt, request_id=request_id
        )
        self._mailbox.expect(reply)
        try:
            self._client.submit([reply])
        except BaseException:
            self._mailbox.expect_no_more(reply.request.key)
            raise
        return reply.request.id

    def abort(self, request_id: str) -> bool:
        """Ends the request between two steps; its output has finish_reason "abort" and the tokens so far. Its id is
        free at once. False where no request has this id: it may have ended by itself."""
        return self._client.abort(request_id)

    def has_unfinished_requests(self) -> bool:
        """Whether step() has anything to wait for, or to return. Requests of generate() and the like do not count."""
        return self._mailbox.expects_anything

    def step(self) -> list[RequestOutput]:
        """Waits until there are new outputs of requests made by add_request(), and returns them: one for each step with
        new tokens or one at the end, as their output_kind says. Empty where no such request is left."""
        self._core.refuse_own_thread()
        return self._mailbox.receive()

    # --- the pool

    def resize_cache(self, num_blocks: int | None = None, *, kv_cache_memory: int | None = None) -> int:
        """Resizes the pool while the engine goes on, to num_blocks pages or to as many as kv_cache_memory bytes hold.
        Returns the number of pages.

        Shrinking evicts cached pages and gives memory back to the system. If pages in use lie beyond the new end, or an
        unfinished request may need more pages than that, it raises OutOfBlocks and changes nothing. MemoryError: the
        device has too little memory.
        """
        wanted = num_blocks_of(num_blocks, kv_cache_memory, self._open_runner().caches)

        def resize() -> None:
            self._book.check_resize(wanted)
            resize_pool(self.manager, self._open_runner().caches, wanted)

        self._client.call(resize)
        return wanted

    def save_cache(self, path: str | os.PathLike[str]) -> int:
        """Writes the prefix cache to a file, for load_cache() after a restart; returns how many pages. No step is
        planned meanwhile. The file is written as a whole, or stays as it was. Only its owner may read it, because it
        holds prompts.

        The first call of this or of load_cache() reads all weights in the model's folder, to name them in the file: 1
        to 2 GB/s a core. ValueError: they are not those that were loaded.
        """
        self._client.health()
        identity = self._client.identity()

        def save() -> int:
            runner = self._open_runner()
            with runner.stream:
                return snapshot.save(path, identity, self.manager, runner.caches)

        return self._client.call(save)

    def load_cache(self, path: str | os.PathLike[str]) -> int:
        """Puts what save_cache() wrote into free pages of the prefix cache; returns how many pages.

        ValueError: the file is damaged, or of another model, dtype or layout. FileNotFoundError: there is none. After
        either nothing has changed.
        """
        self._client.health()
        file = snapshot.open_saved(path, self._client.identity)

        def load() -> int:
            runner = self._open_runner()
            with runner.stream:
                return snapshot.load(file, self.manager, runner.caches)

        return self._client.call(load)

    def _open_runner(self) -> ModelRunner:
        """The runner of an engine that is not closed."""
        self._client.health()
        assert self._runner is not None, "it is not closed"
        return self._runner

    @property
    def _runner(self) -> ModelRunner | None:
        """None: closed."""
        return self._core.runner

    # --- to look at

    def stats(self) -> EngineStats:
        """What runs and waits now, sums since the start, and percentiles of the last answers' times."""
        return self._client.stats()

    def explain(self, request_id: str) -> str:
        """What the request is doing or, if it waits, why. KeyError where no unfinished request has this id."""
        return self._client.explain(request_id)

    def health(self) -> None:
        """Raises RuntimeError where nothing can be served any more: after close(), or after an error that ended the
        engine's thread, which is its cause. An error of a request is no such error."""
        self._client.health()

    def __repr__(self) -> str:
        config, manager = self.config, self.manager
        size = manager.num_blocks * config.page_bytes(self.kv_cache_dtype, manager.block_size) / 2**30
        beside = "".join(f", {name} {size / 2**30:.2f}" for name, size in self.memory.items() if name != "pool")
        return (
            f"<{type(self).__name__} on {self.device}: {len(config.kv_layers)} layers of {config.hidden_size:,}, "
            f"{self.dtype}; {manager.num_blocks:,} pages of {manager.block_size} tokens ({size:.2f} GiB{beside}); "
            f"{self.scheduler.max_num_seqs:,} sequences of up to {self.max_model_len:,} tokens, "
            f"{self.scheduler.max_num_batched_tokens:,} tokens per step>"
        )

    def _repr_html_(self) -> str:
        """repr() and stats() for a notebook."""
        return f"<p>{escape(repr(self))}</p>{self.stats()._repr_html_()}"

    # --- the end

    def close(self) -> None:
        """Aborts unfinished requests and frees the memory of weights and KV cache. Closing twice is fine; later
        requests raise RuntimeError."""
        self._client.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
