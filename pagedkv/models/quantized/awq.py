"""AWQ's "gemm" format: `qweight` int32 [K, N / 8] has the outputs of a word in the order 0 2 4 6 1 3 5 7, as have
`qzeros` [K / group, N / 8]; `scales` are [K / group, N]."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .. import DTYPES
from ..linear import TensorSource
from ..share import blocks
from ..spec import Quantization
from ..weight import Part
from .int4 import ORDER, PER_WORD, int4_part, int4_unit, transposed, unpacked, words, write_along_outputs
from .keys import HARMLESS, NEUTRAL, checked, group_size, names, names_part_of, num_groups, one_of

FORMAT = {
    "checkpoint_format": ("gemm",),
    "dynamic": ({},),
    "format": ("gemm",),
    "lm_head": (False,),
    "method": ("awq",),
    "modules_in_block_to_quantize": (),
}


def parse(raw: Mapping[str, Any]) -> Quantization:
    checked(raw, "quant_method bits group_size zero_point version modules_to_not_convert", NEUTRAL | FORMAT, HARMLESS)
    one_of(raw, "bits", (4,), 4)
    one_of(raw, "zero_point", (True, False), True)  # false: GPTQModel and AutoRound still write zeros, which are all 8
    one_of(raw, "version", ("gemm", "GEMM"), "gemm")
    return Awq(group_size(raw), names(raw, "modules_to_not_convert"))


@dataclass(frozen=True)
class Awq(Quantization):
    group_size: int
    ignored: tuple[str, ...]
    name, stores = "awq", ("int4",)

    @property
    def unit(self) -> tuple[int, int]:  # type: ignore[override]
        return int4_unit(self.group_size)

    def covers(self, name: str) -> bool | None:
        """Loaders differ in what an entry names: any part of a name, a pattern, or its end. vLLM asks the files where
        there is no list."""
        return False if name == "lm_head" or names_part_of(name, self.ignored) else None

    def read(self, source: TensorSource, name: str, num_rows: int, in_features: int) -> Part:
        groups = num_groups(name, in_features, self.group_size, num_rows)
        columns = blocks(num_rows, PER_WORD)
        packed = source.view(f"{name}.qweight", (in_features, columns), ("int32",))
        packed_zeros = source.view(f"{name}.qzeros", (groups, columns), ("int32",))
        scales = source.view(f"{name}.scales", (groups, num_rows), DTYPES)
        zeros = unpacked(words(packed_zeros), ORDER).T.copy()
        write = write_along_outputs(words(packed))
        return int4_part((num_rows, in_features), write, transposed(scales), zeros, step=PER_WORD)
