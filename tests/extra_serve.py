"""Imported before the server, httpx and what else the extra `serve` has: tests are skipped where one of them is missing."""

import pytest

for package in ("starlette", "uvicorn", "httptools", "msgspec", "prometheus_client", "httpx"):
    pytest.importorskip(package, reason="the extra `serve`, and httpx")
