"""pagedkv/_C.pyi against the extension: the same names, and for every callable the same parameters and defaults."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import pagedkv
from pagedkv import _C

STUB = ast.parse(Path(pagedkv.__file__).with_name("_C.pyi").read_text())
CLASSES = {node.name: node for node in STUB.body if isinstance(node, ast.ClassDef)}
PUBLIC_CLASSES = [name for name in CLASSES if not name.startswith("_")]
# Those with methods of their own: exceptions have none, and Step is a tuple with names.
CLASSES_WITH_METHODS = [name for name in PUBLIC_CLASSES if not issubclass(getattr(_C, name), (Exception, tuple))]
# What a class has without saying so, or says in another way than by a method of that name.
UNSAID = {"__doc__", "__module__", "__new__", "__init__", "__repr__", "__str__", "__dir__", "__sizeof__"}
UNSAID |= {"__buffer__", "__release_buffer__"}  # of Python 3.12 and later


def functions(body: list[ast.stmt]) -> dict[str, ast.FunctionDef]:
    """By name; of overloads the last, which takes every call."""
    return {node.name: node for node in body if isinstance(node, ast.FunctionDef)}


OVERLOADS = [
    node for node in STUB.body if isinstance(node, ast.FunctionDef) and "overload" in map(ast.unparse, node.decorator_list)
]


def parameters_of_stub(function: ast.FunctionDef, is_method: bool) -> list[tuple]:
    arguments, empty = function.args, inspect.Parameter.empty
    positional = arguments.posonlyargs + arguments.args
    defaults = [empty] * (len(positional) - len(arguments.defaults)) + [ast.literal_eval(d) for d in arguments.defaults]
    rows = [
        (a.arg, "POSITIONAL_ONLY" if i < len(arguments.posonlyargs) else "POSITIONAL_OR_KEYWORD", default)
        for i, (a, default) in enumerate(zip(positional, defaults, strict=True))
    ]
    rows = rows[1:] if is_method else rows
    rows += [(a.arg, "VAR_POSITIONAL", empty) for a in [arguments.vararg] if a]
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


@pytest.mark.parametrize("name", functions(STUB.body))
def test_function(name):
    function = getattr(_C, name)
    assert parameters_of_stub(functions(STUB.body)[name], is_method=False) == parameters_of(function)
    assert len(inspect.getdoc(function)) > 20


@pytest.mark.parametrize("name", {node.name: None for node in OVERLOADS})
def test_overloads(name):
    """return_lse decides what comes back; the last overload is for a bool that a checker does not know the value of."""
    nodes = [node for node in OVERLOADS if node.name == name]
    rows = [parameters_of_stub(node, is_method=False) for node in nodes]
    for row in rows[:-1]:  # return_lse=True has no default in its overload
        assert [(a, kind) for a, kind, _ in row] == [(a, kind) for a, kind, _ in rows[-1]]
    types = [
        (ast.unparse(argument.annotation), ast.unparse(node.returns))
        for node in nodes
        for argument in node.args.kwonlyargs
        if argument.arg == "return_lse"
    ]
    both = ("bool", "_T | tuple[_T, _T]")
    assert types == [("Literal[False]", "_T"), ("Literal[True]", "tuple[_T, _T]"), both]


def test_every_flag_that_decides_what_comes_back_has_overloads():
    signatures = {name: inspect.signature(getattr(_C, name)) for name in functions(STUB.body)}
    takes = {name for name, found in signatures.items() if any(each.startswith("return_") for each in found.parameters)}
    assert takes == {node.name for node in OVERLOADS} != set()


@pytest.mark.parametrize("name", CLASSES_WITH_METHODS)
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
    said = [node.value for node in CLASSES["Step"].body if isinstance(node, ast.AnnAssign)]
    assert [ast.literal_eval(value) for value in said] == [_C.Step.__match_args__]
    assert tuple(functions(CLASSES["Step"].body)) == _C.Step.__match_args__
    assert ast.unparse(CLASSES["Step"].bases[1]).count(",") + 1 == _C.Step.n_fields


def test_exceptions():
    assert issubclass(pagedkv.OutOfBlocks, MemoryError) and issubclass(pagedkv.CudaError, RuntimeError)
    assert pagedkv.OutOfBlocks.__module__ == pagedkv.CudaError.__module__ == "pagedkv"


USE = """
from typing import Any, assert_type

import numpy as np
import numpy.typing as npt

import pagedkv
from pagedkv import ops

def use(q: npt.NDArray[Any], cache: npt.NDArray[Any], ints: npt.NDArray[np.int32], flag: bool) -> None:
    Array = npt.NDArray[Any]
    attend, merge = pagedkv.paged_attention_fwd, pagedkv.merge_attention_states
    assert_type(attend(q, cache, cache, ints, ints), Array)
    assert_type(attend(q, cache, cache, ints, ints, return_lse=False), Array)
    assert_type(attend(q, cache, cache, ints, ints, return_lse=True), tuple[Array, Array])
    assert_type(attend(q, cache, cache, ints, ints, return_lse=flag), Array | tuple[Array, Array])
    assert_type(merge(q, q), Array)
    assert_type(merge(q, q, return_lse=True), tuple[Array, Array])
    assert_type(merge(q, q, return_lse=flag), Array | tuple[Array, Array])
    shown: Array = attend(q, cache, cache, ints, ints, return_lse=True)  # type: ignore[assignment]
    step = pagedkv.BlockManager(4, 4).prepare([1], [0], [1])
    slots, *_, longest = step
    assert_type(slots, npt.NDArray[np.int32])
    assert_type(longest, int)
    assert_type(step.max_seqlen_q, int)
    with pagedkv.Stream() as stream, pagedkv.Graph().capture(stream) as graph:
        assert_type(graph.num_nodes, int)
    assert_type(pagedkv.Event(timing=True).elapsed_ms(pagedkv.Event()), float)
    tensor = pagedkv.empty(3)
    memoryview(tensor)
    assert_type(ops.rms_norm(tensor, q), pagedkv.Tensor)
    assert_type(ops.token_logprobs(q, ints), tuple[Array, Array])
    assert_type(ops.linear_squares(tensor, q, out=q), int)
    assert_type(ops.linear_algorithms(tensor, q, out=q), tuple[str, list[bytes]])
    assert_type(ops.paged_attention_fwd(q, cache, cache, ints, ints, return_lse=flag), Array | tuple[Array, Array])
    assert_type(pagedkv.ops.memory_info(), tuple[int, int])
    assert_type(pagedkv.ops.num_multiprocessors(), int)
    assert_type(pagedkv.__version__, str)
    tensor + 1  # type: ignore[operator]
    tensor[0] = 1  # type: ignore[index]
    list(tensor)  # type: ignore[call-overload]
    pagedkv.rms_norm  # type: ignore[attr-defined]
    ops.LLM  # type: ignore[attr-defined]

async def serve(engine: pagedkv.AsyncEngine, llm: pagedkv.LLM) -> None:
    params = pagedkv.SamplingParams(max_tokens=3)
    assert_type([output.token_ids for output in llm.generate("a", params)], list[list[int]])
    async for answer in engine.generate("a", params):
        assert_type(answer.finished, bool)
"""


def test_a_checker_sees_what_comes_back(tmp_path):
    """Fails on a wrong type, and on a `type: ignore` that is not needed."""
    pytest.importorskip("mypy")
    (tmp_path / "use.py").write_text(USE)
    options = ["--strict", "--config-file=", f"--cache-dir={tmp_path}", "--ignore-missing-imports"]
    command = [sys.executable, "-m", "mypy", *options, "use.py"]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
