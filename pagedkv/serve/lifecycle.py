"""A server from its first connection to its end: the first signal drains it, a second one stops it."""

from __future__ import annotations

import os
import socket
from types import FrameType
from typing import Any

import uvicorn

from .server import Server


def bind(host: str, port: int) -> socket.socket:
    """OSError: the address is in use, or is none of this machine's. OverflowError: the port is no port."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    bound = socket.socket(family, kind, protocol)
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except BaseException:
        bound.close()
        raise
    return bound


class Lifecycle(uvicorn.Server):  # type: ignore[misc]
    """uvicorn's, with the same end for SIGTERM and SIGINT, after which the process goes on to its own end: at the first
    signal no more connections are taken, and answers on their way come to their ends. A second one cancels them."""

    def __init__(self, server: Server, app: Any, *, drain_timeout: int | None = None, **where: Any) -> None:
        super().__init__(
            uvicorn.Config(
                app, lifespan="off", ws="none", log_level="warning", access_log=False, server_header=False,
                timeout_graceful_shutdown=drain_timeout, **where,
            )
        )  # fmt: skip
        self._server = server

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self.force_exit = self._server.is_draining
        self.should_exit = self._server.is_draining = True

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        if self.started:
            print(f"pagedkv serve: {self.address()} serves {self._server.model.name}", flush=True)

    def address(self) -> str:
        """With the port that it got, where port 0 was asked for."""
        if self.config.uds is not None:
            return f"unix:{os.fspath(self.config.uds)}"
        host, port = self.servers[0].sockets[0].getsockname()[:2]
        return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
