"""The process of a rank behind the first: python -m pagedkv.engine.rank (see parallel/team.py).

It does what the records of the first rank say, one after the other, and decides nothing. After an error it tells all
others and ends. It ends, too, when its socket does, wherever it is then.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import threading
import time
from operator import attrgetter
from typing import Any

import numpy as np

from pagedkv.ops import Communicator, GroupError
from pagedkv.parallel.member import END_SECONDS
from pagedkv.parallel.ring import MOST_WORDS, Kind, Reader, Record
from pagedkv.parallel.watch import OF_GROUP

from .runner.make import make_runner
from .runner.model_runner import ModelRunner
from .runner.plan import RunnerPlan
from .runner.step_memory import StepHeader


class Rank:
    def __init__(self, rank: int, num_ranks: int, slot_bytes: int, bell_fd: int, ring_fd: int, comm_fd: int) -> None:
        self.rank, self._comm_fd, bell = rank, comm_fd, socket.socket(fileno=bell_fd)
        threading.Thread(target=_end_with, args=(bell,), name="pagedkv first rank", daemon=True).start()
        self.reader = Reader(ring_fd, bell, rank, num_ranks, slot_bytes)
        os.close(ring_fd)
        self.comm: Communicator | None = None
        self.runner: ModelRunner | None = None

    def serve(self) -> int:
        """Until the first rank is gone. Returns the status to exit with."""
        reader = self.reader
        reader.answer(("answer", None))
        try:
            while (record := reader.receive()) is not None:
                self._do(record)
                reader.done(record)
        except BaseException as error:
            kind = OF_GROUP if isinstance(error, GroupError) else type(error).__name__
            reader.answer((kind, str(error)[:MOST_WORDS]))
            if self.comm is not None:
                self.comm.abort(f"rank {self.rank} failed: {kind}: {error}"[:200])
            return 1
        return 0

    def _do(self, record: Record) -> None:
        if record.kind > Kind.CALL:
            assert self.runner is not None, "it was set up"
            with self.runner.stream:
                _replay(self.runner, record)
            return
        call = self.reader.call_of(record)
        if call is not None:
            name, args = call
            owner: Any = self if self.runner is None else self.runner
            self.reader.answer(("answer", attrgetter(name)(owner)(*args)))

    def set_up(self, plan: RunnerPlan) -> None:
        self.comm = plan.communicator(self.rank, self._comm_fd)
        os.close(self._comm_fd)
        self.runner, _ = make_runner(plan, self.comm)


def _replay(runner: ModelRunner, record: Record) -> None:
    """Does what the first rank's runner does on its device."""
    if record.kind == Kind.STEP:
        event, header = runner.next_turn(), StepHeader.of(record.fields)
        runner.memory.take(header, runner.turn, *record.arrays)
        batch = runner.memory.upload(header, runner.turn)
        runner.compute(batch, header.only_decodes)
        if event is not None:
            event.record()
        runner.capture_missing(batch, header.only_decodes)
    elif record.kind == Kind.TOKENS:
        runner.share_tokens(record.fields[0])
    elif record.kind == Kind.LOGITS:
        runner.logits_of(record.arrays[0].view(np.int32))
    else:
        runner.caches.move(record.kind, record.arrays[0].view(np.int32).reshape(-1, 2))


def _end_with(bell: socket.socket) -> None:
    """Ends this process after the first rank has, if it does not do so itself."""
    poller = select.poll()
    poller.register(bell, 0)  # for its end alone, ...
    poller.register(os.pidfd_open(os.getppid()), select.POLLIN)  # ... which does not come while a fork's child has it
    poller.poll()
    time.sleep(END_SECONDS / 2)
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # whoever sends it to all: the first rank decides
    status = Rank(*map(int, sys.argv[1:])).serve()
    sys.stderr.flush()
    os._exit(status)  # a thread may be in a call
