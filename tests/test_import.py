"""What `import pagedkv` costs and brings along; measured in fresh interpreters."""

import importlib.metadata
import os
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import pagedkv
from pagedkv import ops

WHERE = Path(pagedkv.__file__).parent.parent


def run(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], cwd=WHERE, capture_output=True, text=True, check=True).stdout


def test_brings_neither_numpy_nor_torch():
    code = """
import sys
before = set(sys.modules)
import pagedkv
print(*sorted(set(sys.modules) - before))
"""
    assert run(code).split() == ["pagedkv", "pagedkv._C"]


def test_numpy_comes_when_it_is_needed():
    code = """
import sys, pagedkv
tensor = pagedkv.empty(3)
tensor.copy_(pagedkv.empty(3)); tensor.tolist(); tensor[1:]; tensor.view((3, 1))
print('numpy' in sys.modules)
tensor.numpy()
print('numpy' in sys.modules, 'torch' in sys.modules)
"""
    assert run(code).split() == ["False", "True", "False"]


def test_without_numpy():
    """What needs NumPy says so; what does not goes on."""
    code = """
import sys
sys.modules['numpy'] = None  # its import fails
import pagedkv
assert pagedkv.ops.rms_norm(pagedkv.empty((2, 8)), pagedkv.empty(8)).shape == (2, 8)
for call in (lambda: pagedkv.BlockManager(4, 4), lambda: pagedkv.asarray([1.0]), lambda: pagedkv.LLM('.')):
    try:
        call()
    except ImportError as error:
        assert 'numpy' in str(error).lower(), error
    else:
        raise AssertionError
try:
    pagedkv.BlockManager(4, 4)
except ImportError as error:
    assert str(error).startswith("pagedkv's arrays need NumPy 2.0 or later: "), error
assert pagedkv.ops.build_info()['backends'][0] == 'cpu'
"""
    run(code)


def test_import_time():
    """Less than 10 ms; a busy machine may take longer, so the best of several counts."""
    code = "import time; t = time.perf_counter(); import pagedkv; print(time.perf_counter() - t)"
    times = [float(run(code)) for _ in range(7)]
    print(f"import: {min(times) * 1e3:.2f} ms, median {statistics.median(times) * 1e3:.2f} ms")
    assert min(times) < 0.010


@pytest.mark.parametrize("args", [["info"], ["--help"], ["generate", "--help"]], ids=" ".join)
def test_the_command_line_imports_what_a_command_needs(args):
    """These say what is there, and need none of it."""
    code = f"""
import sys
from pagedkv.cli import main
try:
    main({args})
except SystemExit:
    pass
print(*sorted({{name.partition('.')[0] for name in sys.modules}}))
"""
    *said, last = run(code).splitlines()
    heavy = {"huggingface_hub", "jinja2", "numpy", "tokenizers", "torch", "tqdm", "transformers", "xgrammar"}
    if args == ["info"] and not pagedkv.ops.build_info()["blas"].startswith(("none", "oneDNN")):
        heavy.remove("numpy")  # `linear` uses NumPy's BLAS, whose name is asked for
    assert "pagedkv" in last.split() and not heavy & set(last.split())
    assert any("pagedkv" in line for line in said)


@pytest.mark.parametrize(
    ("given", "spins"), [({}, "1000"), ({"GOMP_SPINCOUNT": "77"}, "77"), ({"OMP_WAIT_POLICY": "passive"}, "0")]
)
def test_idle_threads_do_not_spin_for_long(given, spins):
    """libgomp prints what it has read; the environment is left as it was."""
    env = {k: v for k, v in os.environ.items() if k not in ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")} | given
    command = [sys.executable, "-c", "import os, pagedkv; print(os.environ.get('GOMP_SPINCOUNT'))"]
    env["OMP_DISPLAY_ENV"] = "VERBOSE"
    result = subprocess.run(command, cwd=WHERE, env=env, capture_output=True, text=True, check=False)
    assert result.stdout == f"{given.get('GOMP_SPINCOUNT')}\n", result.stderr
    if "GOMP_SPINCOUNT" not in result.stderr:
        pytest.skip("another OpenMP runtime than libgomp")
    assert f"GOMP_SPINCOUNT = '{spins}'" in result.stderr


def test_version_is_one():
    try:
        installed = importlib.metadata.version("pagedkv")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("imported from a checkout that is not installed")
    assert installed == pagedkv.__version__ == ops.build_info()["version"]


def test_version_in_the_checkout():
    pyproject = Path(__file__).parents[1] / "pyproject.toml"
    if not pyproject.exists():
        pytest.skip("not a checkout")
    assert f'version = "{pagedkv.__version__}"' in pyproject.read_text()


def test_imports_in_a_second_interpreter_state():
    """Multi-phase initialisation: a fresh module object has its own state and works."""
    code = """
import sys, pagedkv, importlib
first = pagedkv._C
for name in [n for n in sys.modules if n.startswith('pagedkv')]: del sys.modules[name]
import pagedkv as again
assert again._C is not first and again.Tensor is not first.Tensor
old, new = first.asarray([1.0, 2.0]), again.asarray([3.0, 4.0])
new.copy_(old)  # a Tensor of another module object is just a tensor
print(new.tolist())
del first, old
import gc; gc.collect()
print(again.empty(3).view((3, 1)).shape)
"""
    assert run(code).splitlines() == ["[1.0, 2.0]", "(3, 1)"]


# --- the folder of the sources, whose extension was not built


@pytest.fixture
def sources(tmp_path) -> Path:
    """The package without its extension, as a fresh checkout has it; the folder that holds it."""
    package, ignored = Path(pagedkv.__file__).parent, shutil.ignore_patterns("_C*.so", "data")
    shutil.copytree(package, tmp_path / "checkout" / "pagedkv", ignore=ignored)
    shutil.copytree(package, tmp_path / "site" / "pagedkv", ignore=shutil.ignore_patterns("data"))
    return tmp_path / "checkout"


def start(where: Path, *args: str, path: str = "") -> subprocess.CompletedProcess:
    """Python in this folder, without what is installed but for `path`."""
    env = os.environ | {"PYTHONPATH": f"{where}{os.pathsep}{path}"}
    return subprocess.run([sys.executable, "-S", *args], cwd=where, env=env, capture_output=True, text=True, check=False)


def test_sources_without_extension_say_what_to_do(sources):
    result = start(sources, "-c", "import pagedkv")
    said = result.stderr.splitlines()[-1]
    assert result.returncode == 1
    assert said.startswith(f"ImportError: pagedkv was imported from {sources / 'pagedkv'}, which has no compiled extension")
    assert "`pip install .`" in said and "`make build`" in said


def test_in_the_folder_of_the_sources_the_installed_package_is_imported(sources):
    """All of it, and a warning says so."""
    site = sources.parent / "site"
    code = "import pagedkv, pagedkv.cli, sys; print(*{m.__file__ for n, m in sys.modules.items() if n.startswith('pagedkv')})"
    for args in (("-c", code), ("-c", code.replace("import pagedkv,", "import pagedkv.cli.info, pagedkv,"))):
        result = start(sources, *args, path=str(site))
        assert result.returncode == 0 and all(each.startswith(str(site)) for each in result.stdout.split()), result.stdout
        assert f"UserWarning: {sources / 'pagedkv'} has no compiled extension: this is the pagedkv of {site}" in result.stderr
    assert start(sources, "-m", "pagedkv", "--version", path=str(site)).stdout == f"pagedkv {pagedkv.__version__}\n"
    (extension,) = (site / "pagedkv").glob("_C*.so")
    shutil.copy(extension, sources / "pagedkv")  # as `make build` leaves it
    result = start(sources, "-c", code, path=str(site))
    assert all(each.startswith(str(sources)) for each in result.stdout.split()) and result.stderr == ""


def test_an_extension_that_does_not_load_keeps_its_own_error(sources):
    (sources / "pagedkv" / "_C.abi3.so").write_bytes(b"no ELF file")
    result = start(sources, "-c", "import pagedkv", path=str(sources.parent / "site"))
    said = result.stderr.splitlines()[-1]
    assert result.returncode == 1 and "_C.abi3.so" in said and "pip install" not in said


# --- other interpreters

SUBINTERPRETER = """
import sys, _interpreters
sys.path.insert(0, sys.argv[1])
import pagedkv  # the main interpreter has it
config = _interpreters.new_config('isolated', gil=sys.argv[2])
error = _interpreters.run_string(_interpreters.create(config), f'import sys; sys.path[:0] = {sys.path!r}; import pagedkv')
print(error and error.formatted)
"""


@pytest.mark.parametrize("version", ["3.13", "3.14"])
@pytest.mark.parametrize("gil", ["shared", "own"])
def test_a_subinterpreter_cannot_import_it(version, gil):
    """NumPy's API belongs to one interpreter. Before 3.12 a module cannot say so; 3.13 can ask it easily."""
    python = sys.executable if sys.version_info[:2] == tuple(map(int, version.split("."))) else f"python{version}"
    try:
        done = subprocess.run([python, "-c", SUBINTERPRETER, WHERE, gil], capture_output=True, text=True, timeout=60)
    except FileNotFoundError:
        pytest.skip(f"no {python}")
    if done.returncode in (126, 127):  # what stands for a Python that is not there
        pytest.skip(f"no {python}")
    assert done.stdout == "ImportError: module pagedkv._C does not support loading in subinterpreters\n", done.stderr
