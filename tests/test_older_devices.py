"""Kernels once more on a GPU that stands for an older one: PAGEDKV_CUDA_MAX_CC gives it that card's limits.

Whole suites as 8.0, 8.6 and 8.9 are run by hand: see CONTRIBUTING.md. In those this file has nothing to add.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from again import run_again

NAMES = (
    "attention", "attention_cuda", "attention_mixed_cuda", "cuda_limits", "experts", "kernel_instances",
    "sample_cuda",
)


@pytest.mark.gpu
@pytest.mark.skipif("PAGEDKV_CUDA_MAX_CC" in os.environ, reason="the whole suite runs as an older device")
@pytest.mark.parametrize("capability", ["80", "86"])
@pytest.mark.parametrize("name", NAMES)
def test_the_kernels_of_older_devices(cuda, name, capability):
    file = Path(__file__).with_name(f"test_{name}.py")
    tests = "case or pool or graph or product or projection or options"
    assert " passed" in run_again(file, tests, "-m", "gpu", PAGEDKV_CUDA_MAX_CC=capability)


@pytest.mark.gpu
def test_a_bad_cap_of_the_compute_capability_is_refused(cuda):
    command = [sys.executable, "-c", "import pagedkv; pagedkv.empty((1,), 'float32', 'cuda')"]
    result = subprocess.run(command, env=os.environ | {"PAGEDKV_CUDA_MAX_CC": "8.0"}, capture_output=True, text=True)
    assert "ValueError: PAGEDKV_CUDA_MAX_CC is '8.0' but must be 80, 86, 89, 90, 100 or 120" in result.stderr
