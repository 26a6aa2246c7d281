"""The processes of a server: an engine, front ends, and this one, which starts, replaces and ends them.

Signals come here, and front ends are told what to do. A process that is killed takes none along that could go on, and
leaves none behind: the engine ends with the pipe to this process, and a front end with the engine. A front end that
ends by itself is replaced; an engine that does ends the server.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
from asyncio.subprocess import Process
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import replace
from typing import Any, TypeVar

from . import children
from .front_end import DRAIN, READY, STOP, Options
from .gate import shared_counts
from .remote import Facts
from .wire import receive, to_bytes

T = TypeVar("T")
PAUSE = 1.0  # seconds before a front end is replaced: one that cannot live costs no more
PATIENCE = 10  # seconds until processes that were told to end are killed

logger = logging.getLogger(__name__)


class Ended(Exception):
    """A signal came before the server was ready."""


class Supervisor:
    """listeners: bound; the front ends listen there. options: theirs, but for the facts of the model."""

    def __init__(self, listeners: list[socket.socket], options: Options, num_front_ends: int) -> None:
        self._listeners, self._options, self._num_front_ends = listeners, options, num_front_ends
        self._counts = shared_counts(num_front_ends)
        self._processes: list[Process] = []
        self._controls: set[socket.socket] = set()  # of the front ends
        self._engine: Process
        self._num_signals = 0
        self._signalled = asyncio.Event()

    async def run(self, model: str, engine_options: dict[str, Any], ready: str) -> int:
        """The exit code. Prints `ready` when requests are taken. Raises what the engine raised instead of starting."""
        loop = asyncio.get_running_loop()
        for each in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(each, self._signal)
        end, self._lifeline = os.pipe()
        self._host, host_end = socket.socketpair()
        try:
            self._engine = await children.start("pagedkv.serve.host", end, host_end.fileno())
            self._processes.append(self._engine)
            host_end.close()
            os.close(end)
            facts = await self._unless_signalled(self._load(model, engine_options))
            self._options = replace(self._options, facts=facts)
            starts = [self._start_front_end(place) for place in range(self._num_front_ends)]
            started = await self._unless_signalled(asyncio.gather(*starts))
            print(ready, flush=True)
            await asyncio.gather(*(self._keep(place, *each) for place, each in enumerate(started)))
        except Ended:
            pass
        finally:
            await self._end()
        if self._num_signals:
            return 0
        logger.error("the engine's process has ended with %s", self._engine.returncode)
        return 1

    def _signal(self) -> None:
        self._num_signals += 1
        self._signalled.set()
        for each in self._listeners:
            each.close()
        for control in self._controls:
            with suppress(OSError):  # it has just ended
                control.send(DRAIN if self._num_signals == 1 else STOP)
        if self._num_signals == 2:
            asyncio.get_running_loop().call_later(PATIENCE, self._kill)

    async def _unless_signalled(self, work: Coroutine[Any, Any, T] | asyncio.Future[T]) -> T:
        task, signalled = asyncio.ensure_future(work), asyncio.ensure_future(self._signalled.wait())
        await asyncio.wait({task, signalled}, return_when=asyncio.FIRST_COMPLETED)
        signalled.cancel()
        if not task.done():
            task.cancel()
            raise Ended
        return task.result()

    async def _load(self, model: str, engine_options: dict[str, Any]) -> Facts:
        self._host.sendall(to_bytes((model, engine_options)))
        try:
            facts = await asyncio.to_thread(receive, self._host)
        except EOFError:
            raise ChildProcessError(f"the engine's process ended with {await self._engine.wait()}") from None
        if isinstance(facts, Exception):
            raise facts
        found: Facts = facts
        return found

    # --- front ends

    async def _start_front_end(self, place: int) -> tuple[Process, socket.socket]:
        control, control_end = socket.socketpair()
        engine, engine_end = socket.socketpair()
        with control_end, engine, engine_end:
            own = (each.fileno() for each in (control_end, engine_end, self._counts))
            descriptors = [*own, *(each.fileno() for each in self._listeners)]
            process = await children.start("pagedkv.serve.front_end", *descriptors)
            self._processes = [each for each in self._processes if each.returncode is None] + [process]
            socket.send_fds(self._host, [b"+"], [engine.fileno()])
        control.sendall(to_bytes(replace(self._options, place=place)))
        control.setblocking(False)
        self._controls.add(control)
        if await asyncio.get_running_loop().sock_recv(control, 1) != READY:
            self._forget(control)
            raise ChildProcessError(f"a front end ended with {await process.wait()}")
        return process, control

    async def _keep(self, place: int, process: Process, control: socket.socket) -> None:
        """Has a front end in this one's place, until the server ends."""
        while True:
            code = await process.wait()
            self._forget(control)
            while True:
                await asyncio.sleep(0 if self._num_signals else PAUSE)
                if self._num_signals or self._engine.returncode is not None:
                    return
                logger.error("a front end has ended with %s; another one starts", code)
                try:
                    process, control = await self._start_front_end(place)
                    break
                except OSError as error:  # it has ended at once, or the engine just now
                    logger.error("no front end: %s", error)

    def _forget(self, control: socket.socket) -> None:
        self._controls.discard(control)
        control.close()

    # --- the end

    async def _end(self) -> None:
        """Closes what keeps the others alive, and waits until they have ended."""
        for each in self._listeners:
            each.close()
        os.close(self._lifeline)
        self._host.close()
        self._counts.close()
        for control in list(self._controls):
            self._forget(control)
        asyncio.get_running_loop().call_later(PATIENCE, self._kill)
        for process in self._processes:
            await process.wait()

    def _kill(self) -> None:
        for process in self._processes:
            if process.returncode is None:
                process.kill()
