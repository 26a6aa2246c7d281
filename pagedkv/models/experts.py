"""The products of a mixture of experts, and what makes one of a checkpoint's tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from pagedkv import Tensor, ops
from pagedkv.ops import Communicator

from .linear import TensorSource
from .share import Share
from .weight import Part, Weight, part_of


class ExpertLinear:
    """x @ weight.T of experts, which have one weight [num_experts, out_features, in_features]: the only caller of
    expert_linear."""

    def __init__(self, weight: Weight, comm: Communicator | None, batch_invariant: bool) -> None:
        """comm, batch_invariant: see Linear."""
        self.weight, self.comm, self.batch_invariant = weight, comm, batch_invariant

    def product(
        self,
        x: Tensor,
        experts: Tensor,
        *,
        weights: Tensor | None = None,
        gated: bool = False,
        add_to_out: bool = False,
        experts_are_constant: bool = False,
        out: Tensor,
    ) -> Tensor:
        """See ops.expert_linear."""
        return ops.expert_linear(
            x, experts=experts, **self.weight.arguments, weights=weights, gated=gated, add_to_out=add_to_out,
            weight_is_constant=True, experts_are_constant=experts_are_constant, batch_invariant=self.batch_invariant,
            out=out,
        )  # fmt: skip


def load_experts(
    source: TensorSource, name: str, num_experts: int, rows: Mapping[str, int], in_features: int
) -> ExpertLinear:
    """One product for the projections of each expert, which have so many outputs each: of a tensor for all experts,
    whose name joins those of the projections, or of a tensor each."""
    stems = [each.removesuffix("_proj") for each in rows]
    joined = f"{name}.{'_'.join(stems)}_proj"
    size = sum(rows.values())
    comm = source.comm if isinstance(in_features, Share) else None
    each = {f"{name}.{i}.{row}": count for i in range(num_experts) for row, count in rows.items()}
    weights = [{f"{name}.{i}.{row}.weight": count for row, count in rows.items()} for i in range(num_experts)]
    if source.has(joined):
        if not source.is_quantised(joined):
            weight = source.load(joined, num_experts, size, in_features)
            source.places.add_experts(joined, weight, weights)
            return ExpertLinear(Weight(weight), comm, source.batch_invariant)
        parts = _parts_of_joined(source, joined, num_experts, size, in_features)
    elif not any(map(source.is_quantised, each)):
        stacked = source.load_stacked({one: count for expert in weights for one, count in expert.items()}, in_features)
        weight = stacked.view((num_experts, int(size), int(in_features)))
        source.places.add_experts(joined, weight, weights)
        return ExpertLinear(Weight(weight), comm, source.batch_invariant)
    else:
        parts = [source.part(one, count, in_features) for one, count in each.items()]
        for one, part in zip(each, parts, strict=True):
            if part.kind != parts[0].kind:
                raise NotImplementedError(
                    f"{one} is quantised in another way than {next(iter(each))}; one for all experts is supported"
                )
    return ExpertLinear(source.place(parts, num_experts), comm, source.batch_invariant)


def _parts_of_joined(source: TensorSource, name: str, num_experts: int, num_rows: int, in_features: int) -> list[Part]:
    """Those of a tensor that holds all experts, and is quantised."""
    quantization = source.quantization
    assert quantization is not None
    if not quantization.reads_joined_experts:
        raise NotImplementedError(
            f"{name}: experts in one tensor, quantised ({quantization.name}); a tensor for each is supported"
        )
    views: dict[str, Tensor] = {}

    def read(index: int, views: dict[str, Tensor] | None, source: Any) -> Part:
        expert = _Expert(source, {} if views is None else views, num_experts, index)
        return quantization.read(expert, name, num_rows, in_features)

    # Read again, each has views of its own: nothing keeps those of the files.
    parts = [part_of(source, partial(read, i, views)) for i in range(num_experts)]
    return [replace(part, again=partial(read, i, None)) for i, part in enumerate(parts)]


class _Expert:
    """What a reader asks for of a single weight, of one expert: it lies in tensors of all experts."""

    def __init__(self, source: Any, views: dict[str, Tensor], num_experts: int, index: int) -> None:
        self.source, self.views, self.num_experts, self.index = source, views, num_experts, index

    def view(self, name: str, shape: tuple[int, ...], dtypes: Collection[str]) -> Tensor:
        """`experts.up_proj.weight_scale_inv` is one of `experts.up_proj_scale_inv`."""
        module, _, last = name.rpartition(".")
        joined = module + last.removeprefix("weight")
        if joined not in self.views:
            self.views[joined] = self.source.view(joined, (self.num_experts, *shape), dtypes)
        view: Tensor = self.views[joined][self.index]
        return view
