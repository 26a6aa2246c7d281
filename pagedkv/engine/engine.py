"""Engine: a model, its KV cache, a scheduler, and requests that come and go between any two steps."""

from __future__ import annotations

import itertools
import logging
import os
import random
import time
from dataclasses import replace
from functools import cached_property, partial
from html import escape
from inspect import Parameter, Signature, signature
from typing import Any, Self

from pagedkv import OutOfBlocks
from pagedkv.models.adapter import Adapter
from pagedkv.models.hub import model_folder
from pagedkv.models.pooling import read_normalizes

from .build import build, read_default_params, read_model
from .control import Control
from .lora_request import LoRARequest
from .options import KV_CACHE_DTYPES, EngineOptions, describe, find_device
from .outputs import EngineStats, RequestOutput
from .requests.adapters import check_lora
from .requests.prompts import Prompt, check_request, check_vocabulary, encode, read_prompt
from .requests.request import Mailbox, Receiver, Request
from .requests.view import EngineView
from .runner.plan import devices_of_ranks
from .sampling.grammars import Grammars
from .sampling_params import RequestOutputKind, SamplingParams
from .scheduling.sequence import Sequence, private_salt
from .text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)
# Of requests for a vector.
EMBED = SamplingParams(max_tokens=1, temperature=0, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY)


class Engine(Control):
    __doc__ = f"""Continuous batching for the folder of a model in the Hugging Face layout (docs/models.md).

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
        start = time.perf_counter()
        checked = EngineOptions.of(type(self).__name__, options)
        self.device, self.folder = find_device(checked.device), model_folder(model, checked.revision)
        self.tokenizer = Tokenizer(self.folder)
        self.config = read_model(self.folder, self.tokenizer, checked.quantization)
        self.default_params = read_default_params(self.folder)
        self.dtype = self.config.dtype if checked.dtype == "auto" else checked.dtype
        self.kv_cache_dtype = KV_CACHE_DTYPES[checked.kv_cache_dtype] or self.dtype
        self._core, self._adapters, self.memory, self._identity = build(
            self.folder, self.config, checked, tokenizer=self.tokenizer, device=self.device, dtype=self.dtype,
            kv_cache_dtype=self.kv_cache_dtype, owner=type(self).__name__,
        )  # fmt: skip
        self._book, self.counters, self.scheduler = self._core.book, self._core.counters, self._core.scheduler
        self.manager, self.max_model_len = self.scheduler.manager, self.scheduler.max_model_len
        self._where = " and ".join(devices_of_ranks(self.device, checked.tensor_parallel_size))
        self._random = random.Random(checked.seed)
        self._sequence_ids = itertools.count()
        self._grammars = Grammars(self.tokenizer, self.config)
        self._start_control()
        logger.info("%s is ready after %.1f s: %s", self.folder, time.perf_counter() - start, repr(self))

    # What **options may be, for help() and inspect.
    __init__.__signature__ = Signature(  # type: ignore[attr-defined]
        [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in ("self", "model")]
        + list(signature(EngineOptions, eval_str=True).parameters.values())
    )

    # --- requests

    @property
    def _mailbox(self) -> Mailbox:
        return self._core.mailbox

    def add_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None = None,
        request_id: str | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        salt: bytes = b"",
    ) -> str:
        """Queues a request, whose outputs step() returns, and returns its id.

        Args:
            prompt: a text, token ids, or a dict with "prompt" (a text) or "prompt_token_ids"
            request_id: a string that no unfinished request has; None: a number
            lora_request: the adapter that it is computed with, of an engine with enable_lora; None: none
            priority: requests of lower priority values are served first, and take the places of those of higher ones
            salt: requests share cached pages only with requests of the same salt

        A prompt or an option of the wrong type raises TypeError, an id that is in use ValueError. A request that cannot
        be served, because it is too long, a token id is not in the vocabulary or its adapter cannot be used, gets an
        output with `error`.
        """
        request = self._prepare(
            prompt, params, self._mailbox, lora_request=lora_request, priority=priority, salt=salt,
            request_id=request_id,
        )  # fmt: skip
        self._mailbox.expect(request)
        try:
            self._core.submit([request])
        except BaseException:
            self._mailbox.expect_no_more(request.key)
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
        return self._mailbox.receive()

    def _prepare(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        receiver: Receiver,
        call: int | None = None,
        *,
        lora_request: LoRARequest | None = None,
        priority: int = 0,
        salt: bytes = b"",
        output_kind: RequestOutputKind | None = None,
        request_id: str | None = None,
        wants_embedding: bool = False,
        name: str = "prompt",
    ) -> Request:
        """A request that is checked, encoded, and not queued yet: EngineCore.submit() does that.

        receiver: gets its updates; call: its batch, see Sequence; name: what messages call the prompt.

        A wrong type or option raises. A request that cannot be served gets its error when it is submitted.
        """
        start_time = time.perf_counter()
        params = self.default_params if params is None else params
        priority = check_request(params, request_id, priority, salt)
        check_lora(lora_request, self._adapters)
        if params.structured_outputs is not None:
            params = replace(params, mask=self._grammars.mask(params.structured_outputs), structured_outputs=None)
        if params.prompt_logprobs is not None:  # which come from computing the prompt, not from the cache
            salt = private_salt(salt)
        text, served = read_prompt(name, prompt)
        error: Exception | None
        token_ids, error = encode(name, served, self.tokenizer, self.config.vocab_size)
        adapter = None
        if error is None:
            adapter, error = self._find_adapter(lora_request)
        request = Request(
            self._book.free_id() if request_id is None else request_id, params, receiver,
            output_kind or params.output_kind, self.tokenizer, prompt=text, token_ids=token_ids,
            start_time=start_time, normalizes=self._normalizes if wants_embedding else None,
        )  # fmt: skip
        max_tokens = self.scheduler.max_tokens(len(token_ids), params.max_tokens)
        for index in range(params.num_sequences):
            seq = Sequence(
                next(self._sequence_ids), [] if error else token_ids, params, self._seed_of(params, index),
                self.config.eos_token_ids, start_time, max_tokens=max_tokens, call=call, priority=priority, salt=salt,
                adapter=adapter,
            )  # fmt: skip
            call = seq.call
            seq.request, seq.index, seq.wants_embedding, seq.error = request, index, wants_embedding, error
            if index > 0:
                seq.prompt_logprobs = None  # those of the first answer hold for all
            request.sequences.append(seq)
        if error is None:
            try:
                self._check(request)
            except (ValueError, OutOfBlocks) as problem:
                request.sequences[0].error = problem
        return request

    def _check(self, request: Request) -> None:
        """Raises where it cannot be served."""
        self.scheduler.check(request.sequences[0])
        if request.normalizes is None and not self._core.has_head:
            raise ValueError(f"the model in {self.folder} has no head (lm_head.weight): it makes vectors: embed()")
        check_vocabulary(request.params, self.config.vocab_size)
        request.prepare_text()

    def _find_adapter(self, lora_request: LoRARequest | None) -> tuple[Adapter | None, Exception | None]:
        """The adapter, or why there is none."""
        if lora_request is None or self._adapters is None:
            return None, None
        try:
            return self._adapters.find(lora_request), None
        except (OSError, ValueError, NotImplementedError, MemoryError) as error:
            return None, error

    def _seed_of(self, params: SamplingParams, index: int) -> int:
        """The seed of an answer: the i-th answer to a request with a seed has that seed + i."""
        drawn = self._random.getrandbits(63) if params.seed is None else params.seed + index
        return (drawn + 2**63) % 2**64 - 2**63

    @cached_property
    def _normalizes(self) -> bool:
        """Whether a vector's length becomes 1; raises where the folder asks for another pooling than ours."""
        return read_normalizes(self.folder)

    # --- to look at

    def stats(self) -> EngineStats:
        """What runs and waits now, sums since the start, and percentiles of the last answers' times."""
        return self._book.stats(self.counters)

    def explain(self, request_id: str) -> str:
        """What the request is doing or, if it waits, why. KeyError where no unfinished request has this id."""
        found = self._core.call(partial(self._book.explain, request_id))
        if found is None:
            raise KeyError(f"request_id is {request_id!r}, but no request that is not finished has it")
        return found

    def view(self) -> EngineView:
        """Who runs and waits at this moment, and which pages of the pool are whose."""
        return self._core.call(self._book.view)

    def health(self) -> float | None:
        """How many seconds the step in work has taken so far; None: the engine is idle.

        Raises RuntimeError where nothing can be served any more: after close(), or after an error that ended the
        engine's thread, which is its cause. An error of a request is no such error."""
        return self._core.check_health()

    def __repr__(self) -> str:
        config, manager = self.config, self.manager
        size = manager.num_blocks * config.page_bytes(self.kv_cache_dtype, manager.block_size) / 2**30
        beside = "".join(f", {name} {size / 2**30:.2f}" for name, size in self.memory.items() if name != "pool")
        return (
            f"<{type(self).__name__} on {self._where}: {len(config.kv_layers)} layers of {config.hidden_size:,}, "
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
