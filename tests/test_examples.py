"""The programs in examples/ run, and check themselves."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


def run(name: str, *options: str) -> str:
    result = subprocess.run([sys.executable, str(EXAMPLES / name), *options], capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


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
