"""Where updates wait for Engine.step()."""

from __future__ import annotations

import threading
from queue import SimpleQueue
from typing import cast

from ..outputs import RequestOutput
from .request import Request, Update


class Mailbox:
    """Where updates of requests made by add_request() wait for step(). Any thread may add requests and receive."""

    def __init__(self) -> None:
        self._updates: SimpleQueue[Update] = SimpleQueue()
        # By Request.key; single operations of a dict are atomic.
        self._requests: dict[int, Request] = {}
        self._expected: dict[int, None] = {}  # a set: which have updates to come
        self._lock = threading.Lock()  # of the one who waits

    def expect(self, request: Request) -> None:
        """Its updates come here, the last of them for sure."""
        self._requests[request.key], self._expected[request.key] = request, None

    def expect_no_more(self, key: int) -> None:
        self._expected.pop(key, None)
        self._requests.pop(key, None)

    @property
    def expects_anything(self) -> bool:
        return bool(self._expected) or not self._updates.empty()

    def put(self, update: Update) -> None:
        self._updates.put(update)
        if update.is_last:  # nobody waits for it, even if an interrupt ends the receive() that has it
            self._expected.pop(update.key, None)

    def receive(self) -> list[RequestOutput]:
        """The outputs of all updates that are there, of which there is one at least unless nothing is expected. Who
        comes second waits for the first, because it may take the last there is."""
        with self._lock:
            outputs: list[RequestOutput] = []
            while not outputs and self.expects_anything:
                self._receive(self._updates.get(), outputs)
                while not self._updates.empty():
                    self._receive(self._updates.get(), outputs)
            return outputs

    def _receive(self, update: Update, outputs: list[RequestOutput]) -> None:
        request = self._requests.get(update.key)
        if update.is_last:  # put() may not have come to it yet, and nothing would follow
            self.expect_no_more(update.key)
        if request is not None:  # else add_request() was interrupted: nobody knows of the request
            outputs.append(cast(RequestOutput, request.output(update)))
