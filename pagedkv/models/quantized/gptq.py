"""GPTQ: `qweight` int32 [K / 8, N] has words along the inputs, `qzeros` [K / group, N / 8] along the outputs; `scales`
are [K / group, N], and `g_idx` int32 [K] is the group of each input. Version 1 stores zeros minus 1, "gptq_v2" as they
are. Not quantised are the head, unless it says so, the router of experts, names whose beginning a rule "-:..." of
`dynamic` matches, and those that `modules_in_block_to_quantize` lacks; "+:..." has another group size."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import DTYPES
from ..linear import TensorSource
from ..share import blocks, ranges_of, whole
from ..spec import Quantization
from ..weight import Part
from .int4 import PER_WORD, dense_part, int4_part, int4_unit, transposed, unpacked, words, write_along_inputs
from .keys import (
    HARMLESS,
    NEUTRAL,
    WHERE,
    check_patterns,
    checked,
    group_size,
    is_router,
    names,
    names_part_of,
    num_groups,
    one_of,
)

FORMATS = {"gptq": 0x11111111, "gptq_v2": 0}  # what is added to stored words of zeros, borrows between them included


def parse(raw: Mapping[str, Any]) -> Quantization:
    read = "quant_method bits group_size desc_act checkpoint_format format lm_head dynamic modules_in_block_to_quantize"
    checked(raw, read, NEUTRAL | {"method": ("gptq",)}, HARMLESS)
    one_of(raw, "bits", (4,))
    key = "checkpoint_format" if raw.get("checkpoint_format") is not None else "format"
    added = FORMATS[one_of(raw, key, FORMATS, "gptq")]
    if raw.get("format") not in (None, raw.get(key, "gptq")):
        raise ValueError(f"{WHERE}checkpoint_format is {raw[key]!r} but format is {raw['format']!r}")
    has_head = one_of(raw, "lm_head", (False, True), False)
    has_order = one_of(raw, "desc_act", (False, True), False)
    return Gptq(group_size(raw), added, has_head, has_order, _rules(raw), _blocks(raw, "modules_in_block_to_quantize"))


def _blocks(raw: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """The names of those that are quantised, in lists of what is done at once, or in one."""
    given = raw.get(key) or []
    lists = given if isinstance(given, list) and all(isinstance(each, list) for each in given) else [given]
    return tuple(name for each in lists for name in names({key: each}, key))


def _rules(raw: Mapping[str, Any]) -> tuple[tuple[str, int | None], ...]:
    rules = raw.get("dynamic") or {}
    found: list[tuple[str, int | None]] = []
    if not isinstance(rules, dict):
        raise ValueError(f"{WHERE}dynamic is {rules!r} but must be an object")
    for rule, given in rules.items():
        where = f"{WHERE}dynamic.{rule}."
        pattern = rule.removeprefix("-:").removeprefix("+:")
        check_patterns([pattern], "", f"{WHERE}dynamic")
        if rule.startswith("-:"):
            found.append((pattern, None))
        elif not isinstance(given, dict):
            raise ValueError(f"{where[:-1]} is {given!r} but must be an object")
        else:
            checked(given, "bits group_size", NEUTRAL, HARMLESS, where=where)
            one_of(given, "bits", (4,), 4, where=where)
            found.append((pattern, group_size({"group_size": raw.get("group_size")} | given, where=where)))
    return tuple(found)


@dataclass(frozen=True)
class Gptq(Quantization):
    group_size: int
    added_to_zeros: int
    has_head: bool
    has_order: bool  # groups may be in the order of activations
    rules: tuple[tuple[str, int | None], ...]  # a pattern, and the group size; None: not quantised. The first counts
    blocks: tuple[str, ...]  # names, of a layer's; none: all
    name, stores = "gptq", ("int4",)

    @property
    def unit(self) -> tuple[int, int]:  # type: ignore[override]
        each = [int4_unit(size) for size in (self.group_size, *(size for _, size in self.rules)) if size is not None]
        return PER_WORD, math.lcm(*(columns for _, columns in each))

    def _size(self, name: str) -> int | None:
        return next((size for pattern, size in self.rules if re.match(pattern, name)), self.group_size)

    def covers(self, name: str) -> bool | None:
        """`blocks` has a name if that of one layer is quantised, and vLLM asks the files where there are none."""
        if is_router(name) or self._size(name) is None or (name == "lm_head" and not self.has_head):
            return False
        is_left = self.blocks and name != "lm_head" and not names_part_of(name, self.blocks)
        return False if is_left else None

    def read(self, source: TensorSource, name: str, num_rows: int, in_features: int) -> Part:
        size = self._size(name)
        assert size is not None
        count = num_groups(name, in_features, size, num_rows)
        groups, of_inputs = groups_of(source, f"{name}.g_idx", count, in_features, self.has_order)
        packed = words(source.view(f"{name}.qweight", (blocks(in_features, PER_WORD), num_rows), ("int32",))).T
        packed_zeros = words(source.view(f"{name}.qzeros", (groups, blocks(num_rows, PER_WORD)), ("int32",)))
        scales = transposed(source.view(f"{name}.scales", (groups, num_rows), DTYPES))
        zeros = unpacked(packed_zeros + np.uint32(self.added_to_zeros)).T.copy()
        if of_inputs is not None:
            return dense_part(packed, scales, zeros, of_inputs, source.dtype)
        return int4_part((num_rows, in_features), write_along_inputs(packed), scales, zeros)


def groups_of(
    source: TensorSource, name: str, groups: int, in_features: int, has_order: bool
) -> tuple[int, np.ndarray | None]:
    """The groups that a weight needs, and the one of each input; None where neighbours have one. In another order the
    inputs of a rank's share may be of any. has_order: groups may be in any order, so the tensor must be there."""
    if not source.has(name) and not (has_order and whole(groups) > 1):
        return groups, None
    given = source.view(name, (in_features,), ("int32", "int64")).numpy()
    inputs = np.concatenate([np.arange(*each) for each in ranges_of(in_features)])
    if (given == -1).all() or (given == inputs // (whole(in_features) // whole(groups))).all():
        return groups, None  # -1: it was never set
    for wrong in given[(given < 0) | (given >= whole(groups))]:
        raise source.error(name, f"holds {wrong} but there are {whole(groups)} groups")
    return whole(groups), given
