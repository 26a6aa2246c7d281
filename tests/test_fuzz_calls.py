"""A short run of fuzz_calls.py, in a process of its own: a crash there is a failure here."""

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).with_name("fuzz_calls.py")


def test_random_calls(environment, seed):
    command = [sys.executable, str(SCRIPT), "--calls", "6000", "--seed", str(seed)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert "6000 calls in" in run.stdout
