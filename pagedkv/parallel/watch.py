"""The thread of the first rank that watches the others: it reads their answers, and finds out who has failed.

The first failure is that of all: a moment later, when those who have waited for the one at fault have said so, too,
there is a verdict, an error that names the rank, the step and its last words. Then all processes are killed, waits of
this process end, and whoever has asked to be told is told.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import select
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any

from .member import Member
from .ring import MOST_ANSWER, Writer

STEP_SECONDS = 8.0  # the most that a rank may wait for another in a step
STOPPED_SECONDS = 5.0  # how long a process may be stopped (SIGSTOP)
SETTLE_SECONDS = 0.2  # between the first sign of a failure and the verdict
OF_GROUP = "group"  # the kind of a report of a rank that has waited for another


class RankError(RuntimeError):
    """A rank of an engine has failed, and the engine with it. It serves nothing any more: make another one."""


class Watch:
    """Of these members. It does not keep the team alive that owns it."""

    def __init__(self, members: Sequence[Member]) -> None:
        self.members = members
        self.writer: Writer | None = None
        self.answers = SimpleQueue[tuple[int, Any]]()  # rank, result
        self.failure: RankError | None = None
        self.abort: Callable[[str], object] = lambda reason: None
        self.listeners: list[Callable[[RankError], object]] = []
        self.is_closing, self.starting = False, threading.Lock()  # of a process: none starts once it is closing
        self._own_report = ""  # of the first rank
        self._has_failed = threading.Event()
        self._wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._watch, name="pagedkv ranks", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def join(self) -> None:
        """Waits for its end, which is that of all processes."""
        if self._thread.ident is not None and self._thread is not threading.current_thread():
            self._thread.join()

    def close(self) -> None:
        """Lets go of everything; the processes have ended, or are another's."""
        self.failure = self.failure or RankError("the ranks of this engine have ended")
        self.writer, self.abort, self.listeners = None, lambda reason: None, []
        for member in self.members:
            member.close()
        os.close(self._wake_fd)

    # --- for other threads

    def check(self) -> None:
        """Raises after a failure, or the end."""
        if self.failure is not None:
            raise self.failure

    def blame(self, kind: str, text: str) -> RankError:
        """The verdict after an error in this process. kind: OF_GROUP, or that of an error of the first rank's own."""
        if self.failure is None:
            self._own_report = f"{kind}: {text}"
            os.eventfd_write(self._wake_fd, 1)
            self._has_failed.wait(STEP_SECONDS)
        return self.failure or RankError(f"rank 0 failed: {kind}: {text}")

    def wait_for_readers(self, seconds: float) -> None:
        """Of the writer, which has waited so long for a slot."""
        self.check()
        if seconds > STEP_SECONDS:
            raise self.blame(OF_GROUP, f"a rank has not taken a record for {seconds:.0f} s")
        time.sleep(2e-5)

    # --- the thread

    def _watch(self) -> None:
        poller, by_fd = select.poll(), dict[int, Member]()
        poller.register(self._wake_fd, select.POLLIN)
        for member in self.members:
            for fd in (member.socket.fileno(), member.pidfd):
                by_fd[fd] = member
                poller.register(fd, select.POLLIN)
        stopped_since: dict[int, float] = {}
        verdict_at: float | None = None
        while not all(member.has_ended for member in self.members):
            for fd, _ in poller.poll(1000 if verdict_at is None else 20):
                if fd == self._wake_fd:
                    os.eventfd_read(fd)
                elif not self._take_event(by_fd[fd], fd):
                    poller.unregister(fd)
            now = time.monotonic()
            stopped_since = {m.rank: stopped_since.get(m.rank, now) for m in self.members if m.is_stopped}
            is_stopped = any(now - since > STOPPED_SECONDS for since in stopped_since.values())
            has_failed = is_stopped or self._own_report or any(m.has_ended or m.report for m in self.members)
            if self.failure is None and not self.is_closing and has_failed:
                verdict_at = verdict_at or now + SETTLE_SECONDS
                if now >= verdict_at:
                    self._fail(self._verdict())
        if self.failure is None and not self.is_closing:  # all at once
            self._fail(self._verdict())

    def _take_event(self, member: Member, fd: int) -> bool:
        """False: nothing more comes from there."""
        if fd == member.pidfd:
            member.process.wait()
            return False
        try:
            data = member.socket.recv(MOST_ANSWER)
        except ConnectionResetError:  # it has not read all; what it has said is still there
            return True
        if data:
            kind, content = pickle.loads(data)  # of a process that this one has started
            if kind == "answer":
                self.answers.put((member.rank, content))
            else:
                member.report = member.report or f"{kind}: {content}"
        return bool(data)

    def _verdict(self) -> RankError:
        """Whose fault it was: of who has ended without a word, of who has an error of its own, of who is stopped, of
        whom the others have waited for."""
        for member in self.members:
            if member.has_ended and not member.report:
                return self._error(member.rank, member.end, member.last_words())
        reports = [(0, self._own_report), *((member.rank, member.report) for member in self.members)]
        for rank, report in reports:
            if report and not report.startswith(OF_GROUP):
                return self._error(rank, "failed", report)
        for member in self.members:
            if member.is_stopped:
                return self._error(member.rank, "is stopped (SIGSTOP)")
        words = next((report for _, report in reports if report), "")
        missing = re.match(rf"{OF_GROUP}: rank (\d+) ", words)  # a Communicator's reason begins so
        return self._error(int(missing[1]) if missing else self._last_rank(), "is behind", words)

    def _last_rank(self) -> int:
        writer = self.writer
        assert writer is not None, "it has not been closed"
        return min(range(len(self.members) + 1), key=lambda rank: writer.cell(rank).done)

    def _error(self, rank: int, how: str, words: str = "") -> RankError:
        assert self.writer is not None, "it has not been closed"
        cells = [self.writer.cell(each) for each in range(len(self.members) + 1)]
        others = ", ".join(f"rank {each}: step {cell.step}" for each, cell in enumerate(cells) if each != rank)
        at = f"at step {cells[rank].step} ({cells[rank].kind.name})"
        return RankError(f"rank {rank} {how}, {at}; {others}" + (f"\n{words}" if words else ""))

    def _fail(self, error: RankError) -> None:
        self.failure = error
        for member in self.members:
            member.process.kill()
        with contextlib.suppress(ValueError):  # it was closed
            self.abort(str(error))
        self._has_failed.set()
        for listener in self.listeners:
            listener(error)
