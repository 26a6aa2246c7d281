"""The programs and the notebook in examples/ run, and check themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
sys.path.insert(0, str(ROOT / "tools"))


def run(name: str, *options: str) -> str:
    result = subprocess.run([sys.executable, str(EXAMPLES / name), *options], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def test_the_readme_lists_them():
    listed = (EXAMPLES / "README.md").read_text()
    names = [path.name for path in EXAMPLES.iterdir() if path.suffix in (".py", ".ipynb")]
    assert len(names) >= 7 and [name for name in names if f"]({name})" not in listed] == []


# --- the notebook


def texts(notebook) -> list[list[str]]:
    """What the outputs of each cell say, but for warnings: Matplotlib's first use on a machine may give one."""
    outputs = [cell.get("outputs", []) for cell in notebook.cells]
    kept = [[each for each in cell if each.get("name") != "stderr"] for cell in outputs]
    return [[each["text"] if "text" in each else each["data"]["text/plain"] for each in cell] for cell in kept]


def test_the_notebook_holds_what_it_does():
    for name in ("nbclient", "ipykernel", "matplotlib"):
        pytest.importorskip(name, reason=f"{name}, which is in the extra `test`, executes or draws the notebook")
    import nbformat
    from execute_notebook import execute

    path = EXAMPLES / "block_manager.ipynb"
    committed, executed = nbformat.read(path, as_version=4), execute(path)
    assert texts(executed) == texts(committed), "python tools/execute_notebook.py examples/block_manager.ipynb"
    for notebook in (executed, committed):
        outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
        assert sum("image/png" in output.get("data", {}) for output in outputs) == 2
    assert not any("execution" in cell.metadata for cell in committed.cells), "times differ from run to run"
    assert path.stat().st_size < 200_000


def test_a_line_that_leaves_in_parts_is_one_output(tmp_path):
    pytest.importorskip("nbclient", reason="nbclient, which is in the extra `test`, executes the notebook")
    pytest.importorskip("ipykernel", reason="ipykernel, which is in the extra `test`, executes the notebook")
    import nbformat
    from execute_notebook import execute

    source = "import time\nfor part in range(3):\n    print(part, end=' ', flush=True)\n    time.sleep(0.3)"
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source)])
    notebook.metadata.language_info = {"name": "python"}
    nbformat.write(notebook, path := tmp_path / "parts.ipynb")
    assert texts(execute(path)) == [["0 1 2 "]]


# --- PyTorch


def test_a_loop_in_pytorch(seed, device):
    pytest.importorskip("torch", reason="the example is one of PyTorch")
    shown = run("pytorch_loop.py", "--device", device, "--seed", str(seed), "--num-prompts", "11")
    assert shown.count("as PyTorch") == 11


def test_a_graph_of_pytorch(seed, device):
    pytest.importorskip("torch", reason="the example is one of PyTorch")
    first, *sequences = run("torch_cuda_graph.py", "--device", device, "--seed", str(seed)).splitlines()
    assert first.startswith("no graph" if device == "cpu" else "one graph")
    assert sum("of float32" in line for line in sequences) == len(sequences) == 4


def test_a_hugging_face_model(seed, device):
    pytest.importorskip("transformers", reason="the example changes a model of theirs")
    assert run("hugging_face_attention.py", "--device", device, "--seed", str(seed)).count("as before") == 5


# --- JAX and CuPy


def test_arrays_of_jax(seed):
    pytest.importorskip("jax", reason="the example is one of JAX")
    assert run("jax_arrays.py", "--seed", str(seed)).count("of jax.numpy in float32") == 3


@pytest.mark.gpu
def test_arrays_of_cupy(seed, cuda):
    pytest.importorskip("cupy", reason="the example is one of CuPy")
    assert run("cupy_arrays.py", "--seed", str(seed)).count("of NumPy in float32") == 3


@pytest.mark.parametrize("package", ["jax", "cupy"])
def test_what_is_missing_is_said(package):
    path = str(EXAMPLES / f"{package}_arrays.py")
    without = f"import runpy, sys; sys.modules[{package!r}] = None; sys.argv = [{path!r}]; runpy.run_path({path!r}, run_name='__main__')"
    result = subprocess.run([sys.executable, "-c", without], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    assert len(result.stderr.splitlines()) == 1 and f"import of {package} halted" in result.stderr


def test_a_missing_gpu_is_said(tmp_path, monkeypatch):
    (tmp_path / "cupy.py").touch()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    result = subprocess.run([sys.executable, str(EXAMPLES / "cupy_arrays.py")], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert "needs CuPy and a GPU: " in line and "cuda" in line.lower()  # no driver, or built for the CPU only
