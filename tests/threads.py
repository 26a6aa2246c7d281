"""Work in several threads at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any


def in_threads(work: Callable[[Any], Any], arguments: Iterable[Any]) -> list[Any]:
    """What work returns for each argument, each in a thread of its own. When all have ended, the first error is raised."""
    arguments = list(arguments)
    start = threading.Barrier(len(arguments))  # without it a thread that has ended would take the next argument, too

    def run(argument: Any) -> Any:
        start.wait()
        return work(argument)

    with ThreadPoolExecutor(len(arguments)) as pool:
        return list(pool.map(run, arguments))
