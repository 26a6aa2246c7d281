"""pagedkv's operations as PyTorch's custom operators: `torch.compile(fullgraph=True)` and `torch.export` keep them.

    import pagedkv.torch as ops

    out = ops.paged_attention_fwd(q, k_cache, v_cache, block_tables, context_lens)

The functions here have the names, parameters, results and errors of those in pagedkv.ops, except that there is no
`stream`: they take torch tensors and run on torch's current stream. Those that take a Communicator are not here: a
schema can hold none. Each calls one of the operators `torch.ops.pagedkv.<name>`. The overload `.out` writes into the
tensor given as `out`; `<name>_lse` also returns the log-sum-exp; `rms_norm_residual`, `linear_gate_up` and
`sample_counts` write the argument in their name. An operator's schema says what it writes in place, so a compiler
orders it as it orders PyTorch's own. In code that is not compiled, the functions of pagedkv.ops do the same in less
time.

`plan_attention` needs `out` here, because only the device knows how many rows a plan has. There are no gradients: a
backward pass through a result raises NotImplementedError. PyTorch registers no backward for an operator that also
writes in place; there PyTorch warns that it has none.

If k_cache and v_cache are views of one tensor, leave its sizes static: with `dynamic=True` the compiler of PyTorch 2.13
gives both the same address, and the call raises BufferError (v_cache overlaps k_cache).

This module needs PyTorch 2.4 or newer and nothing else. So do the modules of pagedkv.compat, but for nanovllm, which
needs none; those of pagedkv.integrations need their framework, too.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

try:
    import torch
except ModuleNotFoundError as error:
    raise ImportError("pagedkv.torch needs PyTorch (package torch), which is not installed") from error

import pagedkv._C as _C

Fake = Callable[[dict[str, Any]], tuple[torch.Tensor, ...]]


@dataclass(frozen=True, slots=True)
class Operation:
    """What an operator must know of a function of pagedkv.ops beyond its signature."""

    results: Fake | None = None  # makes the tensors it returns, given its arguments; None: `out` must be given
    outs: tuple[str, ...] = ("out",)  # parameters that take memory for the results
    writes: tuple[str, ...] = ()  # parameters that it changes in place
    lse: Fake | None = None  # the results with return_lse=True


# --- the tensors that operations return

# Types, in PyTorch's schemas, of the parameters that are no tensors and have no bool or float by default.
TYPES = {
    "max_seqlen_q": "SymInt?",
    "first_row": "SymInt?",
    "first_token": "SymInt",
    "softmax_scale": "float?",
    "window_size": "SymInt[2]",
    "num_splits": "int",
    "num_best": "int",
    "rms_eps": "float?",
    "weight_block": "SymInt[2]?",
}
OPTIONAL = ("q_weight", "k_weight")  # parameters that may be None, and have no default
LISTS = ("caches", "src", "dst")  # parameters that take one tensor or a list of them
SCALES = ("k_scale", "v_scale")  # parameters that take a tensor or a number: two arguments of an operator
NUMBER = "_number"


def like(name: str) -> Fake:
    return lambda a: (torch.empty_like(a[name], memory_format=torch.contiguous_format),)


def rows_of(name: str, indices: str) -> Fake:
    return lambda a: (a[name].new_empty(a[indices].shape[0], a[name].shape[1]),)


def queries(a: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    """The queries of a fused projection, after attention."""
    _, _, num_kv_heads, head_dim = a["k_cache"].shape
    num_tokens, width = a["qkv"].shape
    return (a["qkv"].new_empty(num_tokens, width // head_dim - 2 * num_kv_heads, head_dim),)


def attention_and_lse(a: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    num_tokens, num_heads, _ = a["q"].shape
    return *like("q")(a), a["q"].new_empty(num_heads, num_tokens, dtype=torch.float32)


def merged(*names: str) -> Fake:
    return lambda a: tuple(a[name].new_empty(a[name].shape[1:]) for name in names)


def product(a: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    num_columns = a["weight"].shape[0]
    return (a["x"].new_empty(a["x"].shape[0], num_columns if a["gate_up"] is None else num_columns // 2),)


def of_experts(a: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    num_outputs = a["weight"].shape[1] // (2 if a["gated"] else 1)
    chosen = () if a["weights"] is not None else (a["experts"].shape[1],)
    return (a["x"].new_empty(a["x"].shape[0], *chosen, num_outputs),)


def one_per_row(name: str, dtype: torch.dtype) -> Fake:
    return lambda a: (a[name].new_empty(a[name].shape[0], dtype=dtype),)


def logprobs(a: dict[str, Any]) -> tuple[torch.Tensor, ...]:
    shape = a["logits"].shape[0], 1 + a["num_best"]
    return a["logits"].new_empty(shape, dtype=torch.int32), a["logits"].new_empty(shape, dtype=torch.float32)


CACHES = ("k_cache", "v_cache")
OPERATIONS = {
    "store_kvcache": Operation(outs=(), writes=CACHES),
    "append_kvcache": Operation(outs=(), writes=CACHES),
    "rope_append_kvcache": Operation(like("q"), writes=CACHES),
    "paged_attention_fwd": Operation(like("q"), lse=attention_and_lse),
    "plan_attention": Operation(),
    "merge_attention_states": Operation(merged("o"), lse=merged("o", "lse")),
    "copy_blocks": Operation(outs=(), writes=("caches",)),
    "swap_blocks": Operation(outs=(), writes=("dst",)),
    "qk_norm_rope_store": Operation(queries, outs=("q_out",), writes=CACHES),
    "qkv_attention_fwd": Operation(queries, writes=CACHES),
    "embedding": Operation(rows_of("weight", "token_ids")),
    "gather_rows": Operation(rows_of("x", "indices")),
    "rms_norm": Operation(like("x"), writes=("residual",)),
    "scale_columns": Operation(like("x")),
    "linear": Operation(product, writes=("gate_up", "out_squares")),
    "route_experts": Operation(outs=(), writes=("out_experts", "out_weights")),
    "expert_linear": Operation(of_experts),
    "moe_mlp": Operation(like("x"), writes=("logits", "experts", "weights", "activation")),
    "lora_add": Operation(outs=(), writes=("out",)),
    "silu_and_mul": Operation(lambda a: (a["x"].new_empty(a["x"].shape[0], a["x"].shape[1] // 2),)),
    "sample": Operation(one_per_row("logits", torch.int32), writes=("counts",)),
    "sample_linear": Operation(one_per_row("x", torch.int32), writes=("logits",)),
    "linear_candidates": Operation(one_per_row("x", torch.int64), writes=("logits",)),
    "count_tokens": Operation(outs=(), writes=("counts",)),
    "token_logprobs": Operation(logprobs, outs=("out_ids", "out")),
    "bias_logits": Operation(outs=(), writes=("logits",)),
    "mask_logits": Operation(outs=(), writes=("logits",)),
    "take_sampled": Operation(outs=(), writes=("token_ids",)),
}

# --- operators

_library = torch.library.Library("pagedkv", "DEF")


class Variant(NamedTuple):
    """One of the operators of an operation: what this one is given and others are not."""

    has_lse: bool  # return_lse=True
    optional: str | None  # a parameter that is written in place and may be left out
    is_into: bool  # memory for the results


def _parameters(name: str) -> list[inspect.Parameter]:
    return [each for each in inspect.signature(getattr(_C, name)).parameters.values() if each.name != "stream"]


def _optionals(name: str) -> list[str]:
    """Parameters that the operation writes in place if they are given, one of them at a time. PyTorch's compiler (2.13)
    fails on an operator that may write an argument and does not, so each has an operator."""
    writes = OPERATIONS[name].writes
    return [each.name for each in _parameters(name) if each.name in writes and each.default is None]


def _declare(parameter: inspect.Parameter, mark: str, *, is_given: bool) -> str:
    """One argument of a schema. `mark`: such as (a!) for one that is written. `is_given`: it has no default."""
    name, default = parameter.name, parameter.default
    kind = type(default).__name__ if isinstance(default, (bool, float)) else TYPES.get(name)
    if kind is not None:
        declared = f"{kind} {name}"
    elif name in LISTS:
        declared = f"Tensor{mark}[] {name}"
    else:
        may_be_none = not is_given and (default is None or name in OPTIONAL)
        declared = f"Tensor{mark}{'?' if may_be_none else ''} {name}"
    if not is_given and default is not inspect.Parameter.empty:
        declared += f"={list(default) if isinstance(default, tuple) else default}"
    return f"{declared}, float? {name}{NUMBER}=None" if name in SCALES else declared


def _schema(name: str, variant: Variant, num_results: int) -> str:
    """All arguments may be given by position: of keyword-only tensors PyTorch's autograd takes outs alone."""
    operation, optionals, marks = OPERATIONS[name], _optionals(name), iter("abcdefgh")
    needed: list[str] = []
    others: list[str] = []
    for parameter in _parameters(name):
        is_optional = parameter.name in optionals
        if parameter.name in ("return_lse", *operation.outs) or (is_optional and parameter.name != variant.optional):
            continue
        mark = f"({next(marks)}!)" if parameter.name in operation.writes else ""
        has_default = parameter.default is not inspect.Parameter.empty and not is_optional
        (others if has_default else needed).append(_declare(parameter, mark, is_given=is_optional))
    outs = ["*", *(f"Tensor({next(marks)}!) {out}" for out in operation.outs)] if variant.is_into else []
    return f"({', '.join(needed + others + outs)}) -> ({', '.join(['Tensor'] * num_results)})"


def _register(name: str, variant: Variant) -> Any:
    """Defines one operator and returns it."""
    operation, function = OPERATIONS[name], getattr(_C, name)
    results = operation.lse if variant.has_lse else operation.results
    packet = name + ("_lse" if variant.has_lse else "") + (f"_{variant.optional}" if variant.optional else "")
    operator = packet + (".out" if variant.is_into else "")
    num_outs, constants = len(operation.outs), {"return_lse": True} if variant.has_lse else {}
    num_results = variant.has_lse + (0 if variant.is_into else num_outs)
    schema = _schema(name, variant, num_results)
    names = [argument.name for argument in torch._C.parse_schema(operator + schema).arguments]
    defaults = {each.name: each.default for each in _parameters(name)}

    def run(*args: Any, **options: Any) -> Any:
        given = dict(zip(names, args, strict=False)) | options
        for scale in SCALES:
            if (number := given.pop(scale + NUMBER, None)) is not None:
                given[scale] = number
        result = function(**given, **constants)
        if not variant.is_into:
            return result
        return result[num_outs] if variant.has_lse else None

    def fake(*args: Any, **options: Any) -> Any:
        if not num_results:
            return None
        assert results is not None
        made = results(defaults | dict(zip(names, args, strict=False)) | options)
        made = made[num_outs:] if variant.is_into else made
        return made if len(made) > 1 else made[0]

    def backward(*_: Any) -> Any:
        raise NotImplementedError(f"{name}: pagedkv computes no gradients")

    _library.define(operator + schema)
    _library.impl(operator, run, "CompositeExplicitAutograd")
    torch.library.register_fake(f"pagedkv::{operator}", fake, lib=_library)
    if "!" not in schema:
        torch.library.register_autograd(f"pagedkv::{operator}", backward, lib=_library)
    return getattr(getattr(torch.ops.pagedkv, packet), "out" if variant.is_into else "default")


def _variants(name: str) -> list[Variant]:
    operation, may = OPERATIONS[name], (False, True)
    every = itertools.product(
        may if operation.lse else (False,), (None, *_optionals(name)), may if operation.outs else (False,)
    )
    variants = [Variant(*each) for each in every]
    return [each for each in variants if each.is_into or operation.results or not operation.outs]


def _make(name: str) -> Callable[..., Any]:
    """The function of this module, over its operators; a compiler traces it."""
    operators = {tuple(each): _register(name, each) for each in _variants(name)}
    names, optionals = [each.name for each in _parameters(name)], _optionals(name)
    parameter_outs = OPERATIONS[name].outs
    lists = [(i, each) for i, each in enumerate(names) if each in LISTS]
    scales = [each for each in SCALES if each in names]

    def function(*args: Any, **options: Any) -> Any:
        for i, each in lists:
            if i < len(args) and isinstance(args[i], torch.Tensor):
                args = (*args[:i], [args[i]], *args[i + 1 :])
            elif isinstance(options.get(each), torch.Tensor):
                options[each] = [options[each]]
        for each in scales:
            if isinstance(options.get(each), (int, float)):
                options[each + NUMBER] = options.pop(each)
        has_lse = bool(options.pop("return_lse", False))
        written = [each for each in optionals if options.get(each) is not None]
        if len(written) > 1:
            raise ValueError(f"{written[1]}: not with {written[0]}")
        for each in optionals:
            if each not in written:
                options.pop(each, None)
        given = [options.pop(each, None) for each in parameter_outs]
        outs = [out for out in given if out is not None]
        variant = has_lse, written[0] if written else None, len(outs) > 0  # bool(outs) stops PyTorch 2.11
        operator = operators.get(variant)
        if operator is None or len(outs) not in (0, len(parameter_outs)):
            raise TypeError(f"{name}: {' and '.join(parameter_outs)} must be given")
        if not outs:
            return operator(*args, **options)
        lse = operator(*args, **options, **dict(zip(parameter_outs, outs, strict=True)))
        results = (*outs, lse) if has_lse else tuple(outs)
        return results if len(results) > 1 else results[0]

    function.__name__ = function.__qualname__ = name
    function.__doc__ = f"pagedkv.ops.{name} as an operator of PyTorch's: see help(pagedkv.ops.{name})."
    function.__signature__ = inspect.Signature(_parameters(name))  # type: ignore[attr-defined]
    return function


__all__ = list(OPERATIONS)
globals().update({name: _make(name) for name in OPERATIONS})
