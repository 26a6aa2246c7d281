"""Threads that share work, as those of concurrent.futures.ThreadPoolExecutor do, which refuses all work once the main
thread has returned, though other threads go on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from queue import SimpleQueue
from typing import Any, Self, TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


class Threads:
    """So many threads, until close()."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._inbox = SimpleQueue[Any]()  # a future, a function and its argument; None: the thread is to end
        self._threads = [
            threading.Thread(target=_serve, args=(self._inbox,), name=name, daemon=True) for _ in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def map(self, action: Callable[[Item], Result], items: Iterable[Item]) -> list[Result]:
        """[action(item) for item in items]. After an error or an interrupt no item is begun, and it is raised once
        those that were have ended."""
        tasks = [(Future[Result](), action, item) for item in items]
        futures = [future for future, _, _ in tasks]
        try:
            for task in tasks:
                self._inbox.put(task)
            return [future.result() for future in futures]
        finally:
            for future in futures:
                future.cancel()
            wait(futures)

    def close(self) -> None:
        for _ in self._threads:
            self._inbox.put(None)
        for thread in self._threads:
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _serve(inbox: SimpleQueue[Any]) -> None:
    while (task := inbox.get()) is not None:
        future, action, item = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(action(item))
            except BaseException as error:
                future.set_exception(error)
        del task, future, action, item
