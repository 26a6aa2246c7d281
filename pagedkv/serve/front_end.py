"""A front end: the HTTP server in a process of its own, over the socket of an engine's process.

    python -m pagedkv.serve.front_end CONTROL ENGINE COUNTS LISTENER...

are descriptors of sockets, and of what gate.shared_counts() made. From CONTROL comes Options, and then a byte: DRAIN or
STOP; READY goes there.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
import socket
import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from pagedkv.engine.lora_request import LoRARequest
from pagedkv.engine.text.tokenizer import Tokenizer

from .app import make_app
from .lifecycle import Lifecycle
from .model import ServedModel
from .remote import Facts, RemoteEngine
from .server import Server
from .wire import receive

logger = logging.getLogger(__name__)
READY, DRAIN, STOP = b"r", b"d", b"s"
LAST_WORDS = 5  # seconds to tell clients that the engine has gone


@dataclass
class Options:
    """Of all front ends, but for `place`; see docs/serving.md."""

    names: list[str]
    facts: Facts | None = None  # of the model, once it is loaded
    chat_template: str | None = None
    adapters: dict[str, LoRARequest] = field(default_factory=dict)
    tool_call_parser: str = "auto"
    reasoning_parser: str = "auto"
    limits: dict[str, Any] = field(default_factory=dict)  # of Server
    app: dict[str, Any] = field(default_factory=dict)  # of make_app()
    http: dict[str, Any] = field(default_factory=dict)  # of Lifecycle
    place: int = 0  # in COUNTS


class FrontEnd(Lifecycle):
    """A Lifecycle whose signals are its parent's, and which ends with its engine."""

    def __init__(
        self, client: RemoteEngine, engine: socket.socket, control: socket.socket, *args: Any, **how: Any
    ) -> None:
        super().__init__(*args, **how)
        self._client, self._engine, self._control = client, engine, control
        self.code = 0

    async def startup(self, sockets: Any = None) -> None:
        self._client.when_gone = self._end_with_engine
        await self._client.connect(self._engine)
        asyncio.get_running_loop().add_reader(self._control, self._obey)
        await super().startup(sockets)
        gc.collect()
        gc.freeze()  # what is there now stays: no collection need look at it
        self._control.send(READY)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal to all processes of a group is the parent's, too."""

    def _obey(self) -> None:
        command = self._control.recv(1)
        if command == DRAIN:
            self.drain()
        else:  # STOP, or the parent has ended
            asyncio.get_running_loop().remove_reader(self._control)
            self.stop()

    def _end_with_engine(self) -> None:
        if not self._server.is_draining:
            logger.error("the engine's process has ended")
        self.code = 1
        self.drain()
        asyncio.get_running_loop().call_later(LAST_WORDS, self.stop)


def main() -> None:
    for each in (signal.SIGINT, signal.SIGTERM):  # until uvicorn has its handlers
        signal.signal(each, signal.SIG_IGN)
    *own, counts = map(int, sys.argv[1:4])
    control, engine, *listeners = (socket.socket(fileno=each) for each in [*own, *map(int, sys.argv[4:])])
    options: Options = receive(control)
    facts = options.facts
    assert facts is not None, "the engine is there"
    tokenizer = Tokenizer(facts.folder)
    if tokenizer.exists:
        tokenizer.library  # noqa: B018  # loads it, now
    model = ServedModel(
        options.names, facts.folder, tokenizer, facts.default_params, facts.max_model_len, facts.vocab_size,
        options.chat_template, options.adapters, tool_call_parser=options.tool_call_parser,
        reasoning_parser=options.reasoning_parser,
    )  # fmt: skip
    client = RemoteEngine(facts, tokenizer)
    server = Server(client, model, counts=counts, place=options.place, **options.limits)
    life = FrontEnd(client, engine, control, server, make_app(server, **options.app), **options.http)
    life.run(listeners)
    sys.exit(life.code)


if __name__ == "__main__":
    main()
