"""The processes of the ranks behind the first: how they start, what they are told, and how all of them end.

    team = Team("package.module", num_ranks, slot_bytes)     # python -m package.module, for each rank but the first
    team.tell(Kind.STEP, fields, array)                      # they do it, and answer nothing
    team.ask("name", *args)                                  # they do it, and answer:
    results = team.answers()

A rank is a new interpreter, which inherits its end of a socket and the shared memory, and imports nothing of the
user's: there is no port, no name, no guard of __main__. It ends when its socket does, however the first rank has ended.
What a failure does is in watch.py.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from queue import Empty
from typing import Any

import numpy as np

from pagedkv.ops import GroupError
from pagedkv.threads import Threads

from .member import Member, end, environment
from .ring import Kind, Writer, memory_file, ring_bytes
from .watch import OF_GROUP, RankError, Watch


class Team:
    """Of the first rank. Any thread may close it; the other methods are for one at a time."""

    def __init__(self, module: str, num_ranks: int, slot_bytes: int, num_threads: int | None) -> None:
        """num_threads: of each rank's operations on the CPU; None: as many as there would be."""
        if not sys.executable:
            raise RuntimeError("sys.executable is empty: there is no interpreter to start the other ranks with")
        self.num_ranks = num_ranks
        members: list[Member] = []
        self._watch = Watch(members)
        with contextlib.ExitStack() as stack:
            stack.callback(_end, self._watch)
            self.comm_fd = memory_file("pagedkv communicator")
            stack.callback(os.close, self.comm_fd)
            ring_fd = memory_file("pagedkv ring", ring_bytes(num_ranks, slot_bytes))
            try:
                # An interrupt, which is the main thread's, might lose a process. One that reaches a process before it
                # has a session of its own is held back by the thread's mask, which it keeps.
                how = module, (num_ranks, slot_bytes), (ring_fd, self.comm_fd), environment(num_threads)
                with Threads(1, "pagedkv start") as thread:
                    thread.map(partial(_start, self._watch, members, how), range(1, num_ranks))
                bells = [member.socket for member in members]
                self._watch.writer = Writer(ring_fd, bells, slot_bytes, self._watch.wait_for_readers)
            finally:
                os.close(ring_fd)
            self._watch.start()
            self._finalizer = weakref.finalize(self, stack.pop_all().close)
        self._finalizer.atexit = False  # whoever makes the steps ends first
        teams.add(self)

    # --- what the other ranks do

    def tell(self, kind: Kind, fields: Sequence[int] = (), *arrays: np.ndarray) -> None:
        self._writer().send(kind, fields, *arrays)

    def tell_rows(self, kind: Kind, rows: np.ndarray) -> Iterator[np.ndarray]:
        """Tells of rows in pieces that fit into a record, and yields each after it was told."""
        return self._writer().send_rows(kind, rows)

    def ask(self, name: str, *args: Any) -> None:
        """Has all others call this function of theirs."""
        self._writer().send_call(name, args)

    def answers(self) -> list[Any]:
        """What they have answered, by rank."""
        results: dict[int, Any] = {}
        while len(results) < self.num_ranks - 1:
            self._watch.check()
            with contextlib.suppress(Empty):
                rank, result = self._watch.answers.get(timeout=0.1)
                results[rank] = result
        return [results[rank] for rank in range(1, self.num_ranks)]

    def _writer(self) -> Writer:
        self._watch.check()
        assert self._watch.writer is not None, "the team has not ended"
        return self._watch.writer

    # --- failures, and the end

    def blame(self, error: BaseException) -> RankError:
        """The error of the team after one in this process, which ends it: see Watch.blame."""
        kind = OF_GROUP if isinstance(error, (GroupError, ConnectionError)) else type(error).__name__
        return error if isinstance(error, RankError) else self._watch.blame(kind, str(error))

    @contextlib.contextmanager
    def blaming(self) -> Iterator[None]:
        """An error after the others were told of something is the end of all."""
        num_told = self._num_told
        try:
            yield
        except BaseException as error:
            if self._num_told == num_told:
                raise
            failure = self.blame(error)
            if not isinstance(error, Exception):  # an interrupt of who waits for the start
                raise
            raise failure from error

    @property
    def _num_told(self) -> int:
        """How many records there were."""
        return 0 if self._watch.writer is None else self._watch.writer.number

    def watch(self, abort: Callable[[str], object]) -> None:
        """abort(reason) ends what this process waits for on a device, after a failure and before the end."""
        self._watch.abort = abort

    def listen(self, listener: Callable[[RankError], object]) -> None:
        """It gets the error of a failure, in another thread."""
        self._watch.listeners.append(listener)

    def close(self) -> None:
        """Ends all processes. Closing twice is fine."""
        self._finalizer()

    def forget(self) -> None:
        """In a child of fork(): the processes are its parent's."""
        if self._finalizer.detach() is not None:
            self._watch.failure = RankError("the ranks of this engine belong to another process: fork() has copied it")
            self._watch.close()
            os.close(self.comm_fd)


def _start(watch: Watch, members: list[Member], how: tuple[Any, ...], rank: int) -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    with watch.starting:
        if not watch.is_closing:
            members.append(Member(rank, *how))


def _end(watch: Watch) -> None:
    with watch.starting:
        watch.is_closing = True
    with contextlib.suppress(ValueError):  # it was closed
        watch.abort("the engine was closed")
    end(watch.members)
    watch.join()
    watch.close()


teams: weakref.WeakSet[Team] = weakref.WeakSet()  # of this process


def _forget_all() -> None:
    for team in list(teams):
        team.forget()


os.register_at_fork(after_in_child=_forget_all)
