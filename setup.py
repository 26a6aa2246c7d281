"""Builds pagedkv._C: every csrc/**/*.c with the C compiler, every csrc/cuda/*.cu with nvcc, one shared object.

Environment:
  PAGEDKV_CUDA        auto (default: CUDA where nvcc is found), 0 (never), 1 (fail without nvcc)
  PAGEDKV_CUDA_ARCHS  such as "8.0;9.0a+PTX", where "+PTX" adds portable PTX of the lowest architecture named. Default:
                      that of the GPUs of this machine; where there is none, RELEASE_ARCHS.
  CUDA_HOME           where to look for nvcc first (then CUDA_PATH, PATH, /usr/local/cuda)
  CFLAGS, LDFLAGS     added to the C compiler's and the linker's flags
  NVCC_FLAGS          added to nvcc's flags
"""

import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy
from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent
FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")

# A CPU file whose name ends so is compiled for that instruction set; csrc/cpu/isa.c picks one at run time.
ISA_FLAGS = {
    "_avx2": "-mavx2 -mfma -mf16c -mbmi2",
    "_avx512": "-mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl",
    "_avx512bf16": "-mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16",
    "_amx": "-mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mamx-tile -mamx-bf16",
}
RELEASE_ARCHS = "8.0;8.6;8.9;9.0a;10.0;12.0+PTX"
C_FLAGS = "-std=c11 -O3 -fvisibility=hidden -fno-math-errno -fno-trapping-math -ffp-contract=off -fopenmp"
C_WARNINGS = "-Wall -Wextra -Werror=implicit -Werror=vla"
CUDA_HOST_FLAGS = "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-Wall"


def find_cuda() -> Path | None:
    """The CUDA toolkit's folder, or None; says by PAGEDKV_CUDA=1 what was tried."""
    mode = os.environ.get("PAGEDKV_CUDA", "auto")
    if mode not in ("auto", "0", "1"):
        sys.exit(f"PAGEDKV_CUDA is {mode!r} but must be auto, 0 or 1")
    if mode == "0":
        return None
    tried = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")]
    on_path = shutil.which("nvcc")
    if on_path:
        tried.append(str(Path(on_path).resolve().parent.parent))
    tried.append("/usr/local/cuda")
    for folder in map(Path, filter(None, tried)):  # an nvcc on PATH may be a wrapper with no toolkit around it
        if (folder / "bin" / "nvcc").exists() and any(folder.glob("lib*/libcudart_static.a")):
            return folder
    if mode == "1":
        looked_in = ", ".join(filter(None, tried))
        where = f"CUDA_HOME, CUDA_PATH, PATH, {looked_in}"
        sys.exit(f"PAGEDKV_CUDA=1 but no nvcc with libcudart_static.a: looked in {where}")
    return None


def check_release(cuda: Path) -> None:
    """12.8 is the first toolkit that knows compute capabilities 10.0 and 12.0, and compresses kernels for size."""
    said = subprocess.run([cuda / "bin" / "nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    major, minor = map(int, re.search(r"release (\d+)\.(\d+)", said).groups())
    if (major, minor) < (12, 8):
        needed = "pagedkv needs 12.8 or newer; PAGEDKV_CUDA=0 builds for the CPU alone"
        sys.exit(f"{cuda} is CUDA {major}.{minor} but {needed}")


def visible_archs() -> str | None:
    """The architectures of this machine's GPUs, or None: no driver, or no GPU that pagedkv runs on."""
    smi = shutil.which("nvidia-smi")
    if not smi:
        return None
    query = [smi, "--query-gpu=compute_cap", "--format=csv,noheader"]
    said = subprocess.run(query, capture_output=True, text=True, check=False)
    lines = re.findall(r"^\d+\.\d+$", said.stdout, re.M) if said.returncode == 0 else []  # "[N/A]" is not one
    capabilities = sorted(map(float, set(lines)))
    archs = [str(number) for number in capabilities if number >= 8]
    return ";".join(archs).replace("9.0", "9.0a") or None  # Hopper's own instructions need its `a` target


def cuda_archs() -> str:
    asked = os.environ.get("PAGEDKV_CUDA_ARCHS")
    if asked and re.search(r"(^|[ ;])9\.?0(\+PTX)?($|[ ;])", asked):
        sys.exit(f"PAGEDKV_CUDA_ARCHS is {asked!r}: write 9.0a, since 9.0 has no code for Hopper's matrix units")
    return asked or visible_archs() or RELEASE_ARCHS


def cuda_arch_flags(text: str) -> list[str]:
    """nvcc's -gencode flags for architectures such as "8.0;9.0a+PTX"."""
    archs = [a.removesuffix("+PTX").replace(".", "") for a in text.replace(" ", ";").split(";") if a]
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs]
    if "+PTX" in text:  # the PTX of an `a` target runs nowhere else
        portable = min((a for a in archs if a.isdigit()), key=int, default=None)
        if portable:
            flags.append(f"-gencode=arch=compute_{portable},code=compute_{portable}")
    return flags


class BuildExt(build_ext):
    """Compiles in parallel and skips what is up to date. Only --inplace writes beside the sources."""

    def build_extension(self, ext):
        self.cuda = find_cuda()
        if self.cuda:
            check_release(self.cuda)
            self.archs = cuda_archs()
        folder = Path(self.build_temp)
        headers = [h.stat().st_mtime for h in (ROOT / "csrc").rglob("*.[hi]*")] + [Path(__file__).stat().st_mtime]
        newest_header = max(headers)

        sources = [Path(s) for s in ext.sources if self.cuda or not s.endswith(".cu")]
        jobs, objects = [], []
        for source in sorted(sources, key=lambda s: s.suffix != ".cu"):  # nvcc is slow: start it first
            target = folder / source.with_suffix(source.suffix + ".o")
            target.parent.mkdir(parents=True, exist_ok=True)
            objects.append(str(target))
            command = self.nvcc_command() if source.suffix == ".cu" else self.c_command(source.stem)
            job = [*command, "-c", str(source), "-o", str(target)]
            made_by = target.with_suffix(".command")  # other flags make another object
            is_current = target.exists() and made_by.exists() and made_by.read_text() == shlex.join(job)
            if not is_current or target.stat().st_mtime < max(source.stat().st_mtime, newest_header):
                made_by.unlink(missing_ok=True)
                jobs.append((job, made_by))
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.compile_one, jobs))

        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        libraries = ["-lm", "-ldl", "-lpthread"]
        if self.cuda:
            library_dir = next(self.cuda.glob("lib*/libcudart_static.a")).parent
            libraries = [f"-L{library_dir}", "-lcudart_static", "-lrt", *libraries]
        # not self.compiler.linker_so: it carries the rpath of this Python's own build
        link = [self.compiler.compiler_so[0], "-shared", "-fopenmp", *shlex.split(os.environ.get("LDFLAGS", ""))]
        exports = folder / "exports.map"  # OpenMP's critical sections and static libraries would show their own symbols
        exports.write_text("{ global: PyInit__C; local: *; };\n")
        link.append(f"-Wl,--version-script={exports}")
        self.run_one([*link, *objects, *libraries, "-o", str(output)])
        built_for = f"the CPU and CUDA {self.archs}" if self.cuda else "the CPU only"
        print(f"pagedkv: built for {built_for}")

    def c_command(self, stem):
        isa = next((f for suffix, f in ISA_FLAGS.items() if IS_X86 and stem.endswith(suffix)), "")
        includes = [f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_path('include')}", f"-I{numpy.get_include()}"]
        defines = [f'-DPAGEDKV_VERSION="{self.distribution.get_version()}"']
        defines += ["-DPAGEDKV_WITH_CUDA"] if self.cuda else []
        if not FREE_THREADED:
            defines.append("-DPy_LIMITED_API=0x030B0000")
        flags = shlex.split(f"{C_FLAGS} {C_WARNINGS} {isa} {os.environ.get('CFLAGS', '')}")
        return [self.compiler.compiler_so[0], "-fPIC", *flags, *includes, *defines]

    def nvcc_command(self):
        return [str(self.cuda / "bin" / "nvcc"), "-std=c++17", "-O3", "--expt-relaxed-constexpr",
                "--compress-mode=size", *cuda_arch_flags(self.archs), "-Xcompiler", CUDA_HOST_FLAGS,
                f"-I{ROOT / 'csrc'}", "-DPAGEDKV_WITH_CUDA", *shlex.split(os.environ.get("NVCC_FLAGS", ""))]

    def compile_one(self, job):
        command, made_by = job
        made_by.with_suffix(".log").write_text(self.run_one(command))
        made_by.write_text(shlex.join(command))

    def run_one(self, command):
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        said = result.stdout + result.stderr
        if said:
            print(said, file=sys.stderr, flush=True)
        if result.returncode:
            raise SystemExit(f"failed: {shlex.join(map(str, command))}")
        return said


def sources():
    patterns = ("csrc/*.c", "csrc/block_manager/*.c", "csrc/ops/*.c", "csrc/py/*.c", "csrc/cpu/*.c", "csrc/cuda/*.cu")
    return sorted(str(s.relative_to(ROOT)) for pattern in patterns for s in ROOT.glob(pattern))


setup(
    ext_modules=[Extension("pagedkv._C", sources(), py_limited_api=not FREE_THREADED)],
    cmdclass={"build_ext": BuildExt},
    options={} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
