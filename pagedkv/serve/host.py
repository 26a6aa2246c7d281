"""EngineHost: an engine in a process of its own, and the sockets of its front ends.

    python -m pagedkv.serve.host LIFELINE CONTROL

are descriptors: of a pipe, with whose other end this process ends, and of a socket. From there come (model, options),
once, and go Facts or the error; then come the sockets of front ends, one with each byte.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from pagedkv.engine.control import call_later
from pagedkv.engine.engine import Engine
from pagedkv.engine.outputs import portable
from pagedkv.engine.requests.prompts import takes_long
from pagedkv.engine.requests.request import Request, Update

from .children import end_with_parent
from .remote import BEAT, Facts
from .wire import Decoder, pack, receive, send, to_bytes

logger = logging.getLogger(__name__)
CHUNK = 1 << 18  # bytes to read at a time


class Connection:
    """That of a front end: its requests, and the news of them. It is the receiver of their updates (see Receiver).

    The engine's thread writes to the socket by itself, once for each step, while the device computes the next one: no
    other thread has to get the GIL for it. What the socket does not take at once the event loop sends.
    """

    def __init__(self, host: EngineHost, connected: socket.socket) -> None:
        connected.setblocking(False)
        self._host, self._socket, self._loop = host, connected, asyncio.get_running_loop()
        self._requests: dict[int, Request | None] = {}  # by number; None: it is being prepared
        self._decoder = Decoder()
        self._news: list[tuple[Any, ...]] = []  # for the engine's thread
        self._lock = threading.Lock()
        self._unsent = bytearray()
        self._loop.add_reader(connected, self._read)

    # --- in the engine's thread

    def put(self, update: Update) -> Callable[[], None]:
        if update.is_last:
            self._requests.pop(update.key, None)
        self._news.append(pack(update))
        return self._send_news

    def _send_news(self) -> None:
        news, self._news = self._news, []
        self.send("news", news)

    # --- in any thread

    def send(self, *message: Any) -> None:
        data = to_bytes(message)
        with self._lock:
            sent = 0 if self._unsent else self._try(data)
            if sent < len(data):
                if not self._unsent:
                    self._loop.call_soon_threadsafe(self._loop.add_writer, self._socket, self._send_rest)
                self._unsent += memoryview(data)[sent:]

    def _try(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # it has gone, which _read() finds, too
            return len(data)

    # --- in the event loop

    def _send_rest(self) -> None:
        with self._lock:
            del self._unsent[: self._try(self._unsent)]
            if not self._unsent:
                self._loop.remove_writer(self._socket)

    def _read(self) -> None:
        try:
            data = self._socket.recv(CHUNK)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self._leave_all()
        for kind, number, *values in self._decoder.feed(data):
            if kind == "generate":
                self._generate(number, *values)
            elif kind == "leave":
                self._leave(number)
            elif kind == "abort":
                self.send("done", number, self._host.engine.abort(*values))
            elif kind == "control":
                self._control(number, *values)
            else:
                self._ask(number, getattr(self._host.engine._book, kind), *values)

    def _generate(self, number: int, prompt: Any, params: Any, options: dict[str, Any]) -> None:
        self._requests[number] = None
        prepare = partial(self._host.engine._prepare, prompt, params, self, **options)
        if takes_long(prompt, params, options["lora_request"]):
            future = self._loop.run_in_executor(None, prepare)
            future.add_done_callback(lambda done: self._submit(number, done.result))
        else:
            self._submit(number, prepare)

    def _submit(self, number: int, prepared: Callable[[], Request]) -> None:
        try:
            request = prepared()
            if number in self._requests:  # else its reader has left
                request.key, self._requests[number] = number, request
                self._host.engine._core.submit([request])
        except Exception as error:
            self._requests.pop(number, None)
            self.send("raised", number, portable(error))

    def _control(self, number: int, name: str, args: Any, options: dict[str, Any]) -> None:
        try:
            future = call_later(self._host.engine, name, tuple(args), options)
        except ValueError as error:  # there is no such call
            self.send("failed", number, error)
        else:
            future.add_done_callback(partial(self._answer, number))

    def _answer(self, number: int, future: Any) -> None:
        error = future.exception()
        self.send(*(("done", number, future.result()) if error is None else ("failed", number, portable(error))))

    def _ask(self, number: int, action: Callable[..., Any], *values: Any) -> None:
        """The engine's thread does it between two steps, and sends what it gets."""
        try:
            self._host.engine._core.ask(partial(action, *values)).add_done_callback(partial(self._answer, number))
        except RuntimeError as error:  # it is closed
            self.send("failed", number, error)

    def _leave(self, *numbers: int) -> None:
        requests = [request for number in numbers if (request := self._requests.pop(number, None))]
        self._host.engine._core.abort(requests)

    def _leave_all(self) -> None:
        self._loop.remove_reader(self._socket)
        self._loop.remove_writer(self._socket)
        self._host.connections.discard(self)
        self._leave(*self._requests)
        self._socket.close()


class EngineHost:
    def __init__(self, engine: Engine, control: socket.socket) -> None:
        self.engine, self._control = engine, control
        self.connections: set[Connection] = set()

    async def run(self) -> None:
        """Until the engine can serve nothing any more."""
        self._control.setblocking(False)
        asyncio.get_running_loop().add_reader(self._control, self._accept)
        while True:
            seconds = self.engine.health()
            stats = self.engine.stats()
            for each in self.connections:
                each.send("beat", seconds, stats)
            await asyncio.sleep(BEAT)

    def _accept(self) -> None:
        _, descriptors, _, _ = socket.recv_fds(self._control, 1, 1)
        if not descriptors:  # the parent has gone: see LIFELINE
            asyncio.get_running_loop().remove_reader(self._control)
        for each in descriptors:
            connection = Connection(self, socket.socket(fileno=each))
            self.connections.add(connection)
            connection.send("beat", self.engine.health(), self.engine.stats())


def main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):  # to all processes of a group: the parent says when to end
        signal.signal(each, signal.SIG_IGN)
    lifeline, control = int(sys.argv[1]), socket.socket(fileno=int(sys.argv[2]))
    end_with_parent(lifeline)
    model, options = receive(control)
    try:
        engine = Engine(model, **options)
    except Exception as error:
        send(control, portable(error))
        return
    config = engine.config
    send(control, Facts(engine.folder, engine.default_params, engine.max_model_len, config.vocab_size))
    gc.collect()
    gc.freeze()  # what is there now stays: no collection need look at it
    try:
        asyncio.run(EngineHost(engine, control).run())
    except RuntimeError as error:
        logger.critical("the engine ends: %s", error)
        os._exit(1)


if __name__ == "__main__":
    main()
