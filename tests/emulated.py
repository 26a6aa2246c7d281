"""Code of the GPU that plans, compiled as C++ and run on one emulated CTA (emulated_gpu.h): for tests without a GPU."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
COMPILER = shutil.which(os.environ.get("CXX", "c++")) or shutil.which("g++")
TOOLKITS = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
HEADERS = next((path for path in (Path(t) / "include" for t in TOOLKITS if t) if (path / "cuda_fp8.h").exists()), None)


def struct_of(*names):
    """A struct of so many int."""
    return type("Struct", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_int) for name in names]})


def patched(folder, path, *replacements):
    """A copy of a source of csrc in that folder, for -iquote: what C++ has not, such as an array without a size, is replaced."""
    if not (ROOT / "csrc").exists():
        return  # `load` skips the test
    text = (ROOT / "csrc" / path).read_text()
    for before, after in replacements:
        assert before in text, before
        text = text.replace(before, after)
    (folder / path.parent).mkdir(parents=True, exist_ok=True)
    (folder / path).write_text(text)


def load(folder, source, function, *more_options):
    """The function of that source; it returns None, or what went wrong. Skips the test where nothing can be compiled."""
    if COMPILER is None or HEADERS is None or not (ROOT / "csrc").exists():
        pytest.skip("a checkout, a C++ compiler and CUDA's headers are needed")
    library = folder / "emulated.so"
    options = ["-std=c++17", "-O1", "-U_FORTIFY_SOURCE", "-w", "-shared", "-fPIC", "-DPAGEDKV_WITH_CUDA", f"-I{ROOT / 'csrc'}", f"-I{HEADERS}"]
    sources = [ROOT / "tests" / source, ROOT / "csrc" / "pk.c"]
    subprocess.run([COMPILER, *options, *more_options, *sources, "-o", library], check=True)
    loaded = getattr(ctypes.CDLL(str(library)), function)
    loaded.restype = ctypes.c_char_p

    def call(struct, *arguments):
        # An int would be passed in 32 bits: those above it are anything where an argument lies on the stack.
        pointers = [ctypes.c_void_p(each) if isinstance(each, int) else each.ctypes.data_as(ctypes.c_void_p) for each in arguments]
        problem = loaded(ctypes.byref(struct), *pointers)
        assert problem is None, problem

    return call


def load_fusing(folder, source, function):
    """Compiled so that products which are added to something may become one instruction, as a GPU's compiler does."""
    info = Path("/proc/cpuinfo")
    if not info.exists() or " fma " not in info.read_text():
        pytest.skip("this CPU has no such instruction")
    return load(folder, source, function, "-O2", "-mfma", "-ffp-contract=fast")
