"""What a release is made of: the sdist has what the repository has, and cibuildwheel builds one wheel."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEFT_OUT = (".ci/", ".github/", ".gitignore")  # what a checkout needs, and nobody who builds from an sdist

pytestmark = pytest.mark.skipif(not (ROOT / ".git").exists() or not shutil.which("git"), reason="not a checkout")


def test_the_sdist_has_what_the_repository_has(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    command = ["git", "-c", "safe.directory=*", "ls-files"]  # whoever the checkout belongs to
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    files = {name for name in listed if name and (ROOT / name).exists()}
    copy = tmp_path / "copy"
    for name in files:  # setuptools writes beside the sources
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, copy / name)
    build = "import sys; from setuptools.build_meta import build_sdist; build_sdist(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, tmp_path], cwd=copy, check=True, capture_output=True)
    (archive,) = tmp_path.glob("pagedkv-*.tar.gz")
    with tarfile.open(archive) as tar:
        packed = {member.name.partition("/")[2] for member in tar if member.isfile()}
    made = {name for name in packed if name.startswith("pagedkv.egg-info/")} | {"PKG-INFO", "setup.cfg"}
    assert packed - made == {name for name in files if not name.startswith(LEFT_OUT)}


def test_the_address_is_set_in_one_place(tmp_path):
    """`make urls URL=...` changes all of pyproject.toml's and the README's, and again."""
    if not shutil.which("make"):
        pytest.skip("no make")
    for name in ("Makefile", "pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tmp_path)
    for url in ("https://code.example/some/where", "https://code.example/else"):
        subprocess.run(["make", "urls", f"URL={url}"], cwd=tmp_path, check=True, capture_output=True)
        urls = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]["urls"]
        assert len(urls) == 4 and all(each.startswith(url) for each in urls.values())
        assert f"git clone {url} && cd pagedkv" in (tmp_path / "README.md").read_text()
        assert "example.org" not in (tmp_path / "README.md").read_text() + (tmp_path / "pyproject.toml").read_text()


def test_cibuildwheel_builds_one_wheel():
    pytest.importorskip("cibuildwheel")
    command = [sys.executable, "-m", "cibuildwheel", "--print-build-identifiers", "--platform", "linux", ROOT]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.split() == ["cp311-manylinux_x86_64"]
