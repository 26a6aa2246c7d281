"""A server from its first connection to its end: the first signal drains it, a second one stops it."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import socket
import stat
import termios
from types import FrameType
from typing import Any

import uvicorn

from .http1 import Http1
from .server import Server

BACKLOG = 2048  # connections that nobody has accepted yet
NO_ADDRESS = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)  # ::1 is in /etc/hosts where IPv6 is off, too
GOODBYE = 0.5  # seconds for a client's part in the end of a connection, when the server ends
KEEP_ALIVE = 75  # seconds of a connection without a request: longer than those of proxies, which else send into its end


def bind(host: str, port: int) -> list[socket.socket]:
    """At every address of the name that this machine has, with one port. OSError: an address is in use, or there is
    none."""
    bound, missing = list[socket.socket](), list[OSError]()
    try:
        for *how, _, address in dict.fromkeys(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)):
            try:
                bound.append(_bind(how, (address[0], port, *address[2:])))
                port = bound[0].getsockname()[1]
            except OSError as error:
                if error.errno not in NO_ADDRESS:
                    raise
                missing.append(error)
        if not bound:
            raise missing[0]
    except BaseException:
        for each in bound:
            each.close()
        raise
    return bound


def _bind(how: list[Any], address: Any) -> socket.socket:
    one = socket.socket(*how)
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind(address)
    except BaseException:
        one.close()
        raise
    return one


def bind_path(path: str | os.PathLike[str]) -> socket.socket:
    """A Unix socket, for all users. One that nobody listens at is taken over. OSError: the path is in use."""
    bound = socket.socket(socket.AF_UNIX)
    try:
        if os.path.exists(path) and stat.S_ISSOCK(os.stat(path).st_mode):
            with socket.socket(socket.AF_UNIX) as other:
                if other.connect_ex(os.fspath(path)) == 0:
                    raise OSError(errno.EADDRINUSE, f"{os.fspath(path)}: somebody listens there")
            os.unlink(path)
        bound.bind(os.fspath(path))
        os.chmod(path, 0o666)
    except BaseException:
        bound.close()
        raise
    return bound


def addresses_of(listeners: list[socket.socket], scheme: str) -> str:
    return " and ".join(address_of(each, scheme) for each in listeners)


def address_of(bound: socket.socket, scheme: str) -> str:
    """With the port that it got, where port 0 was asked for."""
    if bound.family == socket.AF_UNIX:
        return f"unix:{bound.getsockname()}"
    host, port = bound.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _has_sent_all(transport: Any) -> bool:
    """Whether the client's system has all that was written."""
    rest, number = bytearray(4), transport.get_extra_info("socket").fileno()
    if number < 0:  # it is about to be told that it is closed
        return False
    fcntl.ioctl(number, termios.TIOCOUTQ, rest)
    return not any(rest)


class Lifecycle(uvicorn.Server):  # type: ignore[misc]
    """uvicorn's, with the same end for SIGTERM and SIGINT, after which the process goes on to its own end: at the first
    signal no more connections are taken, and answers on their way come to their ends. A second one cancels them, and so
    does the end of drain_timeout, in seconds.

    how: more of uvicorn.Config, such as ssl_keyfile
    """

    def __init__(self, server: Server, app: Any, *, drain_timeout: float | None = None, **how: Any) -> None:
        # backlog: asyncio accepts so many connections at a time. With one, those of a burst are shared among processes
        # that listen at the same socket: an idle one takes the next.
        super().__init__(
            uvicorn.Config(
                app, http=Http1, lifespan="off", ws="none", log_level="error", access_log=False, server_header=False,
                proxy_headers=False, backlog=1, timeout_keep_alive=KEEP_ALIVE, **how,
            )
        )  # fmt: skip
        self._server, self._drain_timeout, self._is_stopped = server, drain_timeout, False

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        for each in sockets or ():
            each.listen(BACKLOG)

    async def shutdown(self, sockets: Any = None) -> None:
        cutter = asyncio.create_task(self._cut_connections())
        await super().shutdown(sockets)
        cutter.cancel()

    async def _cut_connections(self) -> None:
        """When it is stopped, or the time is over: for the requests it is as if their clients had left. Before that
        it cuts those that are closed and not gone: with TLS asyncio waits half a minute until the client has closed its
        side, too, and a client with a pool of connections does so only when it takes one out again."""
        loop = asyncio.get_running_loop()
        end = None if self._drain_timeout is None else loop.time() + self._drain_timeout
        closed: dict[Any, float] = {}
        while not self._is_stopped and (end is None or loop.time() < end):
            for each in list(self.server_state.connections):
                since = closed.setdefault(each, loop.time()) if each.transport.is_closing() else loop.time()
                if loop.time() - since > GOODBYE and _has_sent_all(each.transport):
                    each.transport.abort()
            await asyncio.sleep(0.05)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self._server.is_draining:
            self.stop()
        else:
            self.drain()

    def drain(self) -> None:
        self.should_exit = self._server.is_draining = True

    def stop(self) -> None:
        self.drain()
        self._is_stopped = True
