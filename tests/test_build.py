"""setup.py finds CUDA, or says why not: the three modes of PAGEDKV_CUDA, and nvcc's architecture flags."""

import importlib.util
import types
from pathlib import Path

import pytest

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
    spec.loader.exec_module(module)
    for name in ("CUDA_HOME", "CUDA_PATH", "PAGEDKV_CUDA", "PAGEDKV_CUDA_ARCHS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    exists = Path.exists
    monkeypatch.setattr(Path, "exists", lambda self: not str(self).startswith("/usr/local/cuda") and exists(self))
    return module


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


def test_architectures(build, monkeypatch):
    monkeypatch.setenv("PAGEDKV_CUDA_ARCHS", "8.0;9.0a+PTX")
    assert build.cuda_arch_flags() == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_80,code=compute_80",
    ]
    monkeypatch.setenv("PAGEDKV_CUDA_ARCHS", "9.0a")
    assert build.cuda_arch_flags() == ["-gencode=arch=compute_90a,code=sm_90a"]
