"""The processes of the ranks behind the first: how they start, what they are told, and how all of them end.

    team = Team("package.module", num_ranks, slot_bytes)     # python -m package.module, for each rank but the first
    team.tell(Kind.STEP, fields, array)                      # they do it, and answer nothing
    results = team.call("name", *args)                       # they do it, and answer

A rank is a new interpreter, which inherits its end of a socket and the shared memory, and imports nothing of the user's:
there is no port, no name, no guard of __main__. It ends when its socket does, however the first rank has ended.

A thread of the first rank watches: it reads all answers, and learns of a rank that ends, fails or is stopped. The first
failure ends the team: one RankError says which rank it was, at which step, and its last words; waits raise it, whoever
has asked to be told is told, and no process is left.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np

from .ring import MOST_ANSWER, Kind, Writer, memory_file, ring_bytes

STEP_SECONDS = 8.0  # the most that a rank may wait for another in a step
STOPPED_SECONDS = 5.0  # how long a process may be stopped (SIGSTOP)
END_SECONDS = 5.0  # in which a rank ends by itself after its socket has
SETTLE_SECONDS = 0.2  # between the first sign of a failure and the verdict
LAST_WORDS = 2000  # bytes of what a rank has written to its standard error
HAS_REPORTED = 3  # the exit status of a rank that has said why
OF_GROUP = "group"  # a report of a rank that waited for another


class RankError(RuntimeError):
    """One of the ranks of an engine has failed, and so the engine has."""


class Member:
    """A process of the team."""

    def __init__(self, rank: int, module: str, num_ranks: int, slot_bytes: int, files: list[int], env: dict[str, str]) -> None:
        self.rank, self.report = rank, ""
        with contextlib.ExitStack() as stack:
            self.words = memory_file(f"pagedkv rank {rank}")  # its standard error
            stack.callback(os.close, self.words)
            self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(self.socket.close)
            fds = [theirs.fileno(), *files]
            numbers = map(str, (rank, num_ranks, slot_bytes, *fds))
            with theirs:
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-X", "faulthandler", "-m", module, *numbers],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.words, pass_fds=fds, env=env,
                )  # fmt: skip
            stack.callback(self.process.kill)
            self.pidfd = os.pidfd_open(self.process.pid)
            stack.pop_all()

    @property
    def has_ended(self) -> bool:
        return self.process.returncode is not None

    @property
    def is_stopped(self) -> bool:
        """By a signal."""
        try:
            with open(f"/proc/{self.process.pid}/stat", "rb") as file:
                return file.read().rpartition(b") ")[2][:1] == b"T"
        except OSError:
            return False

    def last_words(self) -> str:
        end = os.fstat(self.words).st_size
        return os.pread(self.words, LAST_WORDS, max(0, end - LAST_WORDS)).decode(errors="replace").strip()

    def close(self) -> None:
        self.socket.close()
        os.close(self.pidfd)
        os.close(self.words)


class _State:
    """What the watching thread and the team share. It does not keep the team alive."""

    def __init__(self, members: list[Member]) -> None:
        self.members, self.answers = members, SimpleQueue[tuple[int, Any]]()
        self.failure: BaseException | None = None
        self.is_closing = False
        self.has_failed = threading.Event()
        self.own_report = ""  # of the first rank
        self.abort: Callable[[str], None] = lambda reason: None
        self.listeners: list[Callable[[BaseException], None]] = []
        self.wake_fd = os.eventfd(0, os.EFD_CLOEXEC)
        self.writer: Writer | None = None

    def check(self) -> None:
        """Raises after the team's end."""
        if self.failure is not None:
            raise self.failure

    def blame(self, kind: str, text: str) -> BaseException:
        """See Team.blame."""
        if self.failure is None:
            self.own_report = f"{kind}: {text}"
            os.eventfd_write(self.wake_fd, 1)
            self.has_failed.wait(2 * STEP_SECONDS)
        return self.failure or RankError(f"rank 0: {kind}: {text}")

    def wait_for_readers(self, seconds: float) -> None:
        self.check()
        if seconds > 2 * STEP_SECONDS:
            raise self.blame(OF_GROUP, f"a rank has not taken a record for {seconds:.0f} s")
        time.sleep(2e-5)


class Team:
    """Of the first rank. Any thread may close it; the others' methods are for one at a time."""

    def __init__(self, module: str, num_ranks: int, slot_bytes: int, num_threads: int | None = None) -> None:
        """num_threads: of each rank's operations on the CPU; None: as many as the first has."""
        if not sys.executable:
            raise RuntimeError("sys.executable is empty: there is no interpreter to start the other ranks with")
        self.num_ranks, self.comm_fd = num_ranks, memory_file("pagedkv communicator")
        ring_fd = memory_file("pagedkv ring", ring_bytes(num_ranks, slot_bytes))
        members: list[Member] = []
        self._state = state = _State(members)
        try:
            env = _environment(num_threads)
            for rank in range(1, num_ranks):
                members.append(Member(rank, module, num_ranks, slot_bytes, [ring_fd, self.comm_fd], env))
            state.writer = Writer(ring_fd, [each.socket for each in members], slot_bytes, state.wait_for_readers)
        except BaseException:
            _end(members)
            _release(state, self.comm_fd)
            raise
        finally:
            os.close(ring_fd)
        self._thread = threading.Thread(target=_watch, args=(state,), name="pagedkv ranks", daemon=True)
        self._thread.start()
        self._finalizer = weakref.finalize(self, _close, state, self._thread, self.comm_fd)
        self._finalizer.atexit = False  # whoever makes the steps ends first
        teams.add(self)

    # --- what the other ranks do

    def tell(self, kind: Kind, fields: Any = (), *arrays: np.ndarray) -> None:
        self._writer().send(kind, fields, *arrays)

    def tell_rows(self, kind: Kind, rows: np.ndarray) -> Any:
        return self._writer().send_rows(kind, rows)

    def ask(self, name: str, *args: Any) -> None:
        """Has all others call this function of theirs. answers() has the results."""
        self._writer().send_call(name, args)

    def answers(self) -> list[Any]:
        """Of what was asked, by rank."""
        results: dict[int, Any] = {}
        while len(results) < self.num_ranks - 1:
            self.check()
            with contextlib.suppress(Empty):
                rank, result = self._state.answers.get(timeout=0.1)
                results[rank] = result
        return [results[rank] for rank in range(1, self.num_ranks)]

    @property
    def num_told(self) -> int:
        """How many records there were."""
        return 0 if self._state.writer is None else self._state.writer.number

    def _writer(self) -> Writer:
        self.check()
        assert self._state.writer is not None, "the team has not ended"
        return self._state.writer

    # --- failures

    def check(self) -> None:
        """Raises after the team's end."""
        self._state.check()

    def blame(self, kind: str, text: str) -> BaseException:
        """The error of the team after one in this process. kind: OF_GROUP, or that of an error of this rank's own."""
        return self._state.blame(kind, text)

    def watch(self, abort: Callable[[str], None]) -> None:
        """abort(reason) ends what this process waits for on a device, after a failure and before the end."""
        self._state.abort = abort

    def listen(self, listener: Callable[[BaseException], None]) -> None:
        """It gets the error of the team's failure, in another thread."""
        self._state.listeners.append(listener)

    def close(self) -> None:
        """Ends all processes. Closing twice is fine."""
        self._finalizer()

    def forget(self) -> None:
        """In a child of fork(): the processes are its parent's."""
        if self._finalizer.detach() is not None:
            self._state.failure = RankError("the ranks of this engine belong to another process: fork() has copied it")
            _release(self._state, self.comm_fd)


def _environment(num_threads: int | None) -> dict[str, str]:
    """A rank imports what this process would."""
    path = os.pathsep.join(os.path.abspath(each) for each in sys.path)
    threads = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
    return {**os.environ, "PYTHONPATH": path, **threads}


def _watch(state: _State) -> None:
    """The thread. It ends when all processes have."""
    poller, by_fd = select.poll(), dict[int, Member]()
    poller.register(state.wake_fd, select.POLLIN)
    for member in state.members:
        for fd in (member.socket.fileno(), member.pidfd):
            by_fd[fd] = member
            poller.register(fd, select.POLLIN)
    stopped_since: dict[int, float] = {}
    verdict_at: float | None = None
    while not all(member.has_ended for member in state.members):
        events = poller.poll(50 if verdict_at else 1000)
        for fd, _ in events:
            if fd == state.wake_fd:
                os.eventfd_read(fd)
            elif fd == by_fd[fd].pidfd:
                by_fd[fd].process.wait()
                poller.unregister(fd)
            elif not _take_message(state, by_fd[fd]):
                poller.unregister(fd)
        now = time.monotonic()
        for member in state.members:
            if member.is_stopped:
                stopped_since.setdefault(member.rank, now)
            else:
                stopped_since.pop(member.rank, None)
        if state.is_closing or state.failure is not None:
            continue
        is_stopped = any(now - since > STOPPED_SECONDS for since in stopped_since.values())
        has_ended = any(member.has_ended or member.report for member in state.members)
        if verdict_at is None and (is_stopped or has_ended or state.own_report):
            verdict_at = now + SETTLE_SECONDS
        if verdict_at is not None and now >= verdict_at:
            _fail(state, _verdict(state))
    if state.failure is None and not state.is_closing:  # all at once
        _fail(state, _verdict(state))


def _take_message(state: _State, member: Member) -> bool:
    """False: there are no more."""
    try:
        data = member.socket.recv(MOST_ANSWER)
    except ConnectionResetError:  # it has not read all; what it said is still there
        return True
    if not data:
        return False
    kind, content = pickle.loads(data)  # of a process that this one has started
    if kind == "answer":
        state.answers.put((member.rank, content))
    else:
        member.report = member.report or f"{kind}: {content}"
    return True


def _verdict(state: _State) -> RankError:
    """Whose fault it was: of who has ended without a word, of who has an error of its own, of who is stopped, of whom
    the others have waited for."""
    reports = [(0, state.own_report), *((each.rank, each.report) for each in state.members)]
    for member in state.members:
        if member.has_ended and not member.report:
            code = member.process.returncode
            how = f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"
            return _error(state, member.rank, how, member.last_words())
    for rank, report in reports:
        if report and not report.startswith(OF_GROUP):
            return _error(state, rank, "failed", report)
    for member in state.members:
        if member.is_stopped:
            return _error(state, member.rank, "is stopped (SIGSTOP)", "")
    words = next((report for _, report in reports if report), "")
    missing = re.match(rf"{OF_GROUP}: rank (\d+) ", words)  # a Communicator's reason begins so
    return _error(state, int(missing[1]) if missing else 0, "is behind", words)


def _error(state: _State, rank: int, how: str, words: str) -> RankError:
    assert state.writer is not None, "it has not been closed"
    cell = state.writer.cell(rank)
    others = {each: state.writer.cell(each).step for each in range(len(state.members) + 1) if each != rank}
    where = f"at step {cell.step} ({cell.kind.name}); " + ", ".join(f"rank {r}: step {step}" for r, step in others.items())
    return RankError(f"rank {rank} {how}, {where}" + (f"\n{words}" if words else ""))


def _fail(state: _State, error: RankError) -> None:
    state.failure = error
    for member in state.members:
        member.process.kill()
    state.abort(str(error))
    state.has_failed.set()
    for listener in state.listeners:
        listener(error)


def _close(state: _State, thread: threading.Thread, comm_fd: int) -> None:
    state.is_closing = True
    with contextlib.suppress(Exception):
        state.abort("closed")
    _end(state.members)
    if thread is not threading.current_thread():
        thread.join()
    _release(state, comm_fd)


def _end(members: list[Member]) -> None:
    for member in members:
        with contextlib.suppress(OSError):
            member.socket.shutdown(socket.SHUT_RDWR)
    deadline = time.monotonic() + END_SECONDS
    for member in members:
        try:
            member.process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            member.process.kill()
            member.process.wait()


def _release(state: _State, comm_fd: int) -> None:
    """Gives descriptors and memory back."""
    state.failure = state.failure or RankError("the ranks of this engine have ended")
    state.writer = None
    state.abort, state.listeners = lambda reason: None, []
    for member in state.members:
        member.close()
    os.close(state.wake_fd)
    os.close(comm_fd)


teams: weakref.WeakSet[Team] = weakref.WeakSet()  # of this process


def _forget_all() -> None:
    for team in list(teams):
        team.forget()


os.register_at_fork(after_in_child=_forget_all)
