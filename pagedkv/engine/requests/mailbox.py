"""Where the outputs of requests made by Engine.add_request() wait for Engine.step()."""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

from .request import Increment, Request


class Mailbox:
    """Any thread may add requests and take their news. A mailbox of one call is a plain SimpleQueue."""

    def __init__(self) -> None:
        self._news: SimpleQueue[Increment] = SimpleQueue()
        self._expected: dict[Request, None] = {}  # which have news to come; a set, whose single operations are atomic
        self._lock = threading.Lock()  # of the one who waits

    def expect(self, request: Request) -> None:
        """Its news come here, the last of them for sure."""
        self._expected[request] = None

    def expect_no_more(self, request: Request) -> None:
        self._expected.pop(request, None)

    @property
    def expects_anything(self) -> bool:
        return bool(self._expected) or not self._news.empty()

    def put(self, increment: Increment) -> None:
        self._news.put(increment)
        if increment.is_last:
            self.expect_no_more(increment.request)

    def take_all(self) -> list[Increment]:
        """All that is there, of which there is something unless nothing is expected. Who comes second waits for the
        first, because it may take the last there is."""
        with self._lock:
            if not self.expects_anything:
                return []
            news = [self._news.get()]
            try:
                while True:
                    news.append(self._news.get_nowait())
            except Empty:
                return news
