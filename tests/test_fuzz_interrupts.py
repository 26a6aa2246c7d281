"""Some seconds of fuzz_interrupts.py, in a process of its own: interrupts there may hit any Python code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("behind", [0, 1])
def test_interrupts_cost_no_other_thread_anything(behind):
    script = Path(__file__).parent / "fuzz_interrupts.py"
    command = [sys.executable, str(script), "--seconds", "6", "--seed", str(behind)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False)
    assert done.stdout, done.stderr[-2000:]
    result = json.loads(done.stdout)
    print(result)
    assert result["problems"] == [] and done.returncode == 0
    assert result["interrupts"] > 10 and result["answers"] > 0
