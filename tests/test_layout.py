"""A folder is a dependency rule: what may include what, and what the built binary needs and shows."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import pagedkv._C

ROOT = Path(__file__).parent.parent
SOURCES = sorted(p for p in (ROOT / "csrc").rglob("*") if p.suffix in (".c", ".h", ".cu", ".cuh", ".inc"))
CUDA_HEADER = re.compile(r'#\s*include\s*[<"](cuda|cublas|nccl|device_launch|cooperative_groups|mma|cute|cutlass)')


def where(pattern: str) -> set[str]:
    """Files under csrc whose text matches, as paths from the root."""
    compiled = re.compile(pattern)
    return {str(p.relative_to(ROOT)) for p in SOURCES if compiled.search(p.read_text())}


def outside(paths: set[str], folder: str) -> set[str]:
    return {p for p in paths if not p.startswith(folder)}


pytestmark = pytest.mark.skipif(not SOURCES, reason="not a checkout")


def test_python_and_numpy_only_in_csrc_py():
    assert where(r"#\s*include\s*<Python\.h>") == {"csrc/py/py.h"}
    assert where(r"#\s*include\s*<numpy/") == {"csrc/py/arrays.c"}
    assert outside(where(r"\bPy[A-Z]\w+\("), "csrc/py/") == set()


def test_cuda_only_in_csrc_cuda():
    assert outside({str(p.relative_to(ROOT)) for p in SOURCES if CUDA_HEADER.search(p.read_text())}, "csrc/cuda/") == set()
    assert outside({str(p.relative_to(ROOT)) for p in SOURCES if p.suffix in (".cu", ".cuh")}, "csrc/cuda/") == set()


def test_only_dispatch_knows_what_was_built():
    assert where(r"#\s*(if|ifdef|ifndef|elif).*PAGEDKV_WITH_CUDA") == {"csrc/dispatch.c", "csrc/pk.h"}


def test_backends_do_not_know_each_other_nor_python():
    for folder, forbidden in [("csrc/cpu/", r'"(py|cuda)/'), ("csrc/cuda/", r'"(py|cpu)/')]:
        assert not {p for p in where(rf"#\s*include\s*{forbidden}") if p.startswith(folder)}


def test_no_exit_and_no_assert_in_the_library():
    assert where(r"\b(exit|abort|assert)\s*\(") == set()


@pytest.mark.skipif(sys.platform != "linux", reason="reads an ELF file")
def test_binary_shows_one_symbol_and_needs_little():
    binary = pagedkv._C.__file__
    try:
        symbols = subprocess.run(["nm", "-D", "--defined-only", binary], capture_output=True, text=True, check=True).stdout
        wanted = subprocess.run(["nm", "-D", "--undefined-only", binary], capture_output=True, text=True, check=True).stdout
        dynamic = subprocess.run(["readelf", "-d", binary], capture_output=True, text=True, check=True).stdout
    except FileNotFoundError:
        pytest.skip("no binutils")
    assert [line.split()[-1] for line in symbols.splitlines()] == ["PyInit__C"]
    # No C++ runtime (host code of .cu files), no driver and no CUDA library: they are found at run time, or not at all.
    assert not [line.split()[-1] for line in wanted.splitlines() if re.search(r" (_Z|__cxa_(?!finalize|atexit)|__gxx|cu|nccl)", line)]
    needed = set(re.findall(r"NEEDED.*\[(.*?)\]", dynamic))
    allowed = {"libc.so.6", "libm.so.6", "libgomp.so.1", "libpthread.so.0", "libdl.so.2", "librt.so.1", "ld-linux-x86-64.so.2"}
    sanitizers = {name for name in needed if re.match(r"lib(asan|ubsan)\.so", name)}
    assert needed - sanitizers <= allowed
    assert not re.search(r"R(UN)?PATH", dynamic)
