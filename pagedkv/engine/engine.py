"""Engine: a model folder, a KV cache, a scheduler, and requests that come and go between any two steps."""

from __future__ import annotations

import itertools
import os
import random
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import fields
from html import escape
from inspect import Parameter, Signature, signature
from queue import SimpleQueue
from typing import Any, Self, TypeVar

from pagedkv import OutOfBlocks

from . import snapshot
from .arguments import Prompt, check_vocabulary, encode
from .calls import Call
from .explain import explain
from .model_runner import ModelRunner
from .outputs import EngineCounters, EngineStats, Latencies, RequestOutput, percentiles
from .parts import EngineOptions, build_parts
from .pipeline import Pipeline
from .pool_size import page_bytes, pages_of_memory
from .request import Receiver, Request
from .sampling_params import RequestOutputKind, SamplingParams, check_int, check_names
from .sequence import Sequence
from .step import Step
from .turns import Mailbox, Turns

T = TypeVar("T")


class Engine:
    """Continuous batching for a Qwen3 folder in the Hugging Face layout.

    model                   folder with config.json, safetensors and, for text, tokenizer.json; or a name on the Hugging
                            Face hub, such as "Qwen/Qwen3-0.6B" (see model_folder)
    revision                of a name on the hub: a branch, a tag or a commit
    device                  "auto": a GPU where there is one; "cpu", "cuda", "cuda:1"
    load_format             "auto": the safetensors of the folder; "dummy": random weights, to measure speed
    dtype                   "auto" (what config.json says), "float32", "float16" or "bfloat16"; of weights, KV and sums
    kv_cache_dtype          "auto" (dtype) or "fp8" (float8_e4m3fn without scales): half the memory, and half the time
                            that a GPU's decode spends reading it
    block_size              tokens in a page, and the least that prompts share of their cache; a GPU reads pages of 256
                            0.5 to 1 % faster
    num_blocks              pages in the pool; None: as many as kv_cache_memory holds
    kv_cache_memory         bytes; None: on a GPU what gpu_memory_utilization leaves; on the CPU what max_num_seqs
                            sequences of max_model_len need, at most 4 GiB and a quarter of the machine's memory, at
                            least one sequence
    gpu_memory_utilization  share of a GPU's memory that is in use at the end, by the weights, the scratch memory of
                            operations, graphs, and the pool; what others use of it counts, too
    enforce_eager           no CUDA graphs: the same tokens, slower, with less to do at the start
    swap_space              bytes of host memory that the KV of preempted sequences moves to; what does not fit there is
                            computed again later. 0: all of it
    max_num_seqs            sequences that run (hold pages) at a time
    max_num_batched_tokens  tokens computed in a step: prompts are cut into chunks to fit
    max_model_len           prompt and new tokens of a request at most; None: the model's own limit
    enable_prefix_caching   compute a common beginning of prompts once
    eviction                "reuse" keeps cached pages longer that were found again; "lru": see BlockManager
    seed                    of the seeds drawn for requests without one; None: from the operating system

    To look at: `config`, `counters` (EngineCounters), `manager` (the BlockManager), `max_model_len`, `dtype`, `memory`
    (on a GPU, bytes by what they are for, as the driver counts them at the start; graphs of steps that filter, penalise
    or report tokens follow when they are needed, for which there is room).

    Every method may be called from any thread.
    """

    # For help() and inspect: what **options may be.
    __signature__ = Signature(
        [Parameter("model", Parameter.POSITIONAL_OR_KEYWORD), *signature(EngineOptions).parameters.values()]
    )

    def __new__(cls, *args: Any, **options: Any) -> Self:
        check_names(cls.__name__, options, [each.name for each in fields(EngineOptions)] + ["model"])
        return super().__new__(cls)

    def __init__(self, model: str | os.PathLike[str], **options: Any) -> None:
        checked = EngineOptions(**options)
        parts = build_parts(model, checked)
        self.folder, self.device, self.config = parts.folder, parts.device, parts.config
        self.dtype, self.kv_cache_dtype = parts.dtype, parts.kv_cache_dtype
        self.max_model_len, self.tokenizer, self.memory = parts.max_model_len, parts.tokenizer, parts.memory
        self.manager, self.scheduler = parts.manager, parts.scheduler
        self._runner: ModelRunner | None = parts.runner
        self._fingerprint = parts.fingerprint
        self.counters = EngineCounters()
        self.num_finished = 0  # requests
        self._latencies = Latencies()
        self._random = random.Random(checked.seed)
        self._sequence_ids = itertools.count()
        self._request_ids = itertools.count()
        self._lock = threading.Lock()  # of what follows
        self._requests: dict[str, Request] = {}  # those that are not finished
        self._arriving: deque[Request] = deque()  # of them those that the scheduler does not know yet
        self._leaving: deque[Request] = deque()  # those to be aborted
        self._actions: deque[tuple[Callable[[], Any], Future[Any]]] = deque()  # what else waits for the end of a step
        self._num_followed = 0
        self._outputs: Mailbox = SimpleQueue()  # of requests that were made by add_request()
        self._turns = Turns(self._step, self._settle, self._is_unsettled)
        self._pipeline = self._new_pipeline()

    def _new_pipeline(self) -> Pipeline:
        assert self._runner is not None
        return Pipeline(self._runner, self.scheduler, self.counters, self._received)

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

        prompt      a text, or token ids
        request_id  a string that no other request has now; None: a number
        priority    lower ones are served first, and take the places of higher ones
        salt        requests share cached pages with those of the same salt only

        A prompt or an option of the wrong type raises TypeError, an id that is in use ValueError. A request that cannot
        be served, because it is too long or a token id is not in the vocabulary, gets an output with `error`.
        """
        request = self._make_request(prompt, params, self._outputs, request_id=request_id)
        self._submit([request], Call(), priority, salt)
        return request.id

    def abort(self, request_id: str) -> bool:
        """Ends the request between two steps, with finish_reason "abort" and what it has until then. False where there
        is none of this id: it may have ended by itself."""
        request = self._requests.get(request_id)
        return request is not None and self._abort_all([request])

    def _abort_all(self, requests: list[Request]) -> bool:
        """Whether any of them had not ended yet."""
        with self._lock:
            living = [request for request in requests if self._requests.get(request.id) is request]
            self._leaving += living
        self._turns.settle()
        return bool(living)

    def has_unfinished_requests(self) -> bool:
        """Whether step() has anything to do, or to return."""
        return bool(self._requests) or not self._outputs.empty()

    def step(self) -> list[RequestOutput]:
        """Computes the next step, unless another thread does so right now, and returns the outputs that there are, of
        requests made by add_request(): after each step with new tokens or at the end, as their output_kind says."""
        if self._requests and self._outputs.empty():
            self._turns.try_step()
        outputs = []
        while not self._outputs.empty():
            outputs.append(self._outputs.get())
        return outputs

    def _make_request(
        self,
        prompt: Prompt,
        params: SamplingParams | None,
        receiver: Receiver,
        *,
        output_kind: RequestOutputKind | None = None,
        request_id: str | None = None,
        wants_embedding: bool = False,
        name: str = "prompt",
    ) -> Request:
        """Checks and encodes it, on the caller's time. It is not queued yet. output_kind None: that of params."""
        start_time = time.perf_counter()
        params = SamplingParams() if params is None else params
        if not isinstance(params, SamplingParams):
            raise TypeError(f"params is {params!r} but must be SamplingParams")
        if request_id is None:
            request_id = str(next(self._request_ids))
        elif not isinstance(request_id, str):
            raise TypeError(f"request_id is {request_id!r} but must be a string")
        token_ids, error = encode(name, prompt, self.tokenizer, self.config.vocab_size)
        kind = params.output_kind if output_kind is None else output_kind
        request = Request(request_id, prompt, token_ids, params, receiver, kind, self.tokenizer, start_time)
        ids = [next(self._sequence_ids) for _ in range(params.num_sequences)]
        request.sequences = [
            Sequence(id, [] if error else token_ids, params, 0, self.config.eos_token_ids, start_time) for id in ids
        ]
        for index, seq in enumerate(request.sequences):
            seq.owner, seq.index, seq.wants_embedding = request, index, wants_embedding
            seq.error = error
            if index > 0:
                seq.prompt_logprobs = None  # the first one's are theirs
        return request

    def _submit(self, requests: list[Request], call: Call, priority: int = 0, salt: bytes = b"") -> None:
        """Queues requests that were asked for together."""
        priority = check_int("priority", priority, -(2**31), 2**31 - 1)
        if not isinstance(salt, bytes):
            raise TypeError(f"salt is {salt!r} but must be bytes")
        ended = []
        with self._lock:
            if self._runner is None:
                raise RuntimeError(f"this {type(self).__name__} is closed")
            for request in requests:
                if request.id in self._requests:
                    raise ValueError(f"request_id is {request.id!r}, which a request has that is not finished")
            for request in requests:
                self._seed(request)
                for seq in request.sequences:
                    seq.call, seq.priority, seq.salt = call, priority, salt
                if request.params.prompt_logprobs is not None:  # all of the prompt is computed: it finds nothing
                    for seq in request.sequences:
                        seq.salt += b"prompt_logprobs %d" % request.sequences[0].id
                if self._end_at_once(request):
                    ended.append(request)
                else:
                    self._requests[request.id] = request
                    self._num_followed += request.is_followed
                    self._arriving.append(request)
        for request in ended:
            self._tell(request, request.sequences)

    def _seed(self, request: Request) -> None:
        """A seed for each answer: the i-th of a request with a seed has that seed + i."""
        seed = request.params.seed
        for index, seq in enumerate(request.sequences):
            drawn = self._random.getrandbits(63) if seed is None else seed + index
            seq.seed = (drawn + 2**63) % 2**64 - 2**63

    def _end_at_once(self, request: Request) -> bool:
        """A request that wants no token, or that can never be served, ends here; then True."""
        first, now = request.sequences[0], time.perf_counter()
        reason = "length" if request.params.max_tokens == 0 else None
        error: Exception | None = first.error
        try:
            if error is None:
                self.scheduler.check(first)
                check_vocabulary(request.params, self.config.vocab_size)
                request.prepare_text()
        except (ValueError, OutOfBlocks) as problem:
            error = problem
        if error is None and reason is None:
            return False
        for seq in request.sequences:
            seq.finish("error" if error else "length", now, error)
        request.num_ended = len(request.sequences)
        return True

    # --- a step, by the one caller whose turn it is

    def _step(self) -> None:
        try:
            self._settle()
            if self._runner is not None and self._pipeline.has_work:  # it may have been closed just now
                self._pipeline.launch()
                self._pipeline.take()
        except BaseException:
            self._restart()
            raise

    def _is_unsettled(self) -> bool:
        return bool(self._arriving or self._leaving or self._actions)

    def _settle(self) -> None:
        """What came between two steps. Nothing is taken from a queue before it is done: an interrupt loses nothing."""
        while self._arriving:
            first, *others = self._arriving[0].sequences
            first.siblings = others
            self.scheduler.add(first)
            self._arriving.popleft()
        while self._leaving:
            self._abort(self._leaving[0])
            self._leaving.popleft()
        while self._actions:
            action, future = self._actions.popleft()
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

    def _between_steps(self, action: Callable[[], T]) -> T:
        """Runs it while no step is planned or taken, and returns what it does. Steps may be on their way."""
        future: Future[T] = Future()
        self._actions.append((action, future))
        self._turns.settle()
        return future.result()

    def _abort(self, request: Request) -> None:
        living = [seq for seq in request.sequences if seq.finish_reason is None]
        unforked = {child for seq in living for child in seq.siblings}
        now = time.perf_counter()
        for seq in living:
            seq.siblings = []
            seq.finish("abort", now)
        self.scheduler.forget([seq for seq in living if seq not in unforked])
        if living:
            request.num_ended += len(living)
            self._tell(request, living)

    def _received(self, step: Step, finished: list[Sequence]) -> None:
        """After every step: tells the callers what is new."""
        news: dict[Request, list[Sequence]] = {}
        for seq in finished:
            seq.owner.num_ended += 1
            news.setdefault(seq.owner, []).append(seq)
            self._latencies.add(seq)
        if self._num_followed:
            for seq in step.receivers:
                if seq.owner.is_followed and len(seq.new_tokens) > seq.num_shown and seq.finish_reason is None:
                    news.setdefault(seq.owner, []).append(seq)
        for request, sequences in news.items():
            self._tell(request, sequences)

    def _tell(self, request: Request, sequences: list[Sequence]) -> None:
        """The caller, where it follows these sequences or all of the request's have ended."""
        if request.is_followed:
            request.receiver.put(request.new_output(sequences))
        elif request.is_finished:
            request.receiver.put(request.final_output())
        if request.is_finished:
            with self._lock:
                if self._requests.pop(request.id, None) is not None:
                    self._num_followed -= request.is_followed
                    self.num_finished += 1

    def _restart(self) -> None:
        """After an error within a step: nothing that the host knows is lost. All that is not finished is computed again
        from its tokens, and what had ended, but not been told, is told."""
        if self._runner is None:
            return
        self._runner.forget()
        self._pipeline = self._new_pipeline()
        arriving = set(self._arriving)
        requests = [request for request in self._requests.values() if request not in arriving]
        self.scheduler.restart([seq for request in requests for seq in request.sequences])
        for request in requests:
            ended = [seq for seq in request.sequences if seq.finish_reason is not None]
            request.num_ended = len(ended)
            if ended:
                self._tell(request, ended)

    # --- the pool

    def resize_cache(self, num_blocks: int | None = None, *, kv_cache_memory: int | None = None) -> int:
        """Gives the pool another size while the engine goes on: so many pages, or as many as these bytes hold. Returns
        how many it has now.

        Shrinking evicts cached pages and gives memory back to the system; it raises OutOfBlocks, and nothing changes,
        where pages in use lie behind the new end. MemoryError: the device has no more.
        """
        caches = self._open_runner().caches
        if num_blocks is None and kv_cache_memory is not None:
            num_blocks = pages_of_memory(kv_cache_memory, caches.page_bytes)
        elif num_blocks is None or kv_cache_memory is not None:
            raise ValueError("num_blocks or kv_cache_memory: give one of them")
        wanted = check_int("num_blocks", num_blocks, 1)
        if wanted > caches.max_blocks:
            raise MemoryError(f"num_blocks is {wanted} but this machine has room for {caches.max_blocks} at most")
        self._between_steps(lambda: self._resize(wanted))
        return wanted

    def _resize(self, num_blocks: int) -> None:
        caches, before = self._open_runner().caches, self.manager.num_blocks
        if num_blocks > before:
            caches.resize(num_blocks)
            self.manager.resize(num_blocks)
        else:
            self.manager.resize(num_blocks)
            caches.resize(num_blocks)

    def save_cache(self, path: str | os.PathLike[str]) -> int:
        """Writes the prefix cache to a file, for load_cache() after a restart; returns how many pages. No step is made
        meanwhile. The file is there as a whole or as it was before, whatever happens. It holds prompts: others than its
        owner may not read it."""
        return self._between_steps(lambda: self._with_caches(snapshot.save, path))

    def load_cache(self, path: str | os.PathLike[str]) -> int:
        """Puts what save_cache() wrote into free pages of the prefix cache; returns how many pages.

        ValueError: the file is damaged, or of another model, dtype or layout. FileNotFoundError. Then nothing changes.
        """
        return self._between_steps(lambda: self._with_caches(snapshot.load, path))

    def _with_caches(self, action: Callable[..., int], path: str | os.PathLike[str]) -> int:
        runner = self._open_runner()
        identity = {
            "model": self._fingerprint,
            "config": self.config.fingerprint(),
            "dtype": self.dtype,
            "kv_cache_dtype": self.kv_cache_dtype,
            "block_size": str(self.manager.block_size),
        }
        with runner.stream:
            return action(path, identity, self.manager, runner.caches)

    def _open_runner(self) -> ModelRunner:
        if self._runner is None:
            raise RuntimeError(f"this {type(self).__name__} is closed")
        return self._runner

    # --- to look at

    def stats(self) -> EngineStats:
        """The engine now: what runs and waits, sums since the start, percentiles of the last requests' times."""
        latencies = self._latencies
        return EngineStats(
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting) + len(self._arriving),
            num_finished=self.num_finished,
            num_preemptions=self.scheduler.num_preemptions,
            counters=self.counters.copy(),
            pool=self.manager.stats(),
            time_to_first_token=percentiles(latencies.ttft),
            time_per_token=percentiles(latencies.tpot),
            queue_time=percentiles(latencies.queue),
        )

    def explain(self, request_id: str) -> str:
        """What the request does, and why it does not run where it waits. KeyError where none of this id is there."""
        with self._lock:
            request = self._requests.get(request_id)
        if request is None:
            raise KeyError(f"request_id is {request_id!r}, but no request that is not finished has it")
        return self._between_steps(lambda: explain(self.scheduler, request.sequences))

    def __repr__(self) -> str:
        config, manager, scheduler = self.config, self.manager, self.scheduler
        pages = f"{manager.num_blocks:,} pages of {manager.block_size} tokens"
        size = manager.num_blocks * page_bytes(config, self.kv_cache_dtype, manager.block_size) / 2**30
        beside = "".join(f", {name} {size / 2**30:.2f}" for name, size in self.memory.items() if name != "pool")
        return (
            f"<{type(self).__name__} on {self.device}: {config.num_layers} layers of {config.hidden_size:,}, "
            f"{self.dtype}; {pages} ({size:.2f} GiB{beside}); {scheduler.max_num_seqs} sequences of up to "
            f"{self.max_model_len:,} tokens>"
        )

    def _repr_html_(self) -> str:
        """What the engine is, and its stats, for a notebook."""
        return f"<p>{escape(repr(self))}</p>{self.stats()._repr_html_()}"

    # --- the end

    def close(self) -> None:
        """Aborts what is not finished, and gives the weights' and the KV cache's memory back. Closing twice is fine;
        new requests raise RuntimeError then."""
        if self._runner is not None:
            self._between_steps(self._close)

    def _close(self) -> None:
        with self._lock:
            requests, self._runner = list(self._requests.values()), None
            self._arriving.clear()
        for request in requests:
            for seq in request.sequences:
                if seq.finish_reason is None:
                    seq.finish("abort", time.perf_counter())
            request.num_ended = len(request.sequences)
            self._tell(request, request.sequences)
        self.scheduler.restart([seq for request in requests for seq in request.sequences])
        del self._pipeline

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
