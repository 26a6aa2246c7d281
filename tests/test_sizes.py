"""tools/sizes.py counts what it says, of files made up here and of this checkout."""

import importlib.util
from pathlib import Path

import pytest

TOOL = Path(__file__).parent.parent / "tools" / "sizes.py"
pytestmark = pytest.mark.skipif(not TOOL.exists(), reason="not a checkout")


@pytest.fixture
def sizes():
    spec = importlib.util.spec_from_file_location("sizes", TOOL)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("rest", ["attention_plan.cu", "attention/plan/lengths.h", "attention/decode/shape.cu", "attention_prefill.h"])
def test_counts(sizes, rest):
    thresholds = "constexpr int A = 1, /* = 9 */ B = 2;\nconstexpr float C = A / 2; // = 3\n"
    files = {
        f"csrc/cuda/{rest}": "a\n\nb\n", "csrc/cuda/attention/decode/warp.h": "a\n", "csrc/cuda/thresholds.h": thresholds,
        "csrc/py/x.c": "a\n" * 5, "pagedkv/engine/text/a.py": "a\n" * 7, "pagedkv/engine/b.py": "", "tests/c.py": "a\n",
    }  # fmt: skip
    found = sizes.sizes_of(files)
    assert {name: size for name, size in found.items() if size} == {
        "lines of csrc/cuda": 6, "lines of csrc/py": 5, "lines of pagedkv": 7, "lines of tests": 1,
        "files of pagedkv/engine": 2, "lines of attention's planning": 3, "numbers in thresholds.h": 3,
    }  # fmt: skip


def test_this_checkout(sizes):
    if not (TOOL.parents[1] / ".git").exists():
        pytest.skip("not a checkout of git")
    now, committed = (sizes.sizes_of(sizes.files_at(revision)) for revision in (None, "HEAD"))
    assert now.keys() == committed.keys() and min(*now.values(), *committed.values()) > 0
    texts = [path.read_text() for kind in ("cu", "h") for path in (TOOL.parents[1] / "csrc" / "cuda").rglob(f"*.{kind}")]
    assert now["lines of csrc/cuda"] == sum(text.count("\n") for text in texts)
