"""setup.py finds compilers, headers and CUDA, or says why not and what to install, before it compiles a file: the three
modes of PAGEDKV_CUDA, and nvcc's architecture flags. What nvcc says of the kernels: memory beside their registers, and
shared memory beside that of every card."""

import importlib.metadata
import importlib.util
import re
import shutil
import sys
import sysconfig
import types
from pathlib import Path

import pytest
from cards import CARDS
from test_experts_plan import LIST
from test_linear_few_plan import SQUARES

from pagedkv import ops

SETUP = Path(__file__).parent.parent / "setup.py"


@pytest.fixture
def build(monkeypatch) -> types.ModuleType:
    """setup.py as a module, without running it; no toolkit is to be found anywhere."""
    if not SETUP.exists():
        pytest.skip("not a checkout")
    setuptools = pytest.importorskip("setuptools")
    monkeypatch.setattr(setuptools, "setup", lambda **options: None)
    spec = importlib.util.spec_from_file_location("pagedkv_setup", SETUP)
    module = importlib.util.module_from_spec(spec)
    with monkeypatch.context() as patch:  # Debian's setuptools are older than what a build needs
        patch.setattr(importlib.metadata, "version", lambda name: "99")
        spec.loader.exec_module(module)
    for name in ("CUDA_HOME", "CUDA_PATH", "PAGEDKV_CUDA", "PAGEDKV_CUDA_ARCHS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: not str(self).startswith("/usr/local/cuda") and exists(self))
    return module


PYTHON = f"python{sys.version_info.major}.{sys.version_info.minor}"
INCLUDES = f"-I{sysconfig.get_path('include')}"
GCC = shutil.which("gcc") or "gcc"


def check_compiler(build, folder: Path, *compile_c: str, link: tuple[str, ...] = (GCC, "-shared", "-fopenmp")) -> str:
    """What it ends with; "": it found everything."""
    try:
        build.check_compiler(list(compile_c), list(link), folder)
    except SystemExit as exit:
        return str(exit.code)
    return ""


@pytest.mark.skipif(not shutil.which("gcc"), reason="needs GCC")
def test_what_is_missing_is_named_with_its_package(build, tmp_path):
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        pytest.skip("this Python has no headers")
    assert check_compiler(build, tmp_path, GCC, "-fPIC", "-fopenmp", INCLUDES) == ""
    said = check_compiler(build, tmp_path, GCC, "-fPIC", "-fopenmp")
    assert f"{GCC} does not find" in said and f"Python.h, the headers of {PYTHON}: {PYTHON}-dev (Debian" in said
    assert "omp.h" not in said and "libc6-dev" not in said
    said = check_compiler(build, tmp_path, GCC, "-nostdinc", f"-I{tmp_path}")
    assert "libc6-dev" in said and "python3-devel" in said and "libomp-dev" in said and said.count("\n") == 3
    said = check_compiler(build, tmp_path, GCC, "-fPIC", "-fopenmp", INCLUDES, "-msomething-new")
    assert "-msomething-new" in said and "GCC 11 or newer, or Clang 14" in said
    said = check_compiler(build, tmp_path, GCC, "-fPIC", "-fopenmp", INCLUDES, link=(GCC, "-shared", "-lnowhere"))
    assert "-lnowhere" in said and "GCC 11 or newer, or Clang 14" in said


def test_the_openmp_of_clangs_own_release(build, tmp_path):
    clang = tmp_path / "clang-14"
    clang.write_text("#!/bin/sh\necho omp.h\n")
    clang.chmod(0o755)
    said = check_compiler(build, tmp_path, str(clang))
    assert "libomp-14-dev (Debian" in said and "Python.h" not in said


def test_the_compiler_is_found_or_named(build, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(SystemExit, match=r"no C compiler \(no command .*, cc, gcc, clang\): gcc is the package"):
        build.c_compiler()
    monkeypatch.setattr(build.shutil, "which", {"clang": "/usr/bin/clang", "ccache": "/usr/bin/ccache"}.get)
    assert build.c_compiler() == ["clang"]  # this Python's own was another
    monkeypatch.setenv("CC", "ccache gcc -m64")
    assert build.c_compiler() == ["ccache", "gcc", "-m64"]
    monkeypatch.setenv("CC", "tcc")
    with pytest.raises(SystemExit, match="CC is 'tcc', but there is no command tcc"):
        build.c_compiler()


@pytest.mark.parametrize("installed, message", [
    ({"setuptools": "77.0.3", "numpy": "2.0.0"}, None),
    ({"setuptools": "80", "numpy": "2.4.6"}, None),
    ({"setuptools": "65.5.0", "numpy": "2.4.6"}, "setuptools is 65.5.0 but building pagedkv needs setuptools>=77"),
    ({"setuptools": "80.9.0"}, "numpy is not installed but .*: `pip install 'setuptools>=77' 'numpy>=2.0'`"),
    ({"setuptools": "80.9.0", "numpy": "1.26.4"}, "numpy is 1.26.4 but building pagedkv needs numpy>=2.0"),
])  # fmt: skip
def test_without_build_isolation_packages_are_checked(build, monkeypatch, installed, message):
    def version(name):
        if name not in installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return installed[name]

    monkeypatch.setattr(build.metadata, "version", version)
    if message is None:
        build.check_python()
    else:
        with pytest.raises(SystemExit, match=message):
            build.check_python()


def test_without_nvcc(build, monkeypatch):
    assert build.find_cuda() is None
    monkeypatch.setenv("PAGEDKV_CUDA", "1")
    with pytest.raises(SystemExit, match="PAGEDKV_CUDA=1 but no nvcc .*: looked in CUDA_HOME, CUDA_PATH, PATH, /usr"):
        build.find_cuda()
    monkeypatch.setenv("PAGEDKV_CUDA", "yes")
    with pytest.raises(SystemExit, match="PAGEDKV_CUDA is 'yes' but must be auto, 0 or 1"):
        build.find_cuda()


def test_with_nvcc(build, monkeypatch, tmp_path):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvcc").touch()
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    assert build.find_cuda() is None  # a wrapper with no toolkit around it
    (tmp_path / "lib64").mkdir()
    (tmp_path / "lib64" / "libcudart_static.a").touch()
    assert build.find_cuda() == tmp_path
    monkeypatch.setenv("PAGEDKV_CUDA", "0")
    assert build.find_cuda() is None


def test_old_toolkit(build, tmp_path):
    nvcc = tmp_path / "bin" / "nvcc"
    nvcc.parent.mkdir()
    for release, is_enough in [("11.8", False), ("12.6", False), ("12.8", True), ("13.0", True)]:
        nvcc.write_text(f"#!/bin/sh\necho 'Cuda compilation tools, release {release}, V{release}.88'\n")
        nvcc.chmod(0o755)
        if is_enough:
            build.check_release(tmp_path)
        else:
            with pytest.raises(SystemExit, match=f"is CUDA {release} but pagedkv needs 12.8 or newer; PAGEDKV_CUDA=0 "):
                build.check_release(tmp_path)


def test_pips_own_numpy_makes_no_new_objects(build, monkeypatch):
    """Each build of pip's has its NumPy in another folder: the second of two would compile all files again."""
    said = []
    for folder in ("/tmp/pip-build-env-a/numpy/include", "/tmp/pip-build-env-b/numpy/include"):
        monkeypatch.setattr(build.numpy, "get_include", lambda folder=folder: folder)
        said.append(build.recorded(["cc", f"-I{folder}", "-c", "a b.c"]))
    assert said[0] == said[1] and build.numpy.__version__ in said[0] and said[0].endswith("-c 'a b.c'")
    assert build.recorded(["cc", "-O2"]) != build.recorded(["cc", "-O3"])


def test_architectures(build):
    assert build.cuda_arch_flags("8.0;9.0a+PTX") == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_80,code=compute_80",
    ]
    assert build.cuda_arch_flags("9.0a") == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert build.cuda_arch_flags("9.0a;10.0;12.0") == [
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_90,code=[sm_100,sm_120]",  # one pass for both
    ]


@pytest.mark.parametrize("said, archs", [
    ("9.0", "9.0a"), ("8.9\n9.0\n8.9", "8.9;9.0a"), ("12.0\n8.6", "8.6;12.0"), ("10.0", "10.0"),
    ("7.5", None), ("7.5\n9.0", "9.0a"), ("", None), ("[N/A]\n9.0", "9.0a"), ("No devices were found; exit 6", None),
])  # fmt: skip
def test_default_architectures_are_those_of_the_visible_gpus(build, monkeypatch, tmp_path, said, archs):
    assert build.cuda_archs() == build.RELEASE_ARCHS  # no driver
    smi = tmp_path / "nvidia-smi"
    text, _, code = said.partition("; ")
    smi.write_text(f"#!/bin/sh\nprintf '{text}\\n'\n{code}\n")
    smi.chmod(0o755)
    monkeypatch.setattr(build.shutil, "which", {"nvidia-smi": str(smi)}.get)
    assert build.visible_archs() == archs and build.cuda_archs() == (archs or build.RELEASE_ARCHS)
    monkeypatch.setenv("PAGEDKV_CUDA_ARCHS", "8.0")
    assert build.cuda_archs() == "8.0"


@pytest.mark.parametrize("asked", ["9.0", "9.0+PTX", "8.0;9.0", "9.0 8.6", "90"])
def test_hopper_without_its_own_instructions_is_refused(build, monkeypatch, asked):
    monkeypatch.setenv("PAGEDKV_CUDA_ARCHS", asked)
    with pytest.raises(SystemExit, match=f"PAGEDKV_CUDA_ARCHS is '{re.escape(asked)}': write 9.0a, since 9.0 has no "):
        build.cuda_archs()
    for accepted in ("9.0a", "9.0a+PTX", "8.0+PTX", "8.0;9.0a;12.0+PTX"):
        monkeypatch.setenv("PAGEDKV_CUDA_ARCHS", accepted)
        assert build.cuda_archs() == accepted


# --- local memory: of a build with NVCC_FLAGS=--resource-usage, whose log lies beside each object

# Kernels (a pattern of the mangled name) that may spill registers or keep arrays in memory on sm_90a, up to so many
# bytes a thread, and why.
ALLOWED_LOCAL_MEMORY = [
    (r"attention_prefill_kernelI", 336, "the rare path that scores a tile again: the scores, so that its loop stays a loop; "
                                        "and some of the list of items, whose warp has 32 or 40 registers"),
    (r"attention_decode_kernelI.*Li256E", 80, "what 255 registers do not hold of rows of 256 dims: addresses, read once a turn"),
    (r"linear_few_quantised_kernelI.*quantised_int4", 32, "small groups, whose scales are many: some of what a CTA has once, beside x "
                                                          "and them: 128 registers are what two CTAs leave"),
    (r"expert_few_kernelI(10expert_fp8|11expert_int4)", 24, "the same, and the scales of a line"),
    (r"expert_any_kernelI", 32, "the eight values that a thread decodes at once"),
    (r"sample_kernelI.*Lb1E", 24, "six of its 64 registers, in the filters: 1024 threads an SM are worth more"),
]


def local_memory(log: str) -> dict[tuple[str, str], int]:
    """(architecture, function) -> bytes of its stack frame."""
    found, arch, function = {}, "", ""
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '.*' for '(\w+)'", line):
            arch = match[1]
        elif match := re.search(r"Function properties for (\S+)", line):
            function = match[1]
        elif match := re.search(r"(\d+) bytes stack frame", line):
            found[arch, function] = int(match[1])
    return found


def test_local_memory_is_read():
    log = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function '_Z1fv' for 'sm_90a'
ptxas info    : Function properties for _Z1fv
    208 bytes stack frame, 84 bytes spill stores, 120 bytes spill loads
ptxas info    : Used 168 registers, used 9 barriers, 208 bytes cumulative stack size
"""
    assert local_memory(log) == {("sm_90a", "_Z1fv"): 208}


def log_of_kernels() -> list[str]:
    """What the compiler said in the newest build here."""
    folders = sorted(SETUP.parent.glob("build/temp*/csrc/cuda"), key=lambda folder: folder.stat().st_mtime)
    logs = [path.read_text() for path in folders[-1].rglob("*.log")] if folders else []
    if not any(map(local_memory, logs)):
        pytest.skip("no kernels were built here with NVCC_FLAGS=--resource-usage")
    return logs


def compiled_functions() -> dict[str, int]:
    """For sm_90a: function -> bytes of its stack frame."""
    return {function: size for log in log_of_kernels() for (arch, function), size in local_memory(log).items()
            if arch == "sm_90a"}  # fmt: skip


def test_no_kernel_uses_local_memory_beyond_the_allowance():
    kernels = compiled_functions()
    allowed = {name: max((most for pattern, most, _ in ALLOWED_LOCAL_MEMORY if re.search(pattern, name)), default=0)
               for name in kernels}  # fmt: skip
    assert {name: size for name, size in kernels.items() if size > allowed[name]} == {}
    assert not kernels or len(kernels) > 100  # none was left out


# --- shared memory: of the same build, and what launchers ask for


def declared_bytes(log: str) -> dict[tuple[str, str], int]:
    """(architecture, function) -> bytes of shared memory that it declares."""
    found, key = {}, ("", "")
    for line in log.splitlines():
        if match := re.search(r"Compiling entry function '(\S+)' for '(\w+)'", line):
            key = match[2], match[1]
        elif re.search(r"Used \d+ registers", line) and key[1]:
            found[key] = int(match[1]) if (match := re.search(r"(\d+) bytes smem", line)) else 0
            key = "", ""
    return found


def test_declared_bytes_are_read():
    log = """ptxas info    : Compiling entry function '_Z1fv' for 'sm_86'
ptxas info    : Function properties for _Z1fv
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 64 registers, used 1 barriers, 23936 bytes smem
ptxas info    : Compiling entry function '_Z1gv' for 'sm_86'
ptxas info    : Used 16 registers, used 0 barriers
ptxas info    : Function properties for _Z1h
ptxas info    : Used 12 registers
"""
    assert declared_bytes(log) == {("sm_86", "_Z1fv"): 23936, ("sm_86", "_Z1gv"): 0}


def test_no_kernel_takes_more_shared_memory_than_a_card_has():
    """What each instance declares, in any architecture that was compiled, and asks for on each card. Kernels without a table
    ask for no more than every card has without being told (48 KB), and launches refuse the rest."""
    declared = {name: size for log in log_of_kernels() for (_, name), size in declared_bytes(log).items()}
    assert len(declared) > 100 and max(declared.values()) < 48 << 10
    beyond, asked_for = {}, set()
    for each in ops.kernel_instances():
        its = f"{len(each['kernel'])}{each['kernel']}I"
        most = max(size for name, size in declared.items() if its in name)
        for card in CARDS:
            asked = each["smem_bytes"][card.arch]
            if asked is None:
                continue
            asked_for.add((each["kernel"], card.arch))
            if most + asked > card.smem_per_cta:
                beyond[each["kernel"], each["variant"], each["reads"], each["head_dim"], card.arch] = most, asked
    assert beyond == {}
    for kernel in ("attention_decode_kernel", "attention_prefill_sm80_kernel", "linear_few_kernel", "linear_few_quantised_kernel",
                   "expert_few_kernel", "sample_kernel"):  # fmt: skip
        assert {arch for name, arch in asked_for if name == kernel} == {card.arch for card in CARDS}
    assert all(size > 0 for name, size in declared.items() if "sm90a_probe_kernel" in name)  # how a Hopper's code is known
    few = max(size for name, size in declared.items() if "17linear_few_kernelI" in name)
    assert few == SQUARES  # what plans of it count on
    assert max(size for name, size in declared.items() if "17expert_few_kernelI" in name) == LIST  # the same
    assert all(size == 0 for name, size in declared.items() if "attention_decode_kernelI" in name)  # the same
