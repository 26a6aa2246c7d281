"""The search for a BLAS that the process has loaded (csrc/cpu/blas.c), in a program of its own."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPILER = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")


@pytest.mark.skipif(COMPILER is None, reason="no C compiler")
@pytest.mark.skipif(not (ROOT / "csrc").exists(), reason="not a checkout")
def test_other_threads_may_load_libraries_meanwhile(tmp_path):
    """A dlopen inside the linker's walk over the libraries and one of another thread waited for each other."""
    empty, blas, other, program = (tmp_path / name for name in ("e.c", "libmyblas.so", "libother.so", "search"))
    empty.write_text("int not_a_blas;\n")
    for library in (blas, other):
        subprocess.run([COMPILER, "-shared", "-fPIC", empty, "-o", library], check=True)
    sources = [ROOT / "tests" / "blas_search.c", ROOT / "csrc" / "cpu" / "blas.c"]
    options = ["-std=c11", "-O1", f"-I{ROOT / 'csrc'}", "-o", program, "-ldl", "-lpthread"]
    subprocess.run([COMPILER, *sources, *options], check=True)
    subprocess.run([program, "20000", blas, other], check=True, timeout=60)
