""".ci/run with stand-ins for every program that it starts: whichever of them fails, the run fails at once. And which
Pythons .ci/pythons.py finds."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CI = Path(__file__).parents[1] / ".ci"
pytestmark = pytest.mark.skipif(not CI.exists(), reason="not a checkout")

# Writes its call down, fails if it is the one to fail, and otherwise leaves what the script goes on with.
STAND_IN = """#!/bin/bash
echo "${0##*/} $*" >>"$CALLS"
[ "$(wc -l <"$CALLS")" != "$FAILS_AT" ] || exit 1
case "$*" in
"-m venv"*)
    mkdir -p "${!#}/bin"
    for name in python python3 pip pagedkv pytest; do ln -sf "$(readlink -f "$0")" "${!#}/bin/$name"; done
    echo 'deactivate() { :; }' >"${!#}/bin/activate" ;;
"wheel "*)
    mkdir -p "$4"
    touch "$4/pagedkv-0.whl"
    [ -z "$LITTER" ] || touch "$LITTER" ;;
*/pythons.py*) type -p python3 ;;
esac
"""
REAL = (
    "bash", "cat", "diff", "dirname", "find", "ln", "ls", "mkdir", "mktemp", "readlink", "rm", "sort", "touch", "wc",
)


class Checkout:
    def __init__(self, folder: Path) -> None:
        self.root, self.bin, self.log, self.tmp = (folder / name for name in ("checkout", "bin", "calls", "tmp"))
        for made in (self.root / ".ci", self.bin, self.tmp):
            made.mkdir(parents=True)
        shutil.copy(CI / "run", self.root / ".ci")
        for name in REAL:
            (self.bin / name).symlink_to(shutil.which(name))
        stand_in = self.bin / "stand-in"
        stand_in.write_text(STAND_IN)
        stand_in.chmod(0o755)
        for name in ("python3", "pip", "make", "apt-get", "pytest", "pagedkv"):
            (self.bin / name).symlink_to(stand_in)

    def run(self, fails_at: int = 0, litter: str = "") -> tuple[int, list[str]]:
        """Its exit status, and what it called."""
        self.log.write_text("")
        env = {"PATH": str(self.bin), "CALLS": str(self.log), "TMPDIR": str(self.tmp)}
        env |= {"FAILS_AT": str(fails_at), "LITTER": litter}
        command = [str(self.bin / "bash"), str(self.root / ".ci" / "run")]
        result = subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=60)
        assert list(self.tmp.iterdir()) == []  # cleared away in any case
        return result.returncode, self.log.read_text().splitlines()


@pytest.fixture
def checkout(tmp_path) -> Checkout:
    return Checkout(tmp_path)


def test_whatever_fails_fails_the_run(checkout):
    status, calls = checkout.run()
    assert status == 0
    for part in ("pip install -q --no-compile .", "pip wheel", ".whl[test]", "pagedkv demo", "make lint", "-m mypy.stubtest",
                 "smoke.py", "pytest ", "apt-get install", "test_random_cases.py", "make asan", "make fuzz"):  # fmt: skip
        assert any(part in call for call in calls), part
    for i, call in enumerate(calls):
        status, called = checkout.run(fails_at=i + 1)
        assert status != 0, f"`{call}` failed and the run did not"
        assert len(called) == i + 1, f"after `{call}` had failed came {called[i + 1 :]}"


def test_a_build_that_writes_into_the_checkout_fails_the_run(checkout):
    (checkout.root / "build").mkdir()
    assert checkout.run(litter=str(checkout.root / "build" / "object.o"))[0] == 0
    status, calls = checkout.run(litter=str(checkout.root / "_C.abi3.so"))
    assert status != 0 and calls[-1].startswith("pip wheel")


# --- .ci/pythons.py


@pytest.fixture
def pythons(monkeypatch, tmp_path):
    """The module, on a machine with an empty PATH and no pyenv."""
    spec = importlib.util.spec_from_file_location("ci_pythons", CI / "pythons.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    (tmp_path / "bin").mkdir()
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return module


def test_every_python_is_found_once(pythons, capfd, tmp_path, monkeypatch):
    real = os.path.realpath(sys._base_executable)
    if not pythons.found(Path(real)):
        pytest.skip("the wheel is not for this Python")
    folder = tmp_path / "pyenv" / "versions" / "3.99.0" / "bin"
    folder.mkdir(parents=True)
    for name in ("python3", "python3.11"):
        for where in (folder, tmp_path / "bin"):
            (where / name).symlink_to(real)
    for left_out, printed in (tmp_path / "python3", f"{real}\n"), (real, ""):
        monkeypatch.setattr(sys, "argv", ["pythons.py", str(left_out)])
        assert pythons.main() == 0
        assert capfd.readouterr().out == printed


def test_what_is_no_such_python_is_left_out(pythons, capfd, tmp_path):
    """One that does not run, an old one; and where no other is there, that is an error."""
    for name, code in (("python3.12", "exit 127"), ("python3.9", "exit 0"), ("python3-config", "exit 0")):
        script = tmp_path / "bin" / name
        script.write_text(f"#!/bin/sh\n{code}\n")
        script.chmod(0o755)
    assert pythons.main() == 1
    out, err = capfd.readouterr()
    assert out == "" and "no released CPython" in err
