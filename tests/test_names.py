"""What `pagedkv` and `pagedkv.ops` show, and where a name that is not in the first is."""

import ast
import inspect
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import pagedkv
from pagedkv import _C, ops

OBJECTS = {"BlockManager", "OutOfBlocks", "CudaError", "Tensor", "Stream", "Event", "Graph"}
OPERATIONS = {
    "store_kvcache", "paged_attention_fwd", "plan_attention", "merge_attention_states", "copy_blocks", "swap_blocks",
    "empty", "asarray", "from_dlpack",
}  # fmt: skip
ENGINE = {"LLM", "Engine", "AsyncEngine", "SamplingParams"}
COMPILED = {name for name in vars(_C) if not name.startswith("_")}
MOVED = sorted(set(ops.__all__) - set(pagedkv.__all__))
WHERE = Path(pagedkv.__file__).parent.parent


def run(code: str) -> subprocess.CompletedProcess:
    return subprocess.run([sys.executable, "-c", code], cwd=WHERE, capture_output=True, text=True, check=False)


def hidden_imports(module) -> set[str]:
    """What a checker sees behind TYPE_CHECKING, because at run time it comes by __getattr__."""
    tree = ast.parse(Path(module.__file__).read_text())
    hidden = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    return {alias.name for node in hidden for line in node.body for alias in line.names}


def test_the_package_shows_twenty_names():
    assert set(pagedkv.__all__) == OBJECTS | OPERATIONS | ENGINE
    assert len(pagedkv.__all__) == 20
    assert dir(pagedkv) == sorted([*pagedkv.__all__, "__version__", "ops"])
    assert all(getattr(pagedkv, name).__name__ == name for name in pagedkv.__all__)


@pytest.mark.parametrize("first", ["", "from pagedkv import ops, torch, tuning, LLM; import pagedkv.compat.flash_attn"])
def test_nothing_else_is_public_however_much_is_loaded(first):
    """Read from the module's own dict, not from its __dir__, in a fresh interpreter."""
    if first:
        pytest.importorskip("torch", reason="pagedkv.torch is for PyTorch")
    code = "import pagedkv, types; print(*(n for n, v in vars(pagedkv).items() if n[0] != '_' and not isinstance(v, types.ModuleType)))"
    done = run(f"{first}\n{code}")
    assert done.returncode == 0, done.stderr
    # TYPE_CHECKING is what checkers know by that name and nothing else does.
    assert set(done.stdout.split()) - {"TYPE_CHECKING"} == OBJECTS | OPERATIONS | ({"LLM"} if first else set())


def test_ops_and_the_objects_are_all_that_was_compiled():
    assert {*ops.__all__} | OBJECTS == COMPILED | {"tune_linear"}
    assert not {*ops.__all__} & OBJECTS
    for name in COMPILED:
        for module in (pagedkv, ops):
            assert name not in module.__all__ or getattr(module, name) is getattr(_C, name)
    assert dir(ops) == sorted(ops.__all__)


def test_ops_has_the_operations_of_the_package_too():
    assert set(ops.__all__) >= OPERATIONS
    assert not any(inspect.isclass(getattr(pagedkv, name)) for name in OPERATIONS)


@pytest.mark.parametrize("name", MOVED)
def test_a_name_that_has_moved_warns_and_works(name):
    """Older scripts use it. The warning names the script's own line."""
    with pytest.warns(DeprecationWarning, match=f"^pagedkv.{name} is pagedkv.ops.{name} now$") as warnings:
        assert getattr(pagedkv, name) is getattr(ops, name)
    assert [warning.filename for warning in warnings] == [__file__]
    assert name not in vars(pagedkv)  # so that it warns again elsewhere


@pytest.mark.parametrize(("module", "name"), [(pagedkv, "BlockManger"), (ops, "rmsnorm"), (ops, "LLM")])
def test_a_name_that_is_nowhere(module, name):
    with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute '{name}'"):
        getattr(module, name)


def test_ops_come_at_first_use():
    done = run("import sys, pagedkv; print('pagedkv.ops' in sys.modules, pagedkv.ops.linear.__name__, 'numpy' in sys.modules)")
    assert done.stdout.split() == ["False", "linear", "False"], done.stderr


def test_types_are_found_where_they_say():
    types = [getattr(_C, name) for name in COMPILED if inspect.isclass(getattr(_C, name))]
    assert {t.__name__ for t in types if t.__module__ == "pagedkv.ops"} == {"Communicator", "ElasticBuffer", "GroupError", "Step", "SuffixIndex"}
    for each in types:
        assert pickle.loads(pickle.dumps(each)) is each


def test_type_checkers_see_what_comes_later():
    assert hidden_imports(pagedkv) == ENGINE | {"ops"}
    assert hidden_imports(ops) == {"tune_linear"}
