"""The examples of the README, of docs/engine.md and of docs/training.md run as they stand, and figures in pages are the recorded ones."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import report

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
PAGES = [page for page in (README, ROOT / "docs" / "engine.md", ROOT / "docs" / "training.md") if page.exists()]
EXAMPLES = [(page, text) for page in PAGES for text in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


def test_there_are_examples():
    assert [page.name for page, _ in EXAMPLES] == ["README.md"] * 3 + ["engine.md"] * 6 + ["training.md"]


@pytest.mark.parametrize(
    "page, example",
    EXAMPLES,
    ids=[
        "BlockManager", "torch", "LLM", "Engine", "AsyncEngine", "shapes", "settings", "speculation", "cache",
        "training",
    ],
)
def test_example(page, example, capsys):
    for word, package in (("import torch", "torch"), ("StructuredOutputs", "xgrammar")):
        if word in example:
            pytest.importorskip(package)
    exec(compile(example, page.name, "exec"), {})
    printed = capsys.readouterr().out
    assert printed
    for line in example.splitlines():  # what a comment promises behind a print is what is printed
        promised = re.match(r"(?:print|asyncio\.run)\(.*\)\s+# ([^:]*)", line)
        if promised:
            assert promised[1].strip() in printed, line


@pytest.mark.parametrize("page", report.PAGES, ids=lambda page: page.name)
def test_the_figures_are_the_recorded_ones(page):
    """`make report` after a recording."""
    text = page.read_text()
    assert report.BLOCK.search(text), "no table"
    assert text == report.with_tables(text)
