"""The pages in docs/ and the README name files, names and commands that exist; nothing names a file from elsewhere."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [
    *sorted((ROOT / "docs").glob("*.md")),
    *(ROOT / name for name in ("README.md", "benchmarks/README.md", "benchmarks/lab/FIGURES.md")),
]
KINDS = {".c", ".h", ".cu", ".cuh", ".inc", ".py", ".pyi", ".md", ".json", ".toml", ".sh", ".yml", ".ipynb"}
BUILT = {"build", "dist", "__pycache__"}
HIDDEN = {".ci", ".github"}  # of the hidden folders, those that belong to the repository
# Notes that were never part of this repository, by their names and by the numbers in them.
ELSEWHERE = re.compile(r"\b(PEERS|COMPAT|DESIGN|SWAP|DEFECTS|REVIEW|BATCH1|STYLE)(\.md\b|,? defects? \d)|\bshared" + r"/\w")

pytestmark = pytest.mark.skipif(not (ROOT / "docs").exists(), reason="not a checkout")


def our_files() -> list[Path]:
    def is_ours(path: Path) -> bool:
        folders = path.relative_to(ROOT).parts[:-1]
        return all(folder not in BUILT and (folder in HIDDEN or folder[0] != ".") for folder in folders)

    paths = [path for path in ROOT.rglob("*") if path.suffix in KINDS or path.name in ("Makefile", "run")]
    return [path for path in paths if path.is_file() and is_ours(path)]


def test_no_file_names_a_note_that_is_not_here():
    files = our_files()
    assert len(files) > 300
    assert {str(path.relative_to(ROOT)) for path in files if ELSEWHERE.search(path.read_text())} == set()


def test_such_a_name_would_be_found():
    for text in ("see PEERS" + ".md", "COMPAT" + " defect 7", "../shared" + "/notes", "COMPAT" + " defects 3 and 7"):
        assert ELSEWHERE.search(text), text
    for text in ('#include "ops/shared.h"', "DESIGN", "a shared page", "__shared__"):
        assert not ELSEWHERE.search(text), text


def paths_in(text: str) -> set[str]:
    """Links and pictures, and words in backquotes that look like a path of this repository."""
    links = re.findall(r"\]\((?!http|#)([^)#]+)", text)
    words = re.findall(r"`((?:csrc|pagedkv|tests|benchmarks|tools|examples|docs)/[\w./-]*)`", text)
    return {*links, *words}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_exists(page):
    for path in paths_in(page.read_text()):
        assert (page.parent / path).exists() or (ROOT / path).exists(), f"{page.name} names {path}"


def anchors_of(text: str) -> set[str]:
    """Of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_anchor_exists(page):
    for path, anchor in re.findall(r"\]\((?!http)([^)#]*)#([^)]+)\)", page.read_text()):
        other = page.parent / path if path else page
        assert anchor in anchors_of(other.read_text()), f"{page.name} links to {path}#{anchor}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_examples_are_python_and_import_what_there_is(page):
    """Those that no test runs, too: they need a GPU, a model of the hub or a server."""
    for example in re.findall(r"```py(?:thon)?\n(.*?)```", page.read_text(), re.DOTALL):
        for node in ast.walk(ast.parse(example)):
            if isinstance(node, ast.ImportFrom) and node.module.startswith("pagedkv"):
                text = (ROOT / node.module.replace(".", "/")).with_suffix(".py")
                text = text if text.exists() else text.with_suffix("") / "__init__.py"
                for each in node.names:
                    is_module = (text.parent / f"{each.name}.py").exists() or (text.parent / each.name).is_dir()
                    assert is_module or re.search(rf"\b{each.name}\b", text.read_text()), ast.unparse(node)


def test_each_row_of_the_files_has_a_test():
    text = (ROOT / "docs" / "files.md").read_text()
    rows = re.findall(r"^\|(.*)\|$", text.split("## config.json")[0], re.MULTILINE)[2:]
    for row in rows:
        ((file, name),) = re.findall(r"`(test_\w+\.py)::(test_\w+)`", row)
        assert f"\ndef {name}(" in (ROOT / "tests" / file).read_text(), row
    assert len(rows) > 10


def test_the_map_names_every_folder():
    text = (ROOT / "docs" / "architecture.md").read_text()
    for folder in (ROOT / "csrc").iterdir():
        assert not folder.is_dir() or f"csrc/{folder.name}/" in text, folder.name
