"""Processes that are the ranks of a group.

    with Ranks(2, "cpu") as ranks:
        results = ranks(function, *arguments)  # [function(comm, *arguments) of each rank]

A function is sent by its name, so that it must be one of a module. What a rank raises is its result.
"""

import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from pagedkv import ops


def serve(rank: int, size: int, file: int, pipe: int, device: str, timeout: float, way: str, memory: str) -> None:
    """A rank's process: makes the calls that come through the pipe, until it ends."""
    connection = Connection(pipe)
    comm = ops.Communicator(rank, size, file, device, timeout=timeout, way=way, memory=memory)
    os.close(file)
    while True:
        try:
            function, arguments = connection.recv()
        except EOFError:
            return
        try:
            connection.send(function(comm, *arguments))
        except Exception as error:
            connection.send(error)


class Ranks:
    def __init__(
        self, size: int, device: str | list[str] = "cpu", timeout: float = 20.0, way: str = "auto",
        memory: str | list[str] = "auto",
    ) -> None:  # fmt: skip
        """Lists: by rank."""
        file = os.memfd_create("ranks")
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), environment["PYTHONPATH"]])
        self.processes: list[subprocess.Popen] = []
        self.pipes: list[Connection] = []
        for rank in range(size):
            here, there = socket.socketpair()
            own, its = (each if isinstance(each, str) else each[rank] for each in (device, memory))
            command = f"import ranks; ranks.serve(*{(rank, size, file, there.fileno(), own, timeout, way, its)})"
            self.processes.append(
                subprocess.Popen([sys.executable, "-c", command], pass_fds=(file, there.fileno()), env=environment)
            )
            there.close()
            self.pipes.append(Connection(here.detach()))
        os.close(file)

    def send(self, rank: int, function: Any, *arguments: Any) -> None:
        self.pipes[rank].send((function, arguments))

    def receive(self, rank: int) -> Any:
        assert self.pipes[rank].poll(120), f"rank {rank} says nothing"
        return self.pipes[rank].recv()

    def __call__(self, function: Any, *arguments: Any) -> list[Any]:
        """Raises what a rank has raised."""
        for rank in range(len(self.pipes)):
            self.send(rank, function, *arguments)
        results = [self.receive(rank) for rank in range(len(self.pipes))]
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def signal(self, rank: int, number: signal.Signals) -> None:
        self.processes[rank].send_signal(number)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self.pipes:
            pipe.close()
        for process in self.processes:
            process.send_signal(signal.SIGCONT)
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
