"""Builds pagedkv._C: every csrc/**/*.c with the C compiler, every csrc/cuda/**/*.cu with nvcc, one shared object.

What the build needs (compiler, headers, OpenMP, Python packages) is looked for before the first file is compiled, and
what is missing is named together with its package. `pip install -v .` shows each file as it is done.

Environment:
  CC                  the C compiler. Default: that of this Python's own build; where there is none, cc, gcc or clang
  PAGEDKV_CUDA        auto (default: CUDA where nvcc is found), 0 (never), 1 (fail without nvcc)
  PAGEDKV_CUDA_ARCHS  such as "8.0;9.0a+PTX", where "+PTX" adds portable PTX of the lowest architecture named. Default:
                      that of the GPUs of this machine; where there is none, RELEASE_ARCHS.
  CUDA_HOME           where to look for nvcc first (then CUDA_PATH, PATH, /usr/local/cuda)
  CFLAGS, LDFLAGS     added to the C compiler's and the linker's flags
  NVCC_FLAGS          added to nvcc's flags
"""

import itertools
import logging
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent


def check_python() -> None:
    """Without build isolation (`make build`, pip's --no-build-isolation) the packages are those of the environment."""
    if sys.version_info < (3, 11):  # noqa: UP036  pip looks at requires-python only after this file has run
        sys.exit(f"this is Python {platform.python_version()} but pagedkv needs 3.11 or newer")
    import tomllib

    with (ROOT / "pyproject.toml").open("rb") as file:
        needed = tomllib.load(file)["build-system"]["requires"]
    for each in needed:
        name, _, least = each.partition(">=")
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            version = ""
        if _numbers(version) < _numbers(least):
            packages = " ".join(f"'{one}'" for one in needed)
            sys.exit(
                f"{name} is {version or 'not installed'} but building pagedkv needs {each}: `pip install {packages}`; "
                "pip without --no-build-isolation brings its own"
            )


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version)[:2]]


check_python()

import numpy  # noqa: E402
from setuptools import Extension, setup  # noqa: E402
from setuptools.command.build_ext import build_ext  # noqa: E402

FREE_THREADED = bool(sysconfig.get_config_var("Py_GIL_DISABLED"))
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")

# A CPU file whose name ends so is compiled for that instruction set; csrc/cpu/isa.c picks one at run time.
ISA_FLAGS = {
    "_avx2": "-mavx2 -mfma -mf16c -mbmi2",
    "_avx512": "-mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl",
    "_avx512bf16": "-mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16",
    "_avx512vbmi": "-mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mavx512vbmi",
    "_amx": "-mavx2 -mfma -mf16c -mbmi2 -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512bf16 -mamx-tile -mamx-bf16",
}
RELEASE_ARCHS = "8.0;9.0a;10.0;12.0+PTX"  # 8.6 and 8.9 run the code of 8.0
C_FLAGS = "-std=c11 -O3 -fvisibility=hidden -fno-math-errno -fno-trapping-math -ffp-contract=off -fopenmp"
C_WARNINGS = "-Wall -Wextra -Werror=implicit -Werror=vla"
CUDA_HOST_FLAGS = "-fPIC,-fvisibility=hidden,-fno-exceptions,-fno-rtti,-fno-threadsafe-statics,-Wall"


def c_compiler() -> list[str]:
    """The command, in words."""
    given = shlex.split(os.environ.get("CC", ""))
    tried = given[:1] or [*shlex.split(sysconfig.get_config_var("CC") or "")[:1], "cc", "gcc", "clang"]
    found = next(filter(shutil.which, tried), None)
    if found is None and given:
        sys.exit(f"CC is {os.environ['CC']!r}, but there is no command {given[0]}")
    if found is None:
        sys.exit(f"no C compiler (no command {', '.join(tried)}): gcc is the package (Debian, Ubuntu, Fedora); "
                 "CC= chooses another one")  # fmt: skip
    return given or [found]


def check_compiler(compile_c: list[str], link: list[str], folder: Path) -> None:
    """Ends the build if a header or a library is missing, and says which package has it."""
    suffix = re.search(r"-\d+$", compile_c[0])  # clang-14 wants the libomp of its own release
    python = f"python{sys.version_info.major}.{sys.version_info.minor}"
    packages = {
        "stdlib.h": ("the C library's headers", "libc6-dev", "glibc-devel"),
        "Python.h": (f"the headers of {python}", f"{python}-dev", "python3-devel"),
        "omp.h": ("OpenMP for Clang; GCC has its own", f"libomp{suffix[0] if suffix else ''}-dev", "libomp-devel"),
    }
    asks = "".join(f"#if !__has_include(<{header}>)\n{header}\n#endif\n" for header in packages)
    said = subprocess.run([*compile_c, "-E", "-P", "-x", "c", "-"], input=asks, capture_output=True, text=True)
    missing = [header for header in packages if header in said.stdout.split()]
    if missing:
        lines = [f"{header}, {what}: {apt} (Debian, Ubuntu), {dnf} (Fedora)"
                 for header, (what, apt, dnf) in packages.items() if header in missing]  # fmt: skip
        sys.exit("\n  ".join([f"{compile_c[0]} does not find what pagedkv is built with:", *lines]))
    probe = folder / "probe.c"
    probe.write_text("#include <Python.h>\n#include <omp.h>\nint probe(void) { return omp_get_max_threads(); }\n")
    for command in ([*compile_c, "-c", str(probe), "-o", f"{probe}.o"], [*link, f"{probe}.o", "-o", f"{probe}.so"]):
        said = subprocess.run(command, capture_output=True, text=True)
        if said.returncode:
            sys.exit(f"{said.stdout}{said.stderr}failed: {shlex.join(command)}\n"
                     "pagedkv needs GCC 11 or newer, or Clang 14 or newer with its OpenMP")  # fmt: skip


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
    nothing = [cuda / "bin" / "nvcc", "-x", "cu", "-E", os.devnull]  # needs a C++ compiler all the same
    said = subprocess.run(nothing, capture_output=True, text=True, check=False)
    if said.returncode:
        sys.exit(f"{said.stdout}{said.stderr}nvcc cannot start its C++ compiler: g++ (Debian, Ubuntu), gcc-c++ "
                 "(Fedora); PAGEDKV_CUDA=0 builds for the CPU alone")  # fmt: skip


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
    newer = [a for a in archs if a.isdigit() and int(a) >= 100]  # no kernel asks for more than 9.0: one pass for all
    flags = [f"-gencode=arch=compute_{a},code=sm_{a}" for a in archs if a not in newer]
    if newer:
        flags.append(f"-gencode=arch=compute_90,code=[{','.join(f'sm_{a}' for a in newer)}]")
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
            if not os.environ.get("PAGEDKV_CUDA_ARCHS") and not visible_archs():
                self.announce(f"no GPU is visible, so kernels are compiled for {self.archs}, which takes several times "
                              "as long as one of them: PAGEDKV_CUDA_ARCHS=9.0a chooses", logging.INFO)  # fmt: skip
        self.compiler_command = c_compiler()
        folder = Path(self.build_temp)
        folder.mkdir(parents=True, exist_ok=True)
        check_compiler(self.c_command("_amx"), self.link_command(), folder)
        sources = [Path(s) for s in ext.sources if self.cuda or not s.endswith(".cu")]
        objects = self.compile_all(sources, folder)

        output = Path(self.get_ext_fullpath(ext.name))
        output.parent.mkdir(parents=True, exist_ok=True)
        libraries = ["-lm", "-ldl", "-lpthread"]
        if self.cuda:
            library_dir = next(self.cuda.glob("lib*/libcudart_static.a")).parent
            libraries = [f"-L{library_dir}", "-lcudart_static", "-lrt", *libraries]
        exports = folder / "exports.map"  # OpenMP's critical sections and static libraries would show their own symbols
        exports.write_text("{ global: PyInit__C; local: *; };\n")
        link = [*self.link_command(), f"-Wl,--version-script={exports}"]
        self.run_one([*link, *objects, *libraries, "-o", str(output)])
        built_for = f"the CPU and CUDA {self.archs}" if self.cuda else "the CPU only"
        print(f"pagedkv: built for {built_for}")

    def compile_all(self, sources, folder):
        """The object files. What is newer than its source, all headers and its command stays as it is."""
        headers = [h.stat().st_mtime for h in (ROOT / "csrc").rglob("*.[hi]*")] + [Path(__file__).stat().st_mtime]
        newest_header = max(headers)
        jobs, objects = [], []
        for source in sorted(sources, key=lambda s: s.suffix != ".cu"):  # nvcc is slow: start it first
            target = folder / source.with_suffix(source.suffix + ".o")
            target.parent.mkdir(parents=True, exist_ok=True)
            objects.append(str(target))
            command = self.nvcc_command() if source.suffix == ".cu" else self.c_command(source.stem)
            job = [*command, "-c", str(source), "-o", str(target)]
            made_by = target.with_suffix(".command")  # other flags make another object
            is_current = target.exists() and made_by.exists() and made_by.read_text() == recorded(job)
            if not is_current or target.stat().st_mtime < max(source.stat().st_mtime, newest_header):
                made_by.unlink(missing_ok=True)
                jobs.append((job, made_by))
        self.num_files, self.done, self.start = len(jobs), itertools.count(1), time.monotonic()
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            list(pool.map(self.compile_one, jobs))
        return objects

    def link_command(self):
        """Not self.compiler.linker_so: it carries the rpath of this Python's own build."""
        return [*self.compiler_command, "-shared", "-fopenmp", *shlex.split(os.environ.get("LDFLAGS", ""))]

    def c_command(self, stem):
        isa = next((f for suffix, f in ISA_FLAGS.items() if IS_X86 and stem.endswith(suffix)), "")
        includes = [f"-I{ROOT / 'csrc'}", f"-I{sysconfig.get_path('include')}", f"-I{numpy.get_include()}"]
        defines = [f'-DPAGEDKV_VERSION="{self.distribution.get_version()}"']
        defines += ["-DPAGEDKV_WITH_CUDA"] if self.cuda else []
        if not FREE_THREADED:
            defines.append("-DPy_LIMITED_API=0x030B0000")
        flags = shlex.split(f"{C_FLAGS} {C_WARNINGS} {isa} {os.environ.get('CFLAGS', '')}")
        return [*self.compiler_command, "-fPIC", *flags, *includes, *defines]

    def nvcc_command(self):
        return [str(self.cuda / "bin" / "nvcc"), "-std=c++17", "-O3", "--expt-relaxed-constexpr",
                "--compress-mode=size", *cuda_arch_flags(self.archs), "-Xcompiler", CUDA_HOST_FLAGS,
                f"-I{ROOT / 'csrc'}", "-DPAGEDKV_WITH_CUDA", *shlex.split(os.environ.get("NVCC_FLAGS", ""))]

    def compile_one(self, job):
        command, made_by = job
        made_by.with_suffix(".log").write_text(self.run_one(command))
        made_by.write_text(recorded(command))
        seconds, source = time.monotonic() - self.start, command[command.index("-c") + 1]
        print(f"[{next(self.done)}/{self.num_files}, {seconds:.0f} s] {source}", flush=True)  # -q does not silence it

    def run_one(self, command):
        result = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
        said = result.stdout + result.stderr
        if said:
            print(said, file=sys.stderr, flush=True)
        if result.returncode:
            raise SystemExit(f"failed: {shlex.join(map(str, command))}")
        return said


def recorded(command):
    """As it is compared with that of the next build: pip's NumPy lies in a new folder each time."""
    return shlex.join(command).replace(numpy.get_include(), f"NumPy {numpy.__version__}")


def sources():
    folders = ("", "block_manager", "ops", "py", "cpu")
    found = [s for folder in folders for s in (ROOT / "csrc" / folder).glob("*.c")]
    return sorted(str(s.relative_to(ROOT)) for s in (*found, *(ROOT / "csrc" / "cuda").rglob("*.cu")))


setup(
    ext_modules=[Extension("pagedkv._C", sources(), py_limited_api=not FREE_THREADED)],
    cmdclass={"build_ext": BuildExt},
    options={} if FREE_THREADED else {"bdist_wheel": {"py_limited_api": "cp311"}},
)
