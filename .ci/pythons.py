"""Prints the Pythons of this machine that the wheel is for, one path a line: every released CPython from 3.11 on, on
PATH or of pyenv, once each. A free-threaded one is not: it lacks the stable ABI. Fails where there is none. Paths given
as arguments are left out."""

import os
import subprocess
import sys
from pathlib import Path

PROBE = """
import os, sys, sysconfig
version, is_free_threaded = sys.version_info, sysconfig.get_config_var("Py_GIL_DISABLED")
is_released = version.releaselevel == "final"  # NumPy has no wheels for others
if sys.implementation.name == "cpython" and version >= (3, 11) and is_released and not is_free_threaded:
    print(*version[:3], os.path.realpath(sys._base_executable))
"""


def candidates() -> list[Path]:
    folders = [Path(folder) for folder in os.environ["PATH"].split(os.pathsep) if folder]
    folders += (Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions").glob("*/bin")
    return [path for folder in folders for path in sorted(folder.glob("python3*")) if "-" not in path.name]


def found(python: Path) -> tuple[tuple[int, ...], str] | None:
    """Version and path; None for what is no such Python, or does not run (pyenv's shims of versions not chosen)."""
    try:
        said = subprocess.run([python, "-c", PROBE], capture_output=True, text=True, timeout=60, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    if not said:
        return None
    major, minor, micro, path = said.rstrip("\n").split(" ", 3)
    return (int(major), int(minor), int(micro)), path


def main() -> int:
    pythons = sorted({python for path in candidates() if (python := found(path))})
    for _, path in pythons:
        if path not in sys.argv[1:]:
            print(path)
    if not pythons:
        print("no released CPython of 3.11 or newer was found", file=sys.stderr)
    return 0 if pythons else 1


if __name__ == "__main__":
    sys.exit(main())
