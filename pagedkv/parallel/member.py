"""The process of a rank behind the first, as the first one has it: its socket, and how it starts and ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from .ring import memory_file

END_SECONDS = 5.0  # in which a rank ends by itself after its socket has
HERE = str(Path(__file__).parents[2])  # the folder that has this package
LAST_WORDS = 2000  # bytes of what a rank has written to its standard error


class Member:
    """A new interpreter that runs a module, whose arguments are the rank, the numbers, and the descriptors of its end
    of the socket and of `files`."""

    def __init__(
        self, rank: int, module: str, numbers: Sequence[int], files: Sequence[int], environment: Mapping[str, str]
    ) -> None:
        self.rank, self.report = rank, ""  # of an error, when it has told of one
        with contextlib.ExitStack() as stack:
            self.words = memory_file(f"pagedkv rank {rank}")  # its standard error
            stack.callback(os.close, self.words)
            self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            stack.callback(self.socket.close)
            inherited = list[int]()
            with theirs, contextlib.ExitStack() as copies:
                for fd in (theirs.fileno(), *files):  # above the standard ones, which may be closed here
                    inherited.append(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3))
                    copies.callback(os.close, inherited[-1])
                arguments = map(str, (rank, *numbers, *inherited))
                self.process = subprocess.Popen(
                    [sys.executable, "-P", "-X", "faulthandler", "-m", module, *arguments],
                    stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self.words, pass_fds=inherited,
                    env=environment, start_new_session=True,  # Ctrl-C is for the first rank alone
                )  # fmt: skip
            stack.push(self.process)  # waits for its end
            stack.callback(self.process.kill)
            self.pidfd = os.pidfd_open(self.process.pid)
            stack.pop_all()

    @property
    def has_ended(self) -> bool:
        """Whether somebody has waited for its end."""
        return self.process.returncode is not None

    @property
    def is_stopped(self) -> bool:
        """By a signal."""
        try:
            with open(f"/proc/{self.process.pid}/stat", "rb") as file:
                return file.read().rpartition(b") ")[2][:1] == b"T"
        except OSError:
            return False

    @property
    def end(self) -> str:
        code = self.process.returncode
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with status {code}"

    def last_words(self) -> str:
        size = os.fstat(self.words).st_size
        return os.pread(self.words, LAST_WORDS, max(0, size - LAST_WORDS)).decode(errors="replace").strip()

    def close(self) -> None:
        """Gives its descriptors back."""
        self.socket.close()
        os.close(self.pidfd)
        os.close(self.words)


def environment(num_threads: int | None) -> dict[str, str]:
    """With which a rank imports what this process would, and this package wherever that is by now. num_threads: see
    Team."""
    is_somewhere = os.path.exists(os.readlink("/proc/self/cwd"))  # else no interpreter starts with relative paths
    path = [each for each in sys.path if isinstance(each, str) and (is_somewhere or os.path.isabs(each))]
    places = (each for each in path if os.path.isdir(os.path.join(each, "pagedkv")))
    if next(places, None) != HERE:  # it was found by a relative path, or sys.path has changed since
        path.insert(0, HERE)
    threads = {} if num_threads is None else {"OMP_NUM_THREADS": str(num_threads)}
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path), **threads}


def end(members: Sequence[Member]) -> None:
    """Ends their sockets, and so the processes; kills those that take too long."""
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
