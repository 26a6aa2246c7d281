"""Many threads, one engine: each waits for its own outputs, and one of the waiting threads steps the engine for all.

The engine needs no thread of its own, and no thread is woken for nothing: outputs go to the mailbox of the caller that
asked for them. The thread that steps hands over to the next one as soon as it has an output itself, so a caller that is
slow to take its outputs delays no other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Mailbox = SimpleQueue[Any]  # where a caller gets its outputs
WAKE = object()  # put into the mailbox of a caller whose turn has come
Action = Callable[[], None]


def nothing() -> None: ...


class Turns:
    """Whose turn it is to step the engine.

    Args:
        step: makes a step, and calls the function that it is given while a device computes; the caller whose turn it
            is calls it until it has an output
        settle: does what is to be done between two steps; is_unsettled() says whether there is any of it
    """

    def __init__(self, step: Callable[[Action], None], settle: Action, is_unsettled: Callable[[], bool]) -> None:
        self._step, self._settle, self._is_unsettled = step, settle, is_unsettled
        self._lock = threading.RLock()  # a thread may take it again, as RequestBook's
        self._owner: Mailbox | None = None  # whose turn it is
        self._thread: int | None = None  # that steps the engine, or settles
        self._waiting: list[Mailbox] = []

    def receive(self, mailbox: Mailbox, meanwhile: Action = nothing) -> Any:
        """The next item for this mailbox. Waits for it, and steps the engine unless another caller does.

        `meanwhile` is called before any wait, whether for an own step or for another caller's.

        An error in a step is raised in the caller that made the step; the next caller goes on after it.
        """
        try:
            while True:
                item = self._next(mailbox, meanwhile)
                if item is not WAKE:
                    return item
        finally:  # an error or an interrupt, too
            try:
                self._leave(mailbox)
            except KeyboardInterrupt:  # as in _run_alone
                self._leave(mailbox)
                raise
            self.settle()  # what arrived after the last step, while it was still this caller's turn

    def receive_all(self, mailbox: Mailbox, meanwhile: Action = nothing) -> list[Any]:
        """The same, and all other items that are there by then."""
        items = [self.receive(mailbox, meanwhile)]
        while not mailbox.empty():
            item = mailbox.get()
            if item is not WAKE:
                items.append(item)
        return items

    def try_step(self) -> None:
        """Makes one step, unless another caller is making one."""
        self._run_alone(lambda: self._step(nothing))
        self.settle()

    def settle(self) -> None:
        """Settles now if no caller steps the engine, else at the end of the step that is being made."""
        while self._is_unsettled() and self._run_alone(self._settle):
            pass

    def _run_alone(self, action: Action) -> bool:
        """Runs the action if it is nobody's turn. Returns whether it did."""
        nobody: Mailbox = SimpleQueue()
        try:
            with self._lock:
                if self._owner is not None:
                    return False
                self._owner, self._thread = nobody, threading.get_ident()
            action()
        finally:
            try:
                self._leave(nobody)
            except KeyboardInterrupt:  # on its first line, say: without a new turn all would wait for ever
                self._leave(nobody)
                raise
        return True

    def refuse_within_step(self) -> None:
        """Raises for a caller that would wait for the end of the step which it is called from."""
        if self._thread == threading.get_ident():
            raise RuntimeError("called from within a step of the engine: by a mask, or by a signal's handler")

    def _next(self, mailbox: Mailbox, meanwhile: Action) -> Any:
        self.refuse_within_step()
        with self._lock:
            if self._owner is None:
                self._owner = mailbox
            elif self._owner is not mailbox and mailbox not in self._waiting:
                self._waiting.append(mailbox)
            is_mine = self._owner is mailbox
        if is_mine:
            self._thread = threading.get_ident()
            while mailbox.empty():
                self._step(meanwhile)
            self._thread = None
        else:
            meanwhile()
        return mailbox.get()

    def _leave(self, mailbox: Mailbox) -> None:
        with self._lock:
            if mailbox in self._waiting:
                self._waiting.remove(mailbox)
            if self._owner is mailbox:
                self._thread = None
                self._owner = self._waiting.pop(0) if self._waiting else None
                if self._owner is not None:
                    self._owner.put(WAKE)


class Errands:
    """Actions of any thread that are to run between two steps."""

    def __init__(self) -> None:
        self._waiting: deque[tuple[Callable[[], Any], Future[Any]]] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, action: Callable[[], T]) -> Future[T]:
        """The future gets what the action returns or raises."""
        future: Future[T] = Future()
        self._waiting.append((action, future))
        return future

    def run(self) -> None:
        """Runs all that are there."""
        while self._waiting:
            action, future = self._waiting.popleft()
            try:
                future.set_result(action())
            except BaseException as error:
                future.set_exception(error)
