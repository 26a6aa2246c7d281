"""A few thousand bodies of tests/fuzz_serve.py."""

# ruff: noqa: E402  these tests are skipped before what they need is imported
from __future__ import annotations

import pytest

for package in ("starlette", "uvicorn", "httptools", "msgspec", "prometheus_client", "xgrammar"):
    pytest.importorskip(package, reason="the extras `serve` and `grammar`")

from fuzz_serve import run
from tool_models import write_tool_model


def test_nonsense_is_refused_or_answered(tmp_path, seed):
    count = run(write_tool_model(tmp_path), 3000, seed)
    assert count[200] > 500 and count[400] > 1200, count
