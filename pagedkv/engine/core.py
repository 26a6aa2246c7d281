"""EngineCore: the one thread that plans steps, launches them and collects their tokens.

Callers never step the engine. They put actions into its inbox (add these requests, abort that one, save the cache),
and find what is new of their requests in their mailboxes. So an interrupt in a caller's thread cannot lose a step, an
error of a request reaches its own caller alone, and nothing but this thread touches scheduler and pages.
"""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

from pagedkv.ops import GroupError
from pagedkv.parallel.watch import RankError

from .holds import Holds
from .outputs import EngineCounters
from .requests.book import RequestBook
from .requests.fault_search import FaultSearch
from .requests.request import Request
from .runner.model_runner import ModelRunner
from .runner.pipeline import Guesser, Pipeline
from .scheduling.scheduler import Scheduler

T = TypeVar("T")
Action = Callable[[], Any]
Inbox = SimpleQueue[Action | None]  # None: the thread is to end

logger = logging.getLogger(__name__)


class EngineCore(Holds):
    """A runner, a scheduler, the unfinished requests, and the thread that works on them while there are any.

    Args:
        owner: the name of the engine's class, for messages
    """

    def __init__(
        self, runner: ModelRunner, scheduler: Scheduler, owner: str, guesser: Guesser | None = None
    ) -> None:
        self.runner: ModelRunner | None = runner  # None: closed
        self.scheduler, self.counters = scheduler, EngineCounters()
        self.book = RequestBook(scheduler)
        self._owner, self._guesser = owner, guesser
        self.holds = set()
        self._faults: FaultSearch | None = None  # after a step that failed, until its request is found
        self._pipeline = self._new_pipeline(runner)
        self._is_stopping = False
        self._death: BaseException | None = None  # the error that ended the thread
        self._step_start: float | None = None  # of the step in work, or of an action; None: the thread is idle
        self._reset_threads()
        cores.add(self)
        self._start()
        if runner.team is not None:
            runner.team.listen(partial(_lose, weakref.ref(self)))

    def _reset_threads(self) -> None:
        """What belongs to the threads of this process: a fork's child has none of its parent's."""
        # Guards what may be put into the inbox. The garbage collector may close a stream, and so abort its request, in
        # a thread that holds the lock: that thread takes it again.
        self._lock = threading.RLock()
        self._inbox: Inbox = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = self.runner is None
        self._waits = []

    # --- for any thread

    def submit(self, requests: list[Request]) -> None:
        """Queues requests that were asked for together. ValueError: one has an id that an unfinished request has."""
        try:
            self.book.claim(requests)
            if not self._post(partial(self.book.add, requests)):
                raise self._closed()
        except BaseException:  # an interrupt, too
            self.abort(requests)
            raise

    def abort(self, requests: list[Request]) -> bool:
        """Has these requests ended between two steps; their ids are free at once. Whether any of them had not ended."""
        try:
            return self._abort(requests)
        except KeyboardInterrupt:  # half of it may be done, and the whole may be done twice
            self._abort(requests)
            raise

    def _abort(self, requests: list[Request]) -> bool:
        living = [request for request in requests if self.book.find(request.id) is request]
        if living:
            self._post(partial(self.book.abort, living))
            self.book.release(living)
        return bool(living)

    def call(self, action: Callable[[], T]) -> T:
        """Runs the action between two steps, and returns its result or raises its error."""
        return self.ask(action).result()

    def ask(self, action: Callable[[], T]) -> Future[T]:
        """As call(), for who does not wait here: the result to come. One that is cancelled before is not made."""
        future = self._ask(action)
        if future is None:
            raise self._closed()
        return future

    def _ask(self, action: Callable[[], T]) -> Future[T] | None:
        """The result to come; None once the core is closed."""
        self.refuse_own_thread()
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)

        return future if self._post(run) else None

    def refuse_own_thread(self) -> None:
        """Raises for a caller that would wait for the end of the step which it is called from."""
        if threading.current_thread() is self._thread:
            raise RuntimeError("called from within a step of the engine, by a mask: it would wait for itself")

    def check_health(self) -> float | None:
        """The seconds that the step in work has taken so far; None: there is none. Raises RuntimeError where nothing
        can be served any more."""
        if self._is_closed:
            raise self._closed()
        start = self._step_start
        return None if start is None else time.perf_counter() - start

    def close(self) -> None:
        """Aborts all requests, ends the thread and lets go of the runner. Later requests raise RuntimeError."""
        closed = self._ask(self._close)
        if closed is not None:
            closed.result()
            self._join()

    def stop(self) -> None:
        """Ends the thread after the step that it works on, at the end of the process. Later requests raise."""
        with self._lock:
            self._is_closed = self._is_stopping = True
            self._inbox.put(None)
        self._join()

    def _join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def _post(self, action: Action) -> bool:
        """Puts the action into the inbox. False, and nothing is done, once the core is closed."""
        with self._lock:
            if self._is_closed:
                return False
            if self._thread is None:
                self._start_after_fork()
            self._inbox.put(action)
        return True

    def _closed(self) -> RuntimeError:
        error = RuntimeError(f"this {self._owner} is closed")
        error.__cause__ = self._death
        return error

    # --- for actions

    def drain(self) -> None:
        """Waits for all steps on their way."""
        try:
            self._pipeline.drain()
        except BaseException as error:
            self._recover(error)

    def preempt_all(self) -> None:
        """After drain(): no sequence has pages, and all begin again once steps are made."""
        assert self.runner is not None, "it is not closed"
        self._forget(self.runner)
        self._pipeline = self._new_pipeline(self.runner)
        self.book.preempt_all()

    # --- the thread

    def _start(self) -> None:
        # Neither the thread, while it waits, nor the finalizer keeps the core: an engine that nobody has any more goes.
        weakref.finalize(self, self._inbox.put, None).atexit = False
        self._thread = threading.Thread(
            target=_serve, args=(weakref.ref(self), self._inbox), name="pagedkv", daemon=True
        )
        self._thread.start()

    def _start_after_fork(self) -> None:
        """In a child process. The requests of before are its parent's."""
        self._faults = None
        self.book.forget()
        self._restart()
        self._start()

    def work(self, action: Action) -> bool:
        """Does the action, and steps until no request is left. Returns whether there may be more to do later."""
        self._step_start = time.perf_counter()
        self._guard(action)
        self._guard(self._settle)
        while self.has_work and not self._is_stopping:
            self.step()
            self._guard(self._settle)
            self._step_start = time.perf_counter()
        self.book.wake_readers()
        self._step_start = None
        return not (self._is_closed or self._is_stopping)

    @property
    def has_work(self) -> bool:
        is_held = self.runner is None or bool(self.holds)
        return not is_held and (self._pipeline.has_work or self._faults is not None)

    def step(self) -> None:
        """Does what is in the inbox, launches a step, and collects the tokens of the one before."""
        self._guard(self.take_messages)
        self._guard(self._settle)
        if self.has_work:
            self._guard(self._step)

    def _guard(self, action: Action) -> None:
        try:
            action()
        except BaseException as error:
            self._recover(error)

    def take_messages(self) -> None:
        """Does what is in the inbox."""
        while not self._inbox.empty():
            action = self._inbox.get()
            if action is not None:
                action()

    def _step(self) -> None:
        """Readers in event loops are woken while a GPU computes. On the CPU, where a launch computes, before it."""
        assert self.runner is not None, "it has work"
        if not self.runner.num_behind:
            self.book.wake_readers()
        self._pipeline.launch()
        self.book.wake_readers()
        self._pipeline.collect()
        if self._faults is not None and self._faults.has_passed():
            self._restart()

    def _recover(self, error: BaseException) -> None:
        """After an error in a step. The steps on their way are lost, but nothing that the host knows. What ran is tried
        again in smaller and smaller groups; a request that fails alone, and no other, gets the error."""
        if self.runner is not None and isinstance(error, GroupError):  # of a kernel: who waited for it got it
            assert self.runner.team is not None, "there are other ranks"
            error = self.runner.team.blame(error)
        if self.runner is None or isinstance(error, RankError):
            raise error
        in_flight = [seq for step in self._pipeline.in_flight for seq in step.receivers]
        running = dict.fromkeys(seq.request for seq in [*self.scheduler.queues.running, *in_flight])
        self._faults = self._faults or FaultSearch()
        culprit = self._faults.find_culprit(list(running) or self.book.requests)
        if culprit is None:
            logger.warning("a step failed; its %d requests are tried again", len(running), exc_info=error)
        else:
            logger.error("request %s failed: %s: %s", culprit.id, type(error).__name__, error)
            self.book.fail(culprit, error)
        self._restart()

    def _restart(self) -> None:
        """Forgets the steps on their way, and queues the requests that may run: all, or those of the fault search."""
        if self.runner is not None:
            self._forget(self.runner)
            self._pipeline = self._new_pipeline(self.runner)
            group = None if self._faults is None else self._faults.next_group()
            if group is None:
                self._faults = None
            self.book.restart(group)

    def _forget(self, runner: ModelRunner) -> None:
        runner.sampler.forget()
        if self._guesser is not None:
            self._guesser.forget()

    def _new_pipeline(self, runner: ModelRunner) -> Pipeline:
        return Pipeline(runner, self.scheduler, self.counters, self.book.process_step, self._guesser)

    def _close(self) -> None:
        with self._lock:  # what comes later is refused, and what came before is done now
            self._is_closed = True
        assert self.runner is not None, "it is closed once"
        self.runner.close()
        self.runner = self._guesser = None
        self.book.close()
        self.take_messages()
        self._end_waits(list(self._waits), self._closed())
        del self._pipeline

    def die(self, error: BaseException) -> None:
        """After an error that no step can be blamed for: whoever waits gets it, and nothing is served any more."""
        with self._lock:
            self._is_closed, self._death = True, error
        logger.critical("this %s can serve nothing any more", self._owner, exc_info=error)
        self.take_messages()  # requests that have just come wait, too
        for request in self.book.requests:
            self.book.fail(request, error)
        self.book.close()
        self._end_waits(list(self._waits), self._closed())
        self.book.wake_readers()
        if self.runner is not None:
            self.runner.close()


def _lose(ref: weakref.ref[EngineCore], error: BaseException) -> None:
    """A rank has failed, perhaps while the engine is idle: its thread is to know."""

    def fail() -> None:
        core = ref()
        if core is not None and core._death is None:
            raise error

    core = ref()
    if core is not None:
        core._post(fail)


def _serve(ref: weakref.ref[EngineCore], inbox: Inbox) -> None:
    """The thread. While it waits, it keeps nothing alive."""
    while (action := inbox.get()) is not None:
        core = ref()
        if core is None:
            return
        try:
            if not core.work(action):
                return
        except RankError as error:  # of which the log has said all
            core.die(error)
            return
        except BaseException as error:
            core.die(error)
            raise
        del core, action


cores: weakref.WeakSet[EngineCore] = weakref.WeakSet()  # of this process


@atexit.register
def _stop_all() -> None:
    """Before the interpreter goes: a thread in the middle of a step would compute with what is being freed."""
    for core in list(cores):
        core.stop()
        if core.runner is not None:
            core.runner.close()


def _forget_threads() -> None:
    for core in list(cores):
        core._reset_threads()
        core.book.reset_lock()


os.register_at_fork(after_in_child=_forget_threads)
