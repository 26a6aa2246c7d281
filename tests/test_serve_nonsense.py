"""A few thousand bodies of tests/fuzz_serve.py."""

from __future__ import annotations

import extra_serve  # noqa: F401
import pytest
from fuzz_serve import run
from tool_models import write_tool_model


def test_nonsense_is_refused_or_answered(tmp_path, seed):
    pytest.importorskip("xgrammar")
    count = run(write_tool_model(tmp_path), 3000, seed)
    assert count[200] > 500 and count[400] > 1200, count
