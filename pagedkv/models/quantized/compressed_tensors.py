"""compressed-tensors, which llm-compressor writes: float8 with a scale for a tensor, a row or a block
("float-quantized", "naive-quantized"), and int4 in words ("pack-quantized").

`config_groups` say what is done with which products, by names, patterns ("re:...") or the class "Linear"; `ignore`
lists those with which nothing is. Scales of activations are not needed: these stay in their dtype, or a kernel scales
them by what they are.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import DTYPES
from ..linear import TensorSource
from ..share import blocks, whole
from ..spec import Quantization
from ..weight import Part
from .fp8 import block_of, num_blocks, read_fp8
from .gptq import groups_of
from .int4 import PER_WORD, dense_part, int4_part, int4_unit, unpacked, words, write_along_inputs
from .keys import WHERE, check_patterns, checked, group_size, names, num_groups, one_of

FORMATS = {"float": ("float-quantized", "naive-quantized"), "int": ("pack-quantized",)}  # by the type of numbers
STRATEGIES = {"float": ("tensor", "channel", "block"), "int": ("group", "channel")}
NAMES = {"float": "fp8", "int": "int4"}
NUM_BITS = {"float": 8, "int": 4}
NUMBERS = "num_bits type symmetric strategy group_size block_structure dynamic actorder"
OBSERVED = "observer observer_kwargs scale_dtype zp_dtype"  # how the scales were found
ORDERS = "group", "dynamic", True  # values of actorder by which groups are in the order of activations
CLASS = "Linear"


@dataclass(frozen=True)
class Scheme:
    """Of one of config_groups."""

    targets: tuple[str, ...]
    type: str
    strategy: str
    group_size: int  # int; -1: all inputs
    block: tuple[int, int]  # of the strategy "block"
    has_zeros: bool
    has_order: bool  # groups are in the order of activations
    quantizes_x: bool  # activations have 8 bits, too


def parse(raw: Mapping[str, Any]) -> Quantization:
    checked(
        raw,
        "quant_method config_groups format ignore sparsity_config",
        {
            "quantization_status": ("compressed", "frozen"),
            "kv_cache_scheme": (),
            "transform_config": ({},),
            "dequantize": (False,),
        },
        "version global_compression_ratio provider run_compressed use_optimized_inference",
    )
    if raw.get("sparsity_config"):
        one_of(raw["sparsity_config"], "format", ("dense",), where=f"{WHERE}sparsity_config.")
    groups = raw.get("config_groups")
    if not isinstance(groups, dict) or not groups or not all(isinstance(each, dict) for each in groups.values()):
        raise ValueError(f"{WHERE}config_groups is {groups!r} but must be an object of objects")
    schemes = [_parse_scheme(raw, each, f"{WHERE}config_groups.{name}.") for name, each in groups.items()]
    return CompressedTensors(tuple(schemes), _patterns(raw, "ignore", WHERE))


def _parse_scheme(raw: Mapping[str, Any], group: Mapping[str, Any], where: str) -> Scheme:
    checked(group, "targets weights input_activations format", {"output_activations": ()}, where=where)
    weights = group.get("weights")
    if not isinstance(weights, dict):
        raise NotImplementedError(f"{where}weights is {weights!r}; only an object is supported")
    inside = f"{where}weights."
    checked(weights, NUMBERS, {}, OBSERVED, where=inside)
    kind = one_of(weights, "type", ("float", "int"), "int", where=inside)
    one_of(weights, "num_bits", (NUM_BITS[kind],), 8, where=inside)
    one_of(weights, "dynamic", (False,), False, where=inside)
    if group.get("format") is not None:
        one_of(group, "format", FORMATS[kind], where=where)
    else:
        one_of(raw, "format", FORMATS[kind])
    is_symmetric = one_of(weights, "symmetric", (True,) if kind == "float" else (True, False), True, where=inside)
    given = weights.get("group_size")
    default = "tensor" if given is None else "channel" if given == -1 else "group"
    strategy = one_of(weights, "strategy", STRATEGIES[kind], default, where=inside)
    order = one_of(weights, "actorder", (*ORDERS, "weight", "static", False, None), where=inside)
    _check_activations(group.get("input_activations"), kind, f"{where}input_activations")
    block = block_of(weights, "block_structure", inside) if strategy == "block" else (0, 0)
    size = group_size(weights, where=inside) if strategy == "group" else -1
    if strategy != "group":
        one_of(weights, "group_size", (-1, None), where=inside)
    return Scheme(_patterns(group, "targets", where), kind, strategy, size, block, not is_symmetric,
                  order in ORDERS, group.get("input_activations") is not None)  # fmt: skip


def _check_activations(given: Any, kind: str, where: str) -> None:
    if given is None:
        return
    if kind == "int" or not isinstance(given, dict):
        raise NotImplementedError(f"{where} is {given!r}; only None is supported")
    checked(given, NUMBERS, {}, OBSERVED, where=f"{where}.")
    one_of(given, "type", ("float",), where=f"{where}.")
    one_of(given, "num_bits", (8,), where=f"{where}.")


def _patterns(raw: Mapping[str, Any], key: str, where: str) -> tuple[str, ...]:
    found = names(raw, key, where=where)
    check_patterns(found, "re:", f"{where}{key}")
    return found


def _is_named(name: str, patterns: tuple[str, ...]) -> bool:
    """By the name in a model with a head or, as the lists of a base model have it, in that."""
    both = name, name.removeprefix("model.")
    return any(re.match(each[3:], one) if each.startswith("re:") else each == one for each in patterns for one in both)


@dataclass(frozen=True)
class CompressedTensors(Quantization):
    schemes: tuple[Scheme, ...]
    ignored: tuple[str, ...]
    name = "compressed-tensors"

    @property
    def unit(self) -> tuple[int, int]:  # type: ignore[override]
        each = [int4_unit(one.group_size) if one.type == "int" else one.block for one in self.schemes]
        return math.lcm(*(rows or 1 for rows, _ in each)), math.lcm(*(columns or 1 for _, columns in each))

    @property
    def stores(self) -> tuple[str, ...]:
        return tuple(sorted({NAMES[each.type] for each in self.schemes}))

    def covers(self, name: str) -> bool:
        return not _is_named(name, self.ignored) and self._scheme(name) is not None

    def _scheme(self, name: str) -> Scheme | None:
        """As the library that wrote the file chose it: by a name, else the first pattern of the alphabet, else the
        class."""
        by_target = {target: each for each in self.schemes for target in each.targets}
        named = [target for target in by_target if _is_named(name, (target,))]
        first = min(named, key=lambda target: (target.startswith("re:"), target), default=CLASS)
        return by_target.get(first)

    def read(self, source: TensorSource, name: str, num_rows: int, in_features: int) -> Part:
        scheme, shape = self._scheme(name), (num_rows, in_features)
        assert scheme is not None
        return (
            _read_int4(source, name, shape, scheme) if scheme.type == "int" else _read_fp8(source, name, shape, scheme)
        )


def _read_fp8(source: TensorSource, name: str, shape: tuple[int, int], scheme: Scheme) -> Part:
    if source.has(f"{name}.input_scale"):
        source.view(f"{name}.input_scale", (1,), DTYPES)
    block = 1, int(shape[1])
    scale_shape: tuple[int, ...] = shape[0], 1
    if scheme.strategy == "block":
        block, scale_shape = scheme.block, num_blocks(*shape, scheme.block)
    elif scheme.strategy == "tensor":
        scale_shape = (1,)
    return read_fp8(source, name, shape, "weight_scale", scale_shape, block, scheme.quantizes_x)


def _read_int4(source: TensorSource, name: str, shape: tuple[int, int], scheme: Scheme) -> Part:
    count = num_groups(name, shape[1], scheme.group_size, shape[0])
    groups, of_inputs = groups_of(source, f"{name}.weight_g_idx", count, shape[1], scheme.has_order)
    packed = words(source.view(f"{name}.weight_packed", (shape[0], blocks(shape[1], PER_WORD)), ("int32",)))
    scales = source.view(f"{name}.weight_scale", (shape[0], groups), DTYPES)
    zeros = None
    if scheme.has_zeros:
        packed_zeros = source.view(f"{name}.weight_zero_point", (blocks(shape[0], PER_WORD), groups), ("int32",))
        zeros = unpacked(words(packed_zeros).T.copy()).T.copy()
    if source.has(f"{name}.weight_shape"):
        given = tuple(source.view(f"{name}.weight_shape", (2,), ("int64", "int32")).tolist())
        if given != tuple(map(whole, shape)):
            expected = list(map(whole, shape))
            raise source.error(f"{name}.weight_shape", f"holds {list(given)} but the config says {expected}")
    if of_inputs is not None:
        return dense_part(packed, scales, zeros, of_inputs, source.dtype)
    return int4_part(shape, write_along_inputs(packed), scales, zeros)
