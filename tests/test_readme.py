"""The README's examples run as they stand, and its figures are the recorded ones."""

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import report

README = Path(__file__).parent.parent / "README.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL) if README.exists() else []


def test_there_are_examples():
    assert len(EXAMPLES) == 4


@pytest.mark.parametrize("example", EXAMPLES, ids=["BlockManager", "torch", "LLM", "Engine"])
def test_example(example, capsys):
    if "import torch" in example:
        pytest.importorskip("torch")
    exec(compile(example, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed
    for line in example.splitlines():  # what a comment promises behind a print is what is printed
        promised = re.match(r"print\(.*\)\s+# ([^:]*)", line)
        if promised:
            assert promised[1].strip() in printed, line


def test_the_figures_are_the_recorded_ones():
    """`python benchmarks/report.py --write` after a recording."""
    assert f"{report.BEGIN}\n{report.table()}\n{report.END}" in README.read_text()
