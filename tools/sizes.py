"""Counts what there is to read: files, lines and functions of each folder, as a table in Markdown.

    python tools/sizes.py [REVISION ...]

Without a revision the working tree is counted. Lines include comments and blank lines. A function of C is counted from
the line of its brace to the closing brace, a function of Python from `def` to its last line.
"""

from __future__ import annotations

import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
# The first that matches names the row of a file; other files are not counted.
FOLDERS = {
    "csrc, csrc/ops, csrc/block_manager": r"csrc/((ops|block_manager)/)?[^/]+",
    "csrc/py": r"csrc/py/[^/]+",
    "csrc/cpu": r"csrc/cpu/[^/]+",
    "csrc/cuda": r"csrc/cuda/[^/]+",
    "pagedkv": r"pagedkv/.*\.py",
    "tests": r"tests/.*\.(py|c)",
}
NOT_OURS = "csrc/py/dlpack.h"


def git(*command: str) -> str:
    return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def files_of(revision: str | None) -> Iterator[tuple[str, str]]:
    """(path, text) of every source file."""
    listed = git("ls-tree", "-r", "--name-only", revision) if revision else git("ls-files")
    for path in listed.splitlines():
        if path == NOT_OURS or not re.search(r"\.(c|h|cu|inc|py)$", path):
            continue
        if revision:
            yield path, git("show", f"{revision}:{path}")
        elif (ROOT / path).exists():
            yield path, (ROOT / path).read_text()


def functions_of(path: str, text: str) -> Iterator[tuple[int, str]]:
    """(lines, name) of every function."""
    if path.endswith(".py"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.end_lineno - node.lineno + 1, node.name
        return
    lines, starts = text.splitlines(), dict[str, int]()
    for i, line in enumerate(lines):
        indent = line[: len(line) - len(line.lstrip())]
        if line.strip() == "{" and len(indent) <= 4:
            starts[indent] = i
        elif line.strip() in ("}", "};") and indent in starts:
            start = starts.pop(indent)
            names = re.findall(r"(\w+)\(", " ".join(lines[max(start - 6, 0) : start]))
            yield i - start + 1, names[-1] if names else "?"


def rows_of(revision: str | None) -> dict[str, tuple[int, int, int, str, int, str]]:
    """By folder: files, lines, median file, longest file, and the longest function with its name."""
    sizes: dict[str, list[tuple[int, str]]] = {name: [] for name in FOLDERS}
    functions: dict[str, list[tuple[int, str]]] = {name: [(0, "")] for name in FOLDERS}
    for path, text in files_of(revision):
        folder = next((name for name, pattern in FOLDERS.items() if re.fullmatch(pattern, path)), None)
        if folder:
            sizes[folder].append((text.count("\n"), Path(path).name))
            functions[folder] += functions_of(path, text)
    rows = {}
    for name, found in sizes.items():
        longest, function = max(found), max(functions[name])
        lines = [size for size, _ in found]
        rows[name] = (len(found), sum(lines), int(statistics.median(lines)), f"{longest[0]} {longest[1]}", *function)
    return rows


def main() -> None:
    for revision in sys.argv[1:] or [None]:
        print(f"\n{revision or 'working tree'}\n")
        print("| folder | files | lines | median file | longest file | longest function |\n|---|---|---|---|---|---|")
        for name, (count, lines, median, longest, length, function) in rows_of(revision).items():
            print(f"| {name} | {count} | {lines:,} | {median} | {longest} | {length} `{function}` |")


if __name__ == "__main__":
    main()
