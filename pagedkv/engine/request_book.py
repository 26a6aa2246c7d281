"""The unfinished requests of an engine: which arrive, which leave, and what their callers are told."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from pagedkv import OutOfBlocks

from .arguments import check_vocabulary
from .explain import explain
from .outputs import EngineCounters, EngineStats, Latencies, percentiles
from .request import Request
from .scheduler import Scheduler
from .sequence import Sequence
from .step import Step


class RequestBook:
    """Any thread may call add(), leave() and find(). The rest is for the one whose turn it is, between two steps."""

    def __init__(self, scheduler: Scheduler, vocab_size: int, owner: str) -> None:
        """owner: the name of the engine's class, for messages."""
        self._scheduler, self._vocab_size, self._owner = scheduler, vocab_size, owner
        # Guards what follows. The garbage collector may close a stream, and so abort its request, within a thread that
        # holds the lock: that thread takes it again.
        self._lock = threading.RLock()
        self._living: dict[str, Request] = {}
        self._arriving: deque[Request] = deque()  # those of them that the scheduler does not know yet
        self._leaving: deque[Request] = deque()  # those to be aborted
        self._num_followed = 0
        self._num_finished = 0
        self._latencies = Latencies()
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._living)

    @property
    def is_unsettled(self) -> bool:
        return bool(self._arriving or self._leaving)

    # --- for any thread

    def add(self, requests: list[Request]) -> None:
        """Queues requests that were asked for together. Those that can never be served get their output at once."""
        ended, problems = [], [self._prepare(request) for request in requests]
        with self._lock:
            if self._is_closed:
                raise RuntimeError(f"this {self._owner} is closed")
            for request in requests:
                if request.id in self._living:
                    raise ValueError(f"request_id is {request.id!r}, which a request has that is not finished")
            for request, problem in zip(requests, problems, strict=True):
                if self._end_at_once(request, problem):
                    ended.append(request)
                else:
                    self._living[request.id] = request
                    self._num_followed += request.is_followed
                    self._arriving.append(request)
        for request in ended:
            self._tell(request, request.sequences)

    def leave(self, requests: list[Request]) -> bool:
        """Has these requests aborted at the next settle(). Returns whether any of them had not ended yet."""
        with self._lock:
            living = [request for request in requests if self._living.get(request.id) is request]
            self._leaving += living
        return bool(living)

    def find(self, request_id: str) -> Request | None:
        with self._lock:
            return self._living.get(request_id)

    def _prepare(self, request: Request) -> Exception | None:
        """Does what takes time, before the lock is taken. Returns why the request can never be served; None: it can."""
        first = request.sequences[0]
        try:
            if first.error is None:
                self._scheduler.check(first)
                check_vocabulary(request.params, self._vocab_size)
                request.prepare_text()
        except (ValueError, OutOfBlocks) as problem:
            return problem
        return first.error

    def _end_at_once(self, request: Request, error: Exception | None) -> bool:
        """Ends a request that wants no token or can never be served. Returns whether it did."""
        try:
            if error is None:
                self._scheduler.check_pages(request.sequences[0])  # once more: the pool may have shrunk since
        except OutOfBlocks as problem:
            error = problem
        if error is None and request.params.max_tokens != 0:
            return False
        now = time.perf_counter()
        for seq in request.sequences:
            seq.finish("error" if error else "length", now, error)
        request.num_ended = len(request.sequences)
        return True

    # --- between two steps

    def settle(self) -> None:
        """Takes in what came since the last step. An entry stays queued until it is done: interrupts lose nothing."""
        self._take_arriving()
        while self._leaving:
            self._take_arriving()  # whoever leaves arrived before
            self._abort(self._leaving[0])
            self._leaving.popleft()

    def _take_arriving(self) -> None:
        while self._arriving:
            first, *others = self._arriving[0].sequences
            first.siblings = others
            self._scheduler.add(first)
            self._arriving.popleft()

    def resize(self, num_blocks: int, action: Callable[[], None]) -> None:
        """Calls the action, which resizes the pool, and takes no request meanwhile. Raises OutOfBlocks where an
        unfinished request could not end in so few pages."""
        with self._lock:
            for request in list(self._living.values()):
                num_pages = self._scheduler.pages_of(request.sequences[0])
                if num_pages > num_blocks:
                    raise OutOfBlocks(f"num_blocks is {num_blocks} but request {request.id!r} may need {num_pages}")
            action()

    def _abort(self, request: Request) -> None:
        living = [seq for seq in request.sequences if seq.finish_reason is None]
        unforked = {child for seq in living for child in seq.siblings}
        now = time.perf_counter()
        for seq in living:
            seq.siblings = []
            seq.finish("abort", now)
        self._scheduler.forget([seq for seq in living if seq not in unforked])
        if living:
            request.num_ended += len(living)
            self._tell(request, living)

    def received(self, step: Step, finished: list[Sequence]) -> None:
        """After every step: tells the callers what is new."""
        news = list(finished)
        for seq in finished:
            seq.owner.num_ended += 1
            self._latencies.add(seq)
        if self._num_followed:
            news += [
                seq for seq in step.receivers
                if seq.owner.is_followed and seq.finish_reason is None and len(seq.new_tokens) > seq.num_shown
            ]  # fmt: skip
        together: dict[Request, list[Sequence]] = {}  # answers of one request
        for seq in news:
            if len(seq.owner.sequences) == 1:
                self._tell(seq.owner, [seq])
            else:
                together.setdefault(seq.owner, []).append(seq)
        for request, sequences in together.items():
            self._tell(request, sequences)

    def _tell(self, request: Request, sequences: list[Sequence]) -> None:
        """Tells the caller, if the request is streamed or all of its sequences have ended."""
        if sequences and (request.is_followed or request.is_finished):
            request.receiver.put(request.note(sequences))
        if request.is_finished:
            with self._lock:
                if self._living.get(request.id) is request:
                    del self._living[request.id]
                    self._num_followed -= request.is_followed
                    self._num_finished += 1

    def restart(self) -> None:
        """After an error within a step: nothing that the host knows is lost. Unfinished sequences are computed again
        from their tokens, and callers are told of those that had ended."""
        with self._lock:
            arriving = set(self._arriving)
            requests = [request for request in self._living.values() if request not in arriving]
        self._scheduler.restart([seq for request in requests for seq in request.sequences])
        for request in requests:
            ended = [seq for seq in request.sequences if seq.finish_reason is not None]
            request.num_ended = len(ended)
            self._tell(request, [seq for seq in ended if not seq.is_end_told])

    def close(self) -> None:
        """Aborts all requests, and takes no more."""
        with self._lock:
            requests, self._is_closed = list(self._living.values()), True
            self._arriving.clear()
        for request in requests:
            for seq in request.sequences:
                if seq.finish_reason is None:
                    seq.finish("abort", time.perf_counter())
            request.num_ended = len(request.sequences)
            self._tell(request, request.sequences)
        self._scheduler.restart([seq for request in requests for seq in request.sequences])

    # --- to look at

    def explain(self, request: Request) -> str:
        self.settle()  # it may have arrived while another errand ran
        return explain(self._scheduler, request.sequences)

    def stats(self, counters: EngineCounters) -> EngineStats:
        scheduler, latencies = self._scheduler, self._latencies
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting) + len(self._arriving),
            num_finished=self._num_finished,
            num_preemptions=scheduler.num_preemptions,
            counters=counters.copy(),
            pool=scheduler.manager.stats(),
            time_to_first_token=percentiles(latencies.ttft),
            time_per_token=percentiles(latencies.tpot),
            queue_time=percentiles(latencies.queue),
        )
