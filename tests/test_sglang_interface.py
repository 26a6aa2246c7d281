"""What pagedkv.integrations.sglang takes for granted stands in SGLang 0.5.23, by the sources of its wheel.

Nothing of it is imported, and no GPU is needed. The sources are those of the installed package, or of the wheel that
PAGEDKV_SGLANG_WHEEL names (pip download --no-deps sglang==0.5.23).
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import inspect
import os
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path

import fake_sglang
import pytest

import pagedkv

VERSION = "0.5.23"
BACKEND = Path(pagedkv.__file__).parent / "integrations" / "sglang.py"


class Sources:
    """Files of SGLang, parsed."""

    def __init__(self) -> None:
        wheel = os.environ.get("PAGEDKV_SGLANG_WHEEL")
        self.root: zipfile.Path | Path
        if wheel:
            self.root = zipfile.Path(wheel)
            self.version = Path(wheel).name.split("-")[1]
        else:
            try:
                self.version = importlib.metadata.version("sglang")
            except importlib.metadata.PackageNotFoundError:
                pytest.skip("SGLang is not installed, and PAGEDKV_SGLANG_WHEEL names no wheel of it")
            self.root = Path(importlib.util.find_spec("sglang").origin).parents[1]

    def text(self, module: str) -> str:
        path = self.root / (module.replace(".", "/") + ".py")
        if not path.exists():
            path = self.root / module.replace(".", "/") / "__init__.py"
        return path.read_text(encoding="utf-8")

    def module(self, module: str) -> ast.Module:
        return ast.parse(self.text(module))

    def find(self, module: str, name: str) -> ast.ClassDef | ast.FunctionDef:
        return named(self.module(module), name)


@pytest.fixture(scope="module")
def sources() -> Sources:
    return Sources()


@pytest.fixture(scope="module")
def ours() -> ast.Module:
    return ast.parse(BACKEND.read_text(encoding="utf-8"))


def named(tree: ast.AST, name: str):
    """The class or function of this name at the top of `tree`."""
    found = [x for x in ast.iter_child_nodes(tree) if getattr(x, "name", None) == name]
    assert found, f"{name} is gone"
    return found[-1]


def methods(cls: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {each.name: each for each in cls.body if isinstance(each, ast.FunctionDef)}


def parameters(function: ast.FunctionDef) -> list[tuple[str, str | None]]:
    """Names and defaults, in their order."""
    given = function.args.posonlyargs + function.args.args
    defaults = [None] * (len(given) - len(function.args.defaults)) + [ast.unparse(x) for x in function.args.defaults]
    return list(zip([each.arg for each in given], defaults, strict=True))


def attributes_of(cls: ast.ClassDef) -> set[str]:
    """What its instances have: methods, names of the class, and what any method assigns to self."""
    names = set(methods(cls)) | ({"name"} if any("Enum" in ast.unparse(base) for base in cls.bases) else set())
    for node in cls.body:
        match node:
            case ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]):
                names.add(name)
    stored = (x for x in ast.walk(cls) if isinstance(x, ast.Attribute) and isinstance(x.ctx, ast.Store))
    return names | {x.attr for x in stored if ast.unparse(x.value) == "self"}


def read_from(tree: ast.AST, path: str) -> set[str]:
    """The attributes that `tree` reads from the expression `path`."""
    return {x.attr for x in ast.walk(tree) if isinstance(x, ast.Attribute) and ast.unparse(x.value) == path}


def assigned(tree: ast.Module, name: str) -> str:
    """What the module assigns to a name."""
    found = [x for x in tree.body if isinstance(x, ast.Assign) and ast.unparse(x.targets[0]) == name]
    assert found, f"{name} is gone"
    return ast.unparse(found[-1].value)


def test_the_release(sources):
    assert sources.version == VERSION, "another release: read its interface, then name it here and in the backend"
    assert f"SGLang {VERSION}" in ast.get_docstring(ast.parse(BACKEND.read_text(encoding="utf-8")))


def imports(tree: ast.Module) -> Iterator[tuple[str, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("sglang"):
            yield from ((node.module, alias.name) for alias in node.names)


def test_what_is_imported_is_there(sources, ours):
    given = set(imports(ours))
    assert len(given) == 9
    for module, name in given:
        if name == "choices":  # a module
            sources.text(f"{module}.{name}")
        else:
            sources.find(module, name)


def test_methods_take_what_sglang_gives(sources, ours):
    base = methods(sources.find("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend"))
    backend = methods(named(ours, "PagedKVBackend"))
    public = {name for name in backend if not name.startswith("_")}
    assert public <= set(base), "hooks that SGLang calls no more"
    assert len(public) == 8
    for name in public:
        assert parameters(backend[name]) == parameters(base[name]), name
        assert (backend[name].args.kwarg is None) == (base[name].args.kwarg is None), name


def test_nothing_that_sglang_demands_is_missing(sources, ours):
    """Of the methods that its base class only names, those for what this backend refuses or opts out of."""
    base = methods(sources.find("sglang.srt.layers.attention.base_attn_backend", "AttentionBackend"))
    demanded = {
        name for name, method in base.items()
        if any(isinstance(x, ast.Raise) and "NotImplementedError" in ast.unparse(x) for x in method.body)
    }  # fmt: skip
    assert demanded - set(methods(named(ours, "PagedKVBackend"))) == {
        "forward_mixed",  # called on NPUs only
        "init_forward_metadata_for_breakable_cuda_graph_capture",  # of backends whose metadata a graph holds
        "prepare_forward_metadata_for_breakable_cuda_graph_replay",
        "update_verify_buffers_to_fill_after_draft",  # speculative decoding
    }


@pytest.mark.parametrize(
    ("path", "module", "name"),
    [
        ("forward_batch", "model_executor.forward_batch_info", "ForwardBatch"),
        ("mode", "model_executor.forward_batch_info", "ForwardMode"),
        ("layer", "layers.radix_attention", "RadixAttention"),
        ("model_runner", "model_executor.model_runner", "ModelRunner"),
        ("runner", "model_executor.model_runner", "ModelRunner"),
        ("runner.model_config", "configs.model_config", "ModelConfig"),
        ("model_runner.model_config", "configs.model_config", "ModelConfig"),
        ("runner.spec_algorithm", "speculative.spec_info", "SpeculativeAlgorithm"),
        ("runner.kv_index_translator", "mem_cache.kv_index_translator", "KVIndexTranslator"),
        ("self.req_to_token_pool", "mem_cache.memory_pool", "ReqToTokenPool"),
        ("self.token_to_kv_pool", "mem_cache.swa_memory_pool", "SWAKVPool"),
        ("pool", "mem_cache.swa_memory_pool", "SWAKVPool"),
    ],
)
def test_what_is_read_exists(sources, ours, path, module, name):
    there = attributes_of(sources.find(f"sglang.srt.{module}", name))
    if name == "ModelRunner":  # which takes them from mixins and sets them elsewhere, too
        there |= read_from(sources.module("sglang.srt.layers.attention.flashattention_backend"), "model_runner")
    read = read_from(ours, path)
    assert read and read <= there


def test_every_pool_gives_its_buffers(sources):
    for module, name in (("memory_pool", "MHATokenToKVPool"), ("swa_memory_pool", "SWAKVPool")):
        pool = methods(sources.find(f"sglang.srt.mem_cache.{module}", name))
        assert parameters(pool["get_kv_buffer"]) == [("self", None), ("layer_id", None)]


def test_a_replay_has_the_fields_of_a_batch(sources, ours):
    """What replaces the batch in front of a replay has no more than it is given here."""
    function = sources.find("sglang.srt.model_executor.runner.decode_cuda_graph_runner", "build_replay_fb_view")
    (view,) = (x for x in ast.walk(function) if isinstance(x, ast.Call) and ast.unparse(x.func) == "SimpleNamespace")
    given = {each.arg for each in view.keywords}
    backend = methods(named(ours, "PagedKVBackend"))
    hooks = [backend[name] for name in ("init_forward_metadata_out_graph", "_num_pages", "_write_tables")]
    read = set().union(*(read_from(hook, "forward_batch") for hook in hooks))
    assert {"req_pool_indices", "seq_lens", "seq_lens_cpu", "batch_size", "forward_mode"} == read <= given


def test_metadata_are_made_in_the_graph_behind_those_outside(sources):
    """Warm-ups and the capture each begin with the hook that forgets plans."""
    runner = sources.find("sglang.srt.model_executor.runner.decode_cuda_graph_runner", "DecodeCudaGraphRunner")
    capture = next(x for x in methods(runner).values() if "in_capture=True" in ast.unparse(x))
    body = ast.unparse(capture)
    outside, inside = body.index("init_forward_metadata_out_graph"), body.index("_run_in_graph_metadata_prep")
    assert outside < body.index("def run_once") < inside < body.index("out = forward(")


def test_a_name_becomes_a_backend(sources):
    registry = sources.find("sglang.srt.layers.attention.attention_registry", "register_attention_backend")
    assert parameters(registry) == [("name", None)]
    setup = sources.module("sglang.srt.model_executor.model_runner_components.attention_backend_setup")
    assert "ATTENTION_BACKENDS[backend_str](model_runner)" in ast.unparse(setup)
    choices = sources.module("sglang.srt.arg_groups.choices")
    for kind in ("attention_backend", "deterministic_attention_backend"):
        names = f"{kind.upper()}_CHOICES"
        assert isinstance(ast.literal_eval(assigned(choices, names)), list)
        assert assigned(choices, f"add_{kind}_choices") == f"{names}.extend"
    assert "choices=ATTENTION_BACKEND_CHOICES" in sources.text("sglang.srt.arg_groups.fields.exec_")


def test_the_entry_point(sources):
    group = ast.literal_eval(assigned(sources.module("sglang.srt.plugins"), "GENERAL_PLUGINS_GROUP"))
    (entry,) = importlib.metadata.entry_points(group=group, name="pagedkv") or [declared(group)]
    assert entry.value == "pagedkv.integrations.sglang:register"
    function = named(ast.parse(BACKEND.read_text(encoding="utf-8")), "register")
    assert parameters(function) == []


def declared(group: str) -> importlib.metadata.EntryPoint:
    """In the checkout, for tests of what is not installed."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return importlib.metadata.EntryPoint("pagedkv", project["entry-points"][group]["pagedkv"], group)


@pytest.mark.parametrize(
    ("stand_in", "module", "name"),
    [
        (fake_sglang.ForwardBatch, "model_executor.forward_batch_info", "ForwardBatch"),
        (fake_sglang.Layer, "layers.radix_attention", "RadixAttention"),
        (fake_sglang.ReqToTokenPool, "mem_cache.memory_pool", "ReqToTokenPool"),
        (fake_sglang.WindowPools, "mem_cache.swa_memory_pool", "SWAKVPool"),
        (fake_sglang.AttentionBackend, "layers.attention.base_attn_backend", "AttentionBackend"),
        (fake_sglang.ForwardMode, "model_executor.forward_batch_info", "ForwardMode"),
        (fake_sglang.AttentionType, "layers.radix_attention", "AttentionType"),
        (fake_sglang.SharedReadEnds, "layers.attention.base_attn_backend", "SharedReadEnds"),
    ],
)
def test_the_stand_ins(sources, stand_in, module, name):
    """They have nothing that SGLang's own have not."""
    there = attributes_of(sources.find(f"sglang.srt.{module}", name))
    tree = ast.parse(inspect.getsource(stand_in)).body[0]
    assert attributes_of(tree) - {"buffers"} <= there
