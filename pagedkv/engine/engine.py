"""Engine: a model, its KV cache, a scheduler, and requests that come and go between any two steps."""

from __future__ import annotations

import logging
import os
import time
from html import escape
from inspect import Parameter, Signature, signature
from typing import Any, Self, cast

from pagedkv.checks import check_names

from .build import build_parts
from .cache.pool import Pool
from .cache.snapshot import open_saved
from .core import EngineCore
from .options import EngineOptions, describe
from .outputs import EngineStats, RequestOutput
from .requests.mailbox import Mailbox
from .requests.maker import RequestMaker
from .requests.prompts import Prompt
from .runner.model_runner import ModelRunner
from .sampling_params import SamplingParams
from .scheduling.sequence import Call

logger = logging.getLogger(__name__)


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
        parts = build_parts(model, checked)
        self.folder, self.device, self.config = parts.folder, parts.device, parts.spec
        self.dtype, self.kv_cache_dtype = parts.dtype, parts.kv_cache_dtype
        self.max_model_len, self.tokenizer, self.memory = parts.max_model_len, parts.tokenizer, parts.memory
        self.manager, self.scheduler, self.default_params = parts.manager, parts.scheduler, parts.default_params
        self._core = EngineCore(parts.runner, parts.scheduler, parts.spec.vocab_size, type(self).__name__)
        self._book, self.counters = self._core.book, self._core.counters
        self._identity = parts.identity
        self._maker = RequestMaker(
            parts.tokenizer, parts.spec, parts.scheduler, parts.default_params, checked.seed, self._book.find
        )
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
        request = self._maker.make(
            prompt, params, self._mailbox, Call(), priority=priority, salt=salt, request_id=request_id
        )
        self._mailbox.expect(request)
        try:
            self._core.submit([request])
        except BaseException:
            self._mailbox.expect_no_more(request)
            raise
        return request.id

    def abort(self, request_id: str) -> bool:
        """Ends the request between two steps; its output has finish_reason "abort" and the tokens so far. Its id is
        free at once. False where no request has this id: it may have ended by itself."""
        request = self._book.find(request_id)
        return request is not None and self._core.abort([request])

    def has_unfinished_requests(self) -> bool:
        """Whether step() has anything to wait for, or to return. Requests of generate() and the like do not count."""
        return self._mailbox.expects_anything

    def step(self) -> list[RequestOutput]:
        """Waits until there are new outputs of requests made by add_request(), and returns them: one for each step with
        new tokens or one at the end, as their output_kind says. Empty where no such request is left."""
        self._core.refuse_own_thread()
        return [cast(RequestOutput, increment.output()) for increment in self._mailbox.take_all()]

    # --- the pool

    def resize_cache(self, num_blocks: int | None = None, *, kv_cache_memory: int | None = None) -> int:
        """Resizes the pool while the engine goes on, to num_blocks pages or to as many as kv_cache_memory bytes hold.
        Returns the number of pages.

        Shrinking evicts cached pages and gives memory back to the system. If pages in use lie beyond the new end, or an
        unfinished request may need more pages than that, it raises OutOfBlocks and changes nothing. MemoryError: the
        device has too little memory.
        """
        wanted = self._pool().wanted_blocks(num_blocks, kv_cache_memory)
        self._core.call(lambda: self._book.resize(wanted, lambda: self._pool().resize(wanted)))
        return wanted

    def save_cache(self, path: str | os.PathLike[str]) -> int:
        """Writes the prefix cache to a file, for load_cache() after a restart; returns how many pages. No step is
        planned meanwhile. The file is written as a whole, or stays as it was. Only its owner may read it, because it
        holds prompts.

        The first call of this or of load_cache() reads all weights in the model's folder, to name them in the file: 1
        to 2 GB/s a core. ValueError: they are not those that were loaded.
        """
        self._pool()  # raises if closed
        identity = self._identity()
        return self._core.call(lambda: self._pool().save(path, identity))

    def load_cache(self, path: str | os.PathLike[str]) -> int:
        """Puts what save_cache() wrote into free pages of the prefix cache; returns how many pages.

        ValueError: the file is damaged, or of another model, dtype or layout. FileNotFoundError: there is none. After
        either nothing has changed.
        """
        self._pool()  # raises if closed
        file = open_saved(path, self._identity)
        return self._core.call(lambda: self._pool().load(file))

    def _pool(self) -> Pool:
        if self._runner is None:
            raise RuntimeError(f"this {type(self).__name__} is closed")
        return Pool(self.manager, self._runner.caches, self._runner.stream)

    @property
    def _runner(self) -> ModelRunner | None:
        """None: closed."""
        return self._core.runner

    # --- to look at

    def stats(self) -> EngineStats:
        """What runs and waits now, sums since the start, and percentiles of the last answers' times."""
        return self._book.stats(self.counters)

    def explain(self, request_id: str) -> str:
        """What the request is doing or, if it waits, why. KeyError where no unfinished request has this id."""
        request = self._book.find(request_id)
        if request is None:
            raise KeyError(f"request_id is {request_id!r}, but no request that is not finished has it")
        return self._core.call(lambda: self._book.explain(request))

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
        self._core.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
