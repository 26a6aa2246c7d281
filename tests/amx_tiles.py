"""Kernels for AMX with its tiles in plain C (amx_tiles.h), so that any x86 CPU tests them."""

import ctypes
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]


def load(folder, source):
    """The library of a C file. Skips the test where it cannot be compiled, or run."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if platform.machine() != "x86_64" or not compiler:
        pytest.skip("needs an x86 CPU and a C compiler")
    flags = ["-std=c11", "-O2", "-w", "-fPIC", "-shared", "-D__AMX_BF16__", f"-I{ROOT / 'csrc'}", "-include", ROOT / "tests/amx_tiles.h"]
    subprocess.run([compiler, *flags, source, "-o", folder / "kernel.so"], check=True)
    return ctypes.CDLL(str(folder / "kernel.so"))


def bits_of(values):
    """Of numbers that bfloat16 has."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
