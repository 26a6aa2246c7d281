"""Short runs of fuzz_calls.py, in processes of their own: a crash there is a failure here."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fuzz_calls.py")


@pytest.mark.parametrize("isa", ["best", "generic"])
def test_random_calls(environment, seed, isa):
    command = [sys.executable, str(SCRIPT), "--calls", "2000", "--seed", str(seed)]
    capped = environment | ({"PAGEDKV_CPU_ISA": isa} if isa != "best" else {})
    run = subprocess.run(command, env=capped, capture_output=True, text=True, timeout=500)
    assert run.returncode == 0, run.stdout + run.stderr[-4000:]
    assert "2000 calls in" in run.stdout
