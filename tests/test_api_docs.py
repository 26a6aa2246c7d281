"""The API reference: every argument of an operation is explained, and pdoc makes pages of all of it."""

from __future__ import annotations

import dataclasses
import inspect
import re
import subprocess
import sys
from html import unescape
from importlib import import_module
from pathlib import Path

import pytest

import pagedkv
from pagedkv import ops
from pagedkv.engine import CompletionOutput, EngineCounters, EngineStats, RequestMetrics, RequestOutput

TOOL = Path(__file__).parent.parent / "tools" / "api_docs.py"
SAME_ARGUMENTS = {  # these explain only what is their own
    "plan_attention": [ops.paged_attention_fwd],
    "qkv_attention_fwd": [ops.qk_norm_rope_store, ops.paged_attention_fwd],
    "decode_step_words": [ops.decode_step],
}


def explained(doc: str) -> set[str]:
    """The names at the entries of a docstring's section Args."""
    section = re.search(r"\n *Args:\n(.*?)(\n\n|\Z)", inspect.cleandoc(doc), re.S)
    entries = re.findall(r"^    ([a-z_0-9]+(?:, [a-z_0-9]+)*):", section[1] if section else "", re.M)
    return {name for entry in entries for name in entry.split(", ")}


def test_entries_are_read():
    doc = "What.\n\nArgs:\n    q: a\n        b: c\n    k, v_2: d\n\nReturns:\n    out: e"
    assert explained(doc) == {"q", "k", "v_2"} and explained("What.") == set()


@pytest.mark.parametrize("name", [name for name in ops.__all__ if not isinstance(getattr(ops, name), type)])
def test_every_argument_is_explained(name):
    function = getattr(ops, name)
    parameters = list(inspect.signature(function).parameters)
    if len(parameters) < 2:  # a device, a number of threads: the sentences are about it
        assert function.__doc__
        return
    names = explained(function.__doc__)
    assert names <= set(parameters), "explains what is not there"
    for other in SAME_ARGUMENTS.get(name, []):
        names |= explained(other.__doc__)
    assert [each for each in parameters if each not in names] == []


def test_every_option_of_a_class_is_explained():
    options = {each for each in inspect.signature(pagedkv.BlockManager).parameters if each[0] != "_"}
    assert explained(pagedkv.BlockManager.__doc__) == options
    for kind in (pagedkv.SamplingParams, RequestOutput, CompletionOutput, RequestMetrics, EngineCounters, EngineStats):
        assert explained(kind.__doc__) == {field.name for field in dataclasses.fields(kind) if field.init}, kind
    options = set(inspect.signature(pagedkv.Engine).parameters)
    assert explained(pagedkv.Engine.__doc__) == options


def test_the_reference_is_built(tmp_path):
    if not TOOL.exists():
        pytest.skip("not a checkout")
    for package in ("pdoc", "torch", "transformers"):
        pytest.importorskip(package)
    subprocess.run([sys.executable, "-P", "-W", "error", TOOL, tmp_path], check=True)
    pages = {str(page.relative_to(tmp_path)): page.read_text() for page in tmp_path.rglob("*.html")}
    modules = re.findall(r'^    "(pagedkv[\w.]*)",$', TOOL.read_text(), re.M)
    assert {"pagedkv", "pagedkv.ops", "pagedkv.engine"} < set(modules)
    for module in modules:
        page = pages[module.replace(".", "/") + ".html"]
        names = [name for name in import_module(module).__all__ if f"{module.replace('.', '/')}/{name}.html" not in pages]
        assert names and [name for name in names if f'id="{name}"' not in page] == []
        assert "<em>" not in page, "a star or an underscore of a formula was taken for emphasis"
    text = unescape(re.sub(r"<[^>]+>", "", pages["pagedkv.html"]))
    assert "block_tables: [num_seqs, max_blocks] int32" in re.sub(r"\s+", " ", text)
    assert (tmp_path / "search.js").exists()
