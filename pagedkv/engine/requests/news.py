"""News: what a reader in an event loop has not taken yet of a request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from .request import Update


class News:
    """However many steps it is of, it is one Update: a slow reader costs no more memory than its tokens. All calls are
    of one event loop. (asyncio.Queue takes twice the time.)"""

    __slots__ = ("_error", "_loop", "_update", "_waiter", "has_ended")

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._update: Update | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self.has_ended = False  # nothing more comes

    def put(self, update: Update) -> Callable[[], None] | None:
        self.has_ended = update.is_last
        self._update = update if self._update is None else _together(self._update, update)
        self._wake()
        return None

    def fail(self, error: Exception) -> None:
        """get() raises the error once all before it has been taken."""
        self.has_ended, self._error = True, error
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            if not self._waiter.done():
                self._waiter.set_result(None)
            self._waiter = None

    async def get(self) -> Update:
        """All that is new, once there is anything."""
        while self._update is None:
            if self._error is not None:
                raise self._error
            self._waiter = self._loop.create_future()
            await self._waiter
        update, self._update = self._update, None
        return update


def _together(old: Update, new: Update) -> Update:
    """Two updates of a request, of one step and of a later one, as one."""
    before = {each.index: each for each in (old, *old.others)}
    for each in (new, *new.others):
        if was := before.pop(each.index, None):
            each.token_ids = was.token_ids + each.token_ids
            each.text = each.text if was.text is None else was.text + (each.text or "")
            each.logprobs = each.logprobs if was.logprobs is None else was.logprobs + (each.logprobs or [])
    new.others = (*new.others, *before.values())
    return new
