"""Libraries that are loaded at first use."""

from __future__ import annotations

import threading
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType


@cache
def load(name: str) -> ModuleType:
    """The module of this name, imported in a thread of its own, where no KeyboardInterrupt is raised.

    In the main thread an interrupt may come while CPython holds the lock of all imports, and it stays taken then: every
    other thread's next import would wait for ever. (importlib._bootstrap._get_module_lock takes it one line before the
    `try` that lets go of it.)
    """
    problems: list[BaseException] = []

    def run() -> None:
        try:
            import_module(name)
        except BaseException as problem:
            problems.append(problem)

    thread = threading.Thread(target=run, name=f"import {name}")
    thread.start()
    thread.join()
    if problems:
        raise problems[0]
    return import_module(name)


def need(what: str, extra: str, *names: str) -> None:
    """Raises ImportError where a package is not installed, and names it with the extra that brings it."""
    missing = [name for name in names if find_spec(name) is None]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        text = f"{what} needs {', '.join(missing)}, which {verb} not installed: pip install 'pagedkv[{extra}]'"
        raise ImportError(text)
