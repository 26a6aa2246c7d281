"""Weights of float8_e4m3fn: those of Qwen's FP8 checkpoints, and those that are made while a checkpoint is loaded.

A file has `weight` [N, K] and `weight_scale_inv` [N / 128, K / 128], rounded up; the product of both is the value,
whatever the name says. The activations of few tokens stay in their dtype; those of many may be rounded to float8 by
scales of their own ("dynamic"), where a GPU multiplies that faster.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pagedkv import Tensor, ops

from .. import DTYPES
from ..linear import TensorSource
from ..share import blocks
from ..spec import Quantization
from ..weight import Part, Scales, part_of_view
from .keys import WHERE, check_patterns, checked, is_router, names, names_part_of, one_of

DTYPE = "float8_e4m3fn"
LARGEST = 448.0
BLOCK = (128, 128)
LISTS = "modules_to_not_convert", "ignored_layers"  # of what is not quantised; the second is AutoRound's name


def parse(raw: Mapping[str, Any]) -> Quantization:
    checked(
        raw,
        f"quant_method activation_scheme weight_block_size {' '.join(LISTS)}",
        {
            "dequantize": (False,),
            "expert_dtype": ("fp8",),
            "fmt": ("e4m3",),
            "modules_to_convert": (),
            "scale_fmt": ("float",),
        },
    )
    one_of(raw, "activation_scheme", ("dynamic",), "dynamic")
    given = [key for key in LISTS if raw.get(key) is not None]
    ignored = [each for key in given for each in names(raw, key)] if given else ["lm_head"]
    patterns = tuple(each for each in ignored if set(each) & set(r"*+?[](){}|^$\\"))  # transformers reads all as such
    check_patterns(patterns, "", f"{WHERE}{' or '.join(LISTS)}")
    return BlockFp8(block_of(raw, "weight_block_size", WHERE), tuple(ignored), patterns)


def block_of(raw: Mapping[str, Any], key: str, where: str) -> tuple[int, int]:
    value: Any = raw.get(key)
    is_pair = isinstance(value, (list, tuple)) and len(value) == 2
    if is_pair and all(type(each) is int and 0 < each < 2**31 for each in value):
        return value[0], value[1]
    raise NotImplementedError(f"{where}{key} is {value!r} but must be two positive integers below 2**31")


def num_blocks(num_rows: int, in_features: int, block: tuple[int, int]) -> tuple[int, int]:
    return blocks(num_rows, block[0]), blocks(in_features, block[1])


def read_fp8(
    source: TensorSource, name: str, shape: tuple[int, int], scale_name: str, scale_shape: tuple[int, ...],
    block: tuple[int, int], quantizes_x: bool,
) -> Part:  # fmt: skip
    """The part of a weight and its scales as files have them; one scale becomes one of each row."""
    weight = source.view(f"{name}.weight", shape, (DTYPE,))
    given = source.view(f"{name}.{scale_name}", scale_shape, DTYPES)
    counts = num_blocks(int(shape[0]), int(shape[1]), block)
    scales = ops.empty(counts, "float32")
    if len(given.view(-1)) == scales.nbytes // 4:
        scales.copy_(given.view(counts))
    else:
        scales.copy_(ops.from_dlpack(np.full(counts, float(given.view(-1)[0]), np.float32)))
    return part_of_view(weight, DTYPE, Scales(scales, block, quantizes_x=quantizes_x))


@dataclass(frozen=True)
class BlockFp8(Quantization):
    block: tuple[int, int]
    ignored: tuple[str, ...]
    patterns: tuple[str, ...]  # of the beginnings of names that are not quantised, too
    name, stores, reads_joined_experts = "fp8", ("fp8",), True

    def covers(self, name: str) -> bool:
        is_matched = any(re.match(rf"({each})(\.|$)", name) for each in self.patterns)
        return not is_matched and not names_part_of(name, self.ignored)

    @property
    def unit(self) -> tuple[int, int]:  # type: ignore[override]
        return self.block

    def read(self, source: TensorSource, name: str, num_rows: int, in_features: int) -> Part:
        shape = num_rows, in_features
        return read_fp8(source, name, shape, "weight_scale_inv", num_blocks(*shape, self.block), self.block, True)


@dataclass(frozen=True)
class LoadedAsFp8(Quantization):
    """Of weights that are not quantised in their files: all but the head's and those of experts' routers."""

    name, stores, reads_joined_experts, unit = "fp8", ("fp8",), True, BLOCK

    def covers(self, name: str) -> bool:
        return name != "lm_head" and not is_router(name)

    def read(self, source: TensorSource, name: str, num_rows: int, in_features: int) -> Part:
        weight = source.view(f"{name}.weight", (num_rows, in_features), DTYPES)
        scales = np.empty(num_blocks(int(num_rows), int(in_features), BLOCK), np.float32)

        def write(first: int, last: int, out: Tensor) -> None:
            for row in range(first, last, BLOCK[0]):
                end = min(row + BLOCK[0], last)
                scales[row // BLOCK[0]] = quantise_rows(weight[row:end], out[row - first : end - first])

        made = Scales(ops.from_dlpack(scales), BLOCK, quantizes_x=True)
        return Part(num_rows, in_features, DTYPE, write, BLOCK[0], made)


def quantise_rows(rows: Tensor, out: Tensor) -> np.ndarray:
    """out = the rows of one row of blocks, divided by the scales that are returned: their largest is LARGEST then."""
    size = rows.shape[1]
    given = ops.empty(rows.shape, "float32")
    given.view(-1).copy_(rows.view(-1))  # in one dimension: by this thread alone
    values = given.numpy()
    largest = np.zeros(-(-size // BLOCK[1]) * BLOCK[1], np.float32)
    largest[:size] = np.maximum(values.max(axis=0), -values.min(axis=0))
    scales: np.ndarray = largest.reshape(-1, BLOCK[1]).max(axis=1) / np.float32(LARGEST)
    np.maximum(scales, np.finfo(np.float32).tiny, out=scales)  # zeros stay zeros
    values /= np.repeat(scales, BLOCK[1])[:size]
    out.view(-1).copy_(given.view(-1))
    return scales
