"""Holds: why an engine makes no steps for now, and the callers that wait until it makes none."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from concurrent.futures import Future
from typing import Literal, NamedTuple

from .requests.book import RequestBook
from .thread import ActionThread

PauseMode = Literal["keep", "wait", "abort"]
OBSTACLES = {"pause": "paused", "sleep": "asleep", "update": "taking new weights"}  # by reasons to hold


class Wait(NamedTuple):
    """Of a caller, until no step is made."""

    reason: str
    mode: PauseMode
    then: Callable[[], None]
    done: Future[None]


class Holds(ActionThread):
    """That part of EngineCore. Any thread may call hold(), actions the rest."""

    book: RequestBook
    holds: set[str]  # reasons

    @abstractmethod
    def drain(self) -> None: ...

    def _reset_threads(self) -> None:
        super()._reset_threads()
        self._waits: list[Wait] = []

    def hold(self, reason: str, mode: PauseMode, then: Callable[[], None] = lambda: None) -> None:
        """No step is made until release(). Returns when that is so, all tokens have been collected, and then() is done,
        an action. A caller that is interrupted waits no more, and what has not come about by then does not.

        mode: requests that are there "keep" what they have and go on later, "wait": go on until they have ended, or
        "abort". Those that come later wait. Where no step is made already, "wait" is as "keep".
        """
        wait = Wait(reason, mode, then, Future())

        def begin() -> None:
            if mode == "abort":
                self.book.abort(self.book.requests)
            elif mode == "wait":
                self.book.hold_back()
            self._waits.append(wait)

        def withdraw() -> None:
            if wait in self._waits:
                self._waits.remove(wait)
                self._release_held()

        self.refuse_own_thread()
        try:
            if not self._post(begin):
                raise self._closed()
            wait.done.result()
        except BaseException:
            self._post(withdraw)
            raise

    def release(self, reason: str) -> None:
        """Ends the hold for this reason, and the waits for it."""
        self.holds.discard(reason)
        self._end_waits([wait for wait in self._waits if wait.reason == reason])
        self._show_holds()
        self._release_held()

    def _release_held(self) -> None:
        if not self.holds and not self._waits:
            self.book.release_held()

    def add_hold(self, reason: str) -> None:
        self.drain()
        self.holds.add(reason)
        self._show_holds()

    def _show_holds(self) -> None:
        self.book.obstacle = " and ".join(f"is {OBSTACLES[reason]}" for reason in sorted(self.holds)) or None

    def _settle(self) -> None:
        """Begins the holds that callers wait for, where no request stands in the way any more."""
        for wait in list(self._waits):
            if wait in self._waits and (wait.mode != "wait" or self.holds or self.book.is_settled):
                self.add_hold(wait.reason)
                self._waits.remove(wait)
                try:
                    wait.then()
                except BaseException as error:
                    wait.done.set_exception(error)
                else:
                    wait.done.set_result(None)

    def _end_waits(self, waits: list[Wait], error: BaseException | None = None) -> None:
        for wait in waits:
            self._waits.remove(wait)
            if error is None:
                wait.done.set_result(None)
            else:
                wait.done.set_exception(error)
