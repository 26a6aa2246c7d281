"""The unfinished requests of an engine: which arrive, which leave, and what their callers get."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterable

from pagedkv import OutOfBlocks

from ..outputs import EngineCounters, EngineStats
from ..scheduling.scheduler import Scheduler
from ..scheduling.sequence import Sequence
from ..scheduling.step import Step
from .explain import explain
from .request import Request
from .statistics import Statistics
from .view import EngineView, take_view


class RequestBook:
    """Any thread may call claim(), release(), free_id() and find(). The rest is for the core's thread, between two
    steps."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._numbers = itertools.count()  # for ids
        self.reset_ids()
        self._requests: dict[Request, None] = {}  # an ordered set: those that the scheduler knows, or is to know
        self._tried: set[Request] | None = None  # the only ones that may run for now: see fault_search.py; None: all
        self._holds_back, self._held = False, set[Request]()  # those that came since hold_back()
        self.obstacle: str | None = None  # why none runs at all
        self.weight_version: int | str = 0  # of the weights that the next step is computed with
        self._wakers: dict[Callable[[], None], None] = {}  # to be called, for readers in event loops
        self._num_streamed = 0
        self._statistics = Statistics()
        self._is_closed = False

    def reset_ids(self) -> None:
        self._by_id: dict[str, Request] = {}  # whose ids are taken
        self._lock = threading.RLock()  # of _by_id; a thread may take it again, as EngineCore's

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def requests(self) -> list[Request]:
        return list(self._requests)

    # --- for any thread

    def claim(self, requests: list[Request]) -> None:
        """Takes the ids of these requests, which nobody else may have."""
        with self._lock:
            for request in requests:
                if request.id in self._by_id:
                    raise ValueError(f"request_id is {request.id!r}, which a request has that is not finished")
            self._by_id.update({request.id: request for request in requests})

    def release(self, requests: Iterable[Request]) -> None:
        """The ids of these requests are free."""
        with self._lock:
            for request in requests:
                if self._by_id.get(request.id) is request:
                    del self._by_id[request.id]

    def free_id(self) -> str:
        """The next number that no caller took as an id."""
        while True:
            request_id = str(next(self._numbers))
            if self.find(request_id) is None:
                return request_id

    def find(self, request_id: str) -> Request | None:
        """The request that has this id. TypeError: it is no string."""
        if not isinstance(request_id, str):
            raise TypeError(f"request_id is {request_id!r} but must be a string")
        with self._lock:
            return self._by_id.get(request_id)

    # --- requests come and leave

    def add(self, requests: list[Request]) -> None:
        """Queues requests that were asked for together. Those that can never be served end at once."""
        for request in requests:
            if not self._end_at_once(request):
                self._requests[request] = None
                if self._holds_back:
                    self._held.add(request)
                self._num_streamed += request.is_streamed
                request.sequences[0].siblings = request.sequences[1:]
        for request in requests:
            if request in self._requests:
                self._queue(request)
            else:
                self._send(request, request.sequences)

    def _queue(self, request: Request) -> None:
        if self._may_run(request):
            self._scheduler.queues.add_answers(request.sequences)

    def _may_run(self, request: Request) -> bool:
        return request not in self._held and (self._tried is None or request in self._tried)

    def _end_at_once(self, request: Request) -> bool:
        """Ends a request that wants no token or can never be served. Returns whether it did."""
        first = request.sequences[0]
        error, reason = first.error, "abort" if self._is_closed else "length"
        try:
            if error is None:
                self._scheduler.check_pages(first)  # once more: the pool may have shrunk since
        except OutOfBlocks as problem:
            error = problem
        if error is None and request.params.max_tokens != 0 and not self._is_closed:
            return False
        if error is not None:
            error = error.with_traceback(None)  # as without_frames(); a check's message says all, so no note
        self._end(request, "error" if error else reason, error)
        return True

    def abort(self, requests: list[Request]) -> None:
        for request in requests:
            if request not in self._requests:
                continue  # it has ended
            living = [seq for seq in request.sequences if seq.finish_reason is None]
            unforked = {child for seq in living for child in seq.siblings}
            self._end(request, "abort")
            if self._may_run(request):
                self._scheduler.forget([seq for seq in living if seq not in unforked])
            self._send(request, living)

    def fail(self, request: Request, error: BaseException) -> None:
        """The request's own error ends it. Call restart() or close() next, which sends it to the caller."""
        if not isinstance(error, Exception):  # KeyboardInterrupt, raised by a mask, say
            error = RuntimeError(f"a step was ended by {type(error).__name__}: {error}")
        self._end(request, "error", error)

    def _end(self, request: Request, reason: str, error: Exception | None = None) -> None:
        now = time.perf_counter()
        for seq in request.sequences:
            if seq.finish_reason is None:
                seq.siblings = []
                seq.finish(reason, now, error)
                self._statistics.traffic.ended[reason] += 1
        request.num_ended = len(request.sequences)

    # --- what callers get

    def process_step(self, step: Step, finished: list[Sequence]) -> None:
        """After every step: sends the callers what is new."""
        new = list(finished)
        self._statistics.count_step(step)
        for seq in finished:
            seq.request.num_ended += 1
            self._statistics.count_end(seq)
        if self._num_streamed:
            new += [
                seq for seq in (dict.fromkeys(step.receivers) if step.guesses else step.receivers)
                if seq.request.is_streamed and seq.finish_reason is None and len(seq.new_tokens) > seq.num_sent
            ]  # fmt: skip
        together: dict[Request, list[Sequence]] = {}  # answers of one request
        for seq in new:
            if len(seq.request.sequences) == 1:
                self._send(seq.request, [seq])
            else:
                together.setdefault(seq.request, []).append(seq)
        for request, sequences in together.items():
            self._send(request, sequences)

    def _send(self, request: Request, sequences: list[Sequence]) -> None:
        """Sends what is new of these, if the request is streamed; else all, if all of its sequences have ended."""
        is_finished = request.is_finished
        if is_finished:
            self.release([request])  # before the caller knows: it may use the id again at once
        if sequences and (request.is_streamed or is_finished):
            if not request.is_streamed:
                sequences = request.sequences
            wake = request.receiver.put(request.update(sequences, self.weight_version))
            request.mark_sent(sequences)
            if wake is not None:
                self._wakers[wake] = None
        if is_finished and request in self._requests:
            del self._requests[request]
            self._held.discard(request)
            self._num_streamed -= request.is_streamed
            self._statistics.num_finished += 1

    def wake_readers(self) -> None:
        """Wakes the readers in event loops which got something since the last call."""
        while self._wakers:
            self._wakers.popitem()[0]()

    # --- the engine as a whole

    def check_resize(self, num_blocks: int) -> None:
        """Raises OutOfBlocks where an unfinished request could not end in so few pages."""
        for request in self._requests:
            num_pages = request.sequences[0].most_pages(self._scheduler.manager.block_size)
            if num_pages > num_blocks:
                raise OutOfBlocks(f"num_blocks is {num_blocks} but request {request.id!r} may need {num_pages}")

    def preempt_all(self) -> None:
        """No sequence has pages then; those that may run begin again with the tokens that the host knows."""
        self.restart(None if self._tried is None else list(self._tried))

    def restart(self, tried: list[Request] | None = None) -> None:
        """After an error within a step: nothing that the host knows is lost. Unfinished sequences are computed again
        from their tokens, and callers get what they have not of those that had ended.

        tried: the only requests that may run for now; None: all may.
        """
        requests = self.requests
        self._restart_scheduler()
        for request in requests:
            ended = [seq for seq in request.sequences if seq.finish_reason is not None]
            request.num_ended = len(ended)
            self._send(request, [seq for seq in ended if not seq.is_end_sent])
        self._tried = None if tried is None else set(tried)
        for request in self._requests:
            self._queue(request)

    def _restart_scheduler(self) -> None:
        self._scheduler.restart([seq for request in self._requests for seq in request.sequences])

    def hold_back(self) -> None:
        """Requests that come from now on wait for release_held()."""
        self._holds_back = True

    def release_held(self) -> None:
        held, self._held, self._holds_back = self._held, set(), False
        for request in self.requests:
            if request in held:
                self._queue(request)

    @property
    def is_settled(self) -> bool:
        """Whether all requests have ended but those that are held back."""
        return len(self._held) == len(self._requests)

    def close(self) -> None:
        """Aborts all requests, and takes no more."""
        self._is_closed = True
        for request in self.requests:
            self._end(request, "abort")
        self.restart()

    def forget(self) -> None:
        """Drops all requests, in a child process: they are its parent's."""
        self._restart_scheduler()
        self._requests.clear()
        self._held.clear()
        self._num_streamed = 0

    # --- to look at

    def explain(self, request_id: str) -> str | None:
        """None where no unfinished request has this id."""
        request = self.find(request_id)
        if request is None:
            return None
        if self.obstacle is not None or request in self._held:
            return f"waits: the engine {self.obstacle or 'is about to pause'}"
        if not self._may_run(request):
            return "waits: the engine looks for the request that made a step fail"
        return explain(self._scheduler, request.sequences)

    def _num_waiting(self) -> int:
        num_held = sum(not self._may_run(request) for request in self.requests)
        return self._scheduler.queues.num_waiting + num_held

    def view(self) -> EngineView:
        scheduler = self._scheduler
        running, waiting = scheduler.queues.running, scheduler.queues.waiting()
        return take_view(scheduler.manager, self._statistics.traffic, running, waiting, self._num_waiting())

    def stats(self, counters: EngineCounters) -> EngineStats:
        scheduler = self._scheduler
        # A request that is aborted has no id any more.
        running = [seq for seq in scheduler.queues.running if self.find(seq.request.id) is seq.request]
        return self._statistics.stats(
            num_running=len(running),
            num_waiting=self._num_waiting(),
            num_preemptions=scheduler.queues.num_preemptions,
            counters=counters.copy(),
            pool=scheduler.manager.stats(),
        )
