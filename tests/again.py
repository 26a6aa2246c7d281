"""Tests once more, in a process of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


def run_again(file: str | Path, tests: str, *options: str, **environment: str) -> str:
    """What pytest -k says of these tests of a file, with these environment variables. Fails where one of them does."""
    command = [sys.executable, "-m", "pytest", "-v", "-p", "no:cacheprovider", "-k", tests, *options, str(file)]
    run = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-1000:]
    return run.stdout
