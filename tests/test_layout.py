"""A folder is a dependency rule: what may include or import what, and what the built binary needs and shows."""

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pagedkv._C
from pagedkv.models.registry import FAMILIES

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


# What the files of a folder may include, beside those of their own. A folder knows only what is below it.
BELOW = {
    "": set(),
    "block_manager": {""},
    "ops": {""},
    "cpu": {"", "ops"},
    "cuda": {"", "ops"},
    "cuda/attention": {"", "ops", "cuda", "cuda/attention/plan"},
    "cuda/attention/plan": {"", "ops", "cuda", "cuda/attention"},
    "cuda/attention/decode": {"", "ops", "cuda", "cuda/attention", "cuda/attention/plan"},
    "cuda/attention/prefill": {"", "ops", "cuda", "cuda/attention", "cuda/attention/plan"},
    "cuda/comm": {"", "ops", "cuda"},
    "cuda/linear": {"", "ops", "cuda"},
    "cuda/experts": {"", "ops", "cuda", "cuda/linear"},
    "cuda/sample": {"", "ops", "cuda", "cuda/linear"},
    "cuda/step": {"", "ops", "cuda", "cuda/sample"},
    "py": {"", "ops", "block_manager"},
}


def folder_of(path: str) -> str:
    return path.rpartition("/")[0]


def test_no_include_goes_up():
    for source in SOURCES:
        folder = folder_of(str(source.relative_to(ROOT / "csrc")))
        for included in re.findall(r'#\s*include\s*"([^"]+)"', source.read_text()):
            assert (ROOT / "csrc" / included).exists(), f"{source} includes {included}: paths are from csrc"
            assert folder_of(included) in BELOW[folder] | {folder}, f"{source} includes {included}"


def test_backends_know_of_the_operations_only_what_they_get():
    """Headers with arguments and the list of entries; how calls are checked is none of their business."""
    for source in SOURCES:
        if source.relative_to(ROOT / "csrc").parts[0] in ("cpu", "cuda"):
            assert not re.search(r'"ops/(check|shared)\.h"', source.read_text()), source


def test_only_dispatch_knows_what_was_built():
    assert where(r"#\s*(if|ifdef|ifndef|elif).*PAGEDKV_WITH_CUDA") == {"csrc/ops/dispatch.c"}
    assert outside(where(r"\bpk_cpu_\w+"), "csrc/cpu/") == {"csrc/ops/dispatch.c"}
    assert outside(where(r"\bpk_cuda_\w+"), "csrc/cuda/") == {"csrc/ops/dispatch.c"}


TOPICS = sorted(p.stem for p in (ROOT / "csrc" / "ops").glob("*.c") if p.stem not in ("check", "dispatch", "weight"))


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_has_the_same_name_in_every_folder(topic):
    for path in (f"ops/{topic}.h", f"cpu/{topic}.c"):
        assert (ROOT / "csrc" / path).exists(), path
    assert len(list((ROOT / "csrc" / "cuda").rglob(f"{topic}.cu"))) == 1
    assert topic == "copy" or (ROOT / "csrc" / "py" / f"{topic}.c").exists()  # copy is a method of Tensor


def operations() -> dict[str, str]:
    """Every name of PK_OPS, and the file of csrc/py that has it."""
    text = (ROOT / "csrc" / "ops" / "backend.h").read_text()
    names = re.findall(r"\b(?:OP|VIA)\((\w+)", text.partition("#define PK_OPS(OP, VIA)")[2].partition("\n\n")[0])
    assert len(names) > 20
    homes = {p.stem: p.read_text() for p in (ROOT / "csrc" / "py").glob("*.c")}
    declared = re.compile(r"\bPY_OP(?:_RETURNING)?\((\w+),")
    found = {name: [home for home, code in homes.items() if name in declared.findall(code)] for name in names}
    return {name: home for name, (home,) in found.items()}


def test_every_operation_is_in_the_file_of_its_topic():
    assert not {name: home for name, home in operations().items() if home not in TOPICS}


def test_every_operation_is_called_by_the_tests_of_its_topic():
    """The Makefile runs test_<topic>.py under the sanitizers. What has no such call needs a GPU for all it does."""
    for name, topic in operations().items():
        tests = [p for p in (ROOT / "tests" / f"test_{topic}.py", ROOT / "tests" / f"test_{topic}_cuda.py") if p.exists()]
        assert any(re.search(rf"\b(ops|pagedkv)\.{name}\b", p.read_text()) for p in tests), (
            f"tests/test_{topic}.py does not call {name}, so `make asan` and `make sanitize-gpu` do not, either"
        )


def test_every_topic_is_run_under_the_sanitizers():
    if not shutil.which("make"):
        pytest.skip("no make")
    for target in ("asan", "sanitize-gpu"):
        command = ["make", "--dry-run", "--silent", target]
        said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        run = set(re.findall(r"tests/test_\w+\.py", said))
        assert {f"tests/test_{topic}.py" for topic in operations().values()} <= run
        assert all((ROOT / path).exists() for path in run)


# --- no circle: which file calls which, by the functions and variables that it defines and that others name


def without_comments_and_strings(text: str) -> str:
    """Without what looks like a function before the name of a kernel, either."""
    return re.sub(r"/\*.*?\*/|//[^\n]*|\"(?:\\.|[^\"\\])*\"|__launch_bounds__\([^)]*\)", "", text, flags=re.S)


def calls(folder: str, suffix: str) -> dict[str, set[str]]:
    root = ROOT / "csrc" / folder
    texts = {str(p.relative_to(root)): without_comments_and_strings(p.read_text()) for p in root.rglob(f"*{suffix}")}
    start = r"^(?!static|typedef|extern|return|else|#|\s)"
    homes = {}
    for name, text in texts.items():
        for pattern in (start + r"[\w\s*]*?\b(\w+)\([^;{]*?\)\s*\{", start + r"[\w *]*?\b(\w+)(?:\[\w*\])? = "):
            homes |= {match[1]: name for match in re.finditer(pattern, text, re.M)}
    assert len(homes) > 10
    named = {name: {homes[word] for word in re.findall(r"\w+", text) if word in homes} for name, text in texts.items()}
    return {name: others - {name} for name, others in named.items()}


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Takes away what calls nothing that is left, again and again; what stays calls in a circle."""
    left = {name: set(others) for name, others in graph.items()}
    while leaves := [name for name, others in left.items() if not others & left.keys()]:
        for name in leaves:
            del left[name]
    return sorted(left)


def test_a_circle_would_be_found():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}, "d": set()}) == ["a", "b", "c"]


@pytest.mark.parametrize("folder, suffix", [("py", ".c"), ("ops", ".c"), ("cpu", ".c"), ("cuda", ".cu")])
def test_no_files_call_each_other_in_a_circle(folder, suffix):
    assert circle(calls(folder, suffix)) == []


# --- Python: which module imports which, within functions and for type checkers, too

# What lies in a folder, or is a module, may import what stands above it and its own folder's modules. All that is named
# before its folder stands apart from it.
ORDER = (
    "pagedkv.checks", "pagedkv.optional", "pagedkv.threads", "pagedkv.pool_picture", "pagedkv.tuning", "pagedkv.ops", "pagedkv.progress",
    "pagedkv.torch", "pagedkv.parallel", "pagedkv.models",
    "pagedkv.engine.structured_outputs", "pagedkv.engine.sampling_params", "pagedkv.engine.lora_request",
    "pagedkv.engine.speculative_config",
    "pagedkv.engine.options", "pagedkv.engine.traffic", "pagedkv.engine.outputs", "pagedkv.engine.text",
    "pagedkv.engine.scheduling", "pagedkv.engine.sampling", "pagedkv.engine.cache", "pagedkv.engine.runner",
    "pagedkv.engine.speculation", "pagedkv.engine.requests", "pagedkv.engine", "pagedkv.replicas", "pagedkv.compat", "pagedkv.integrations",
    "pagedkv.serve", "pagedkv.cli", "pagedkv",
)  # fmt: skip
# These show names of modules that stand below, and import them when a name is used first.
FACADES = {"pagedkv", "pagedkv.engine", "pagedkv.ops"}
PYTHON = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted((ROOT / "pagedkv").rglob("*.py"))
}


def imports_of(module: str, text: str) -> set[str]:
    """The modules of pagedkv that this one imports. `import_module` is for the facades, and for
    the registry of models, which no family imports."""
    package = module if PYTHON[module].name == "__init__.py" else module.rpartition(".")[0]
    nodes = list(ast.walk(ast.parse(text)))
    if module in FACADES:
        shown = [node for node in nodes if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
        hidden = {inner for node in shown for inner in ast.walk(node)}
        nodes = [node for node in nodes if node not in hidden]
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, *([base] if base else [])])
            for name in node.names:  # a module, or a name within one
                whole = f"{base}.{name.name}"
                found.add(whole if whole in PYTHON else base)
    return {name for name in found if name in PYTHON and name != module}


IMPORTS = {module: imports_of(module, path.read_text()) for module, path in PYTHON.items()}


def place(module: str) -> int:
    """Where it stands in ORDER."""
    return next(i for i, name in enumerate(ORDER) if module == name or module.startswith(f"{name}."))


def test_no_modules_import_each_other_in_a_circle():
    assert len(IMPORTS) > 80 and sum(map(len, IMPORTS.values())) > 200
    assert circle(IMPORTS) == []


def test_no_import_goes_up():
    assert {(m, name) for m, names in IMPORTS.items() for name in names if name != "pagedkv" and place(name) > place(m)} == set()


def test_an_import_within_a_function_would_be_found():
    text = "if TYPE_CHECKING:\n    from ..core import EngineCore\ndef f():\n    from pagedkv.engine import llm\n"
    assert imports_of("pagedkv.engine.text.chat", text) == {"pagedkv.engine.core", "pagedkv.engine.llm"}


def test_the_engine_names_no_family_of_models():
    """Its code: registry.py alone knows them. What people read may have a name as an example."""
    for module, path in PYTHON.items():
        if module.startswith("pagedkv.engine"):
            names = {ast.unparse(n) for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, (ast.Name, ast.Attribute))}
            assert not [name for name in names if any(family in name.lower() for family in FAMILIES)], module
            assert not IMPORTS[module] & {"pagedkv.models.config", *(f"pagedkv.models{name}" for name in FAMILIES.values())}, module


def test_the_environment_is_read_at_import_only():
    """getenv beside setenv of another thread (os.environ[...] = ...) reads memory that was freed."""
    assert where(r"\b(secure_)?(getenv|setenv|putenv|unsetenv|environ)\b") <= {"csrc/environment.c", "csrc/environment.h"}
    calls = where(r"\bgetenv\(\w")
    assert calls == {"csrc/environment.c"} and where(r"\bpk_read_environment\(&") == {"csrc/py/module.c"}


def test_the_gil_is_let_go_of_in_one_file():
    """It knows which threads are without; a backend that pauses must not let go of it twice."""
    assert where(r"\bPyEval_SaveThread\(|\bPy_BEGIN_ALLOW_THREADS\b") == {"csrc/py/gil.c"}


def test_fork_knows_every_mutex():
    """A child of fork() would wait for ever for one that another thread held. csrc/cuda is refused there before it takes
    one (device.cu, and py_is_alive where something is given back)."""
    assert outside(where(r"\bpthread_(mutex|rwlock|spinlock|cond)_t\b"), "csrc/cuda/") == {
        "csrc/cpu/blas.c", "csrc/py/lock.c", "csrc/py/lock.h",
    }  # fmt: skip
    assert where(r"#pragma omp (critical|atomic|ordered)|\bomp_\w*lock\b") == set()
    assert {"csrc/cpu/blas.c", "csrc/py/lock.c", "csrc/cuda/device.cu"} <= where(r"\bpthread_atfork\(")


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
    allowed = {
        "libc.so.6", "libm.so.6", "libgomp.so.1", "libomp.so.5", "libpthread.so.0", "libdl.so.2", "librt.so.1",
        "ld-linux-x86-64.so.2",
    }
    sanitizers = {name for name in needed if re.match(r"lib(asan|ubsan)\.so", name)}
    assert needed - sanitizers <= allowed
    folders = re.findall(r"R(?:UN)?PATH.*\[(.*?)\]", dynamic)
    assert all(Path(folder, "libomp.so.5").exists() for folder in folders)  # Clang names the folder of its OpenMP
