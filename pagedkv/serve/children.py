"""Processes that a process starts for itself, and that do not outlive it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading


async def start(module: str, *descriptors: int) -> asyncio.subprocess.Process:
    """`python -m module` with these descriptors, whose numbers are its arguments. The module is named and nothing of
    this process is copied, so the program of this one may as well come from stdin. A session of its own: Ctrl-C in a
    terminal is for its parent, which says what to do."""
    safe = ["-P"] if sys.flags.safe_path else []
    return await asyncio.create_subprocess_exec(
        sys.executable, *safe, "-m", module, *map(str, descriptors), pass_fds=descriptors, stdin=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip


def end_with_parent(descriptor: int) -> None:
    """Ends this process when the parent closes the other end of the pipe, or ends, however that comes about."""

    def watch() -> None:
        os.read(descriptor, 1)
        os._exit(0)

    threading.Thread(target=watch, name="end with parent", daemon=True).start()
