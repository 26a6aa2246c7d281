"""pagedkv/_C.pyi against the extension: the same names, and for every callable the same parameters and defaults."""

import ast
import inspect
from pathlib import Path

import pytest

import pagedkv
from pagedkv import _C

STUB = ast.parse(Path(pagedkv.__file__).with_name("_C.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
PUBLIC_CLASSES = [name for name in CLASSES if not name.startswith("_")]
# What a class has without saying so, or says in another way than by a method of that name.
UNSAID = {"__doc__", "__module__", "__new__", "__init__", "__repr__", "__str__", "__dir__", "__sizeof__"}
UNSAID |= {"__buffer__", "__release_buffer__"}  # of Python 3.12 and later


def functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    """By name; of overloads the last."""
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


def parameters_of_stub(function: ast.FunctionDef, is_method: bool) -> list[tuple]:
    arguments, empty = function.args, inspect.Parameter.empty
    positional = arguments.posonlyargs + arguments.args
    defaults = [empty] * (len(positional) - len(arguments.defaults)) + [ast.literal_eval(d) for d in arguments.defaults]
    rows = [
        (a.arg, "POSITIONAL_ONLY" if i < len(arguments.posonlyargs) else "POSITIONAL_OR_KEYWORD", default)
        for i, (a, default) in enumerate(zip(positional, defaults, strict=True))
    ]
    rows = rows[1:] if is_method else rows
    rows += [
        (a.arg, "KEYWORD_ONLY", empty if d is None else ast.literal_eval(d))
        for a, d in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    ]
    return rows


def parameters_of(callable_) -> list[tuple]:
    parameters = inspect.signature(callable_).parameters.values()
    return [(p.name, p.kind.name, p.default) for p in parameters if p.name != "self"]


def test_names_of_the_module():
    in_stub = {*functions(STUB.body), *PUBLIC_CLASSES, "__version__"}
    in_module = {name for name in vars(_C) if not name.startswith("__")} | {"__version__"}
    assert in_stub == in_module


def test_package_offers_all_of_it():
    for name in {name for name in vars(_C) if not name.startswith("_")}:
        assert name in pagedkv.__all__ and getattr(pagedkv, name) is getattr(_C, name)
    assert set(pagedkv.__all__) - set(vars(_C)) == {"LLM", "SamplingParams", "tune_linear"}
    assert dir(pagedkv) == sorted(pagedkv.__all__)
    with pytest.raises(AttributeError, match="module 'pagedkv' has no attribute 'BlockManger'"):
        pagedkv.BlockManger  # noqa: B018


@pytest.mark.parametrize("name", functions(STUB.body))
def test_function(name):
    function = getattr(_C, name)
    assert parameters_of_stub(functions(STUB.body)[name], is_method=False) == parameters_of(function)
    assert len(inspect.getdoc(function)) > 20


@pytest.mark.parametrize("name", ["Tensor", "BlockManager"])
def test_class(name):
    class_, methods = getattr(_C, name), functions(CLASSES[name].body)
    in_class = {n for n, value in vars(class_).items() if n not in UNSAID}
    assert in_class == set(methods) - UNSAID
    for method, node in methods.items():
        if method == "__new__":
            assert parameters_of_stub(node, is_method=True) == parameters_of(class_)
        elif any(ast.unparse(d) == "property" or ast.unparse(d).endswith(".setter") for d in node.decorator_list):
            assert inspect.isgetsetdescriptor(vars(class_)[method]) and vars(class_)[method].__doc__
        elif method not in UNSAID:
            assert parameters_of_stub(node, is_method=True) == parameters_of(getattr(class_, method)), method
            assert inspect.getdoc(getattr(class_, method))


def test_step_fields():
    fields = [node.target.id for node in CLASSES["Step"].body if isinstance(node, ast.AnnAssign)]
    assert tuple(fields) == _C.Step.__match_args__


def test_exceptions():
    assert issubclass(pagedkv.OutOfBlocks, MemoryError) and issubclass(pagedkv.CudaError, RuntimeError)
    assert pagedkv.OutOfBlocks.__module__ == pagedkv.CudaError.__module__ == "pagedkv"


def test_type_checkers_see_the_engine():
    """LLM comes by __getattr__, so a checker knows it only by the import behind TYPE_CHECKING."""
    tree = ast.parse(Path(pagedkv.__file__).read_text())
    hidden = [node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"]
    names = {alias.name for node in hidden for line in node.body for alias in line.names}
    assert names == set(pagedkv.__all__) - set(vars(_C))
