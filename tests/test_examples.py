"""The programs in examples/ run, and check themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_a_loop_in_pytorch(seed, device):
    pytest.importorskip("torch", reason="the example is one of PyTorch")
    command = [sys.executable, str(EXAMPLES / "pytorch_loop.py"), "--device", device, "--seed", str(seed), "--num-prompts", "11"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.count("as PyTorch") == 11
