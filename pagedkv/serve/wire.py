"""Messages between an engine's process and its front ends: a length and a pickle each, over a socket of their own.

Both ends are processes that one parent started from one installation, and nobody else has the socket. So a message may
hold what the engine's API has, options and exceptions included. The one message of a step is a list of plain tuples.
"""

from __future__ import annotations

import pickle
import socket
from collections.abc import Iterator
from operator import attrgetter
from struct import Struct
from typing import Any

from pagedkv.engine.outputs import portable
from pagedkv.engine.requests.request import Update

_length = Struct("<I")
_fields = attrgetter(*(name for name in Update.__slots__ if name != "others"))


def to_bytes(message: Any) -> bytes:
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _length.pack(len(data)) + data


class Decoder:
    """Makes messages of the bytes that arrive, however they are cut."""

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[Any]:
        """Those that are complete. Each comes once, whatever happens to the caller with one of them."""
        self._data += data
        start = 0
        try:
            while len(self._data) - start >= _length.size:
                begin = start + _length.size
                end = begin + _length.unpack_from(self._data, start)[0]
                if len(self._data) < end:
                    break
                start = end
                yield pickle.loads(memoryview(self._data)[begin:end])
        finally:
            del self._data[:start]


def pack(update: Update) -> tuple[Any, ...]:
    """An Update as a tuple: pickling its class takes twenty times as long."""
    if update.error is not None:
        update.error = portable(update.error)
    others = tuple(map(pack, update.others)) if update.others else ()
    return (*_fields(update), others)


def unpack(values: tuple[Any, ...]) -> Update:
    update = Update(*values)
    if update.others:
        update.others = tuple(unpack(each) for each in values[-1])
    return update


def send(connected: socket.socket, message: Any) -> None:
    """On a socket that blocks."""
    connected.sendall(to_bytes(message))


def receive(connected: socket.socket) -> Any:
    """One message, on a socket that blocks, and nothing that follows it. EOFError: the other end has gone."""
    (length,) = _length.unpack(_read(connected, _length.size))
    return pickle.loads(_read(connected, length))


def _read(connected: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connected.recv(count - len(data))
        if not part:
            raise EOFError("the process at the other end has gone")
        data += part
    return data
