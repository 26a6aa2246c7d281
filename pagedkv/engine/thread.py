"""The thread of an engine: it does actions, one after the other, and keeps nothing alive while it waits for one."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from pagedkv.parallel.watch import RankError

T = TypeVar("T")
Action = Callable[[], Any]
Inbox = SimpleQueue[Action | None]  # None: the thread is to end


class ActionThread(ABC):
    """That part of EngineCore: its inbox, the thread, and what any thread may ask of it."""

    _owner: str  # for messages
    _is_stopping = False
    _death: BaseException | None = None  # the error that ended the thread

    @abstractmethod
    def work(self, action: Action) -> bool:
        """Does the action, and what follows from it. Returns whether there may be more to do later."""

    @abstractmethod
    def die(self, error: BaseException) -> None:
        """After an error of work(): nothing is done any more."""

    @abstractmethod
    def _after_fork(self) -> None:
        """In a child process, before its first action."""

    def _reset_threads(self) -> None:
        """What belongs to the threads of this process: a fork's child has none of its parent's."""
        # Guards what may be put into the inbox. The garbage collector may close a stream, and so abort its request, in
        # a thread that holds the lock: that thread takes it again.
        self._lock = threading.RLock()
        self._inbox: Inbox = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def call(self, action: Callable[[], T]) -> T:
        """Runs the action between two steps, and returns its result or raises its error."""
        return self.ask(action).result()

    def ask(self, action: Callable[[], T]) -> Future[T]:
        """As call(), for a caller that does not wait. An action is not run if its future is cancelled before."""
        future = self._ask(action)
        if future is None:
            raise self._closed()
        return future

    def _ask(self, action: Callable[[], T]) -> Future[T] | None:
        """The future of the result; None once it is closed."""
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
        """Puts the action into the inbox. False, and nothing is done, once it is closed."""
        with self._lock:
            if self._is_closed:
                return False
            if self._thread is None:
                self._after_fork()
                self._start()
            self._inbox.put(action)
        return True

    def _closed(self) -> RuntimeError:
        error = RuntimeError(f"this {self._owner} is closed")
        error.__cause__ = self._death
        return error

    def _start(self) -> None:
        # Neither the waiting thread nor the finalizer keeps this object: an engine that nobody has any more goes.
        weakref.finalize(self, self._inbox.put, None).atexit = False
        args = weakref.ref(self), self._inbox
        self._thread = threading.Thread(target=_serve, args=args, name="pagedkv", daemon=True)
        self._thread.start()


def _serve(ref: weakref.ref[ActionThread], inbox: Inbox) -> None:
    """The thread. While it waits, it keeps nothing alive."""
    while (action := inbox.get()) is not None:
        owner = ref()
        if owner is None:
            return
        try:
            if not owner.work(action):
                return
        except RankError as error:  # of which the log has said all
            owner.die(error)
            return
        except BaseException as error:
            owner.die(error)
            raise
        del owner, action
