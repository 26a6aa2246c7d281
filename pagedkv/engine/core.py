"""EngineCore: the one thread that plans steps, launches them and collects their tokens.

Callers never step the engine. They put actions into its inbox (add these requests, abort that one, save the cache),
and find what is new of their requests in their mailboxes. So an interrupt in a caller's thread cannot lose a step, an
error of a request reaches its own caller alone, and nothing but this thread touches scheduler and pages.
"""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from functools import partial

from pagedkv.ops import GroupError
from pagedkv.parallel.watch import RankError

from .holds import Holds
from .outputs import EngineCounters
from .requests.book import RequestBook
from .requests.fault_search import FaultSearch
from .requests.request import Mailbox, Request
from .runner.model_runner import ModelRunner
from .runner.pipeline import Guesser, Pipeline
from .scheduling.scheduler import Scheduler
from .thread import Action

logger = logging.getLogger(__name__)


class EngineCore(Holds):
    """A runner, a scheduler, the unfinished requests, and the thread that works on them while there are any.

    Args:
        owner: the name of the engine's class, for messages
    """

    def __init__(self, runner: ModelRunner, scheduler: Scheduler, owner: str, guesser: Guesser | None) -> None:
        self.runner: ModelRunner | None = runner  # None: closed
        self.scheduler, self.counters = scheduler, EngineCounters()
        self.book = RequestBook(scheduler)
        self._owner, self._guesser = owner, guesser
        self.has_head: bool = getattr(runner.model, "has_head", True)  # without one it makes vectors alone
        self.holds = set()
        self._faults: FaultSearch | None = None  # after a step that failed, until its request is found
        self._pipeline = self._new_pipeline(runner)
        self._step_start: float | None = None  # of the step in work, or of an action; None: the thread is idle
        self._reset_threads()
        cores.add(self)
        self._start()
        if runner.team is not None:
            runner.team.listen(partial(_lose, weakref.ref(self)))

    def _reset_threads(self) -> None:
        super()._reset_threads()
        self.mailbox = Mailbox()  # of requests made by Engine.add_request()
        self._is_closed = self.runner is None
        self.book.reset_ids()

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
        self._pipeline = self._new_pipeline(self.runner)
        self.book.preempt_all()

    # --- the thread

    def _after_fork(self) -> None:
        """The requests of before are the parent's."""
        self._faults = None
        self.book.forget()
        self._restart()

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
        if self.runner is not None and isinstance(error, GroupError):  # of a kernel that was waited for
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
            self._pipeline = self._new_pipeline(self.runner)
            group = None if self._faults is None else self._faults.next_group()
            if group is None:
                self._faults = None
            self.book.restart(group)

    def _new_pipeline(self, runner: ModelRunner) -> Pipeline:
        """Nothing is on its way in it: steps of one before are forgotten."""
        runner.sampler.forget()
        if self._guesser is not None:
            self._guesser.forget()
        return Pipeline(runner, self.scheduler, self.counters, self.book.process_step, self._guesser)

    def _close(self) -> None:
        with self._lock:  # what comes later is refused, and what came before is done now
            self._is_closed = True
        if self.runner is None:
            return  # several threads close it at once
        self.runner.close()
        self.runner = self._guesser = None
        self.book.close()
        self.take_messages()
        self._end_waits(list(self._waits), self._closed())
        del self._pipeline

    def die(self, error: BaseException) -> None:
        """After an error that no step can be blamed for: all that wait get it, and nothing is served any more."""
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
    """Tells the engine's thread, which may be idle, that a rank has failed."""

    def fail() -> None:
        core = ref()
        if core is not None and core._death is None:
            raise error

    core = ref()
    if core is not None:
        core._post(fail)


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


os.register_at_fork(after_in_child=_forget_threads)
