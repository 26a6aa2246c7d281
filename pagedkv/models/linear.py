"""Linear, the product with a weight, and what makes one of a checkpoint's tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import Any

from pagedkv import Tensor, ops

LARGE = 1 << 20  # bytes of a weight: with fewer, a product's time is that of a launch


class Linear:
    """x @ weight.T + bias: the only caller of linear and of its kin. weight: [out_features, in_features]; bias: None or
    [out_features]. Weights are promised to be constant: a kernel may fetch them before its turn."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        self.weight, self.bias = weight, bias

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    @property
    def can_fold(self) -> bool:
        """Whether the norm before the product may become a division after it. A bias is added before that division. In
        float16 a product of rows that are not yet divided may be too large."""
        return self.bias is None and self.weight.dtype != "float16"

    def fold(self, norm: Tensor) -> Tensor | None:
        """Multiplies a norm's weight into this one, in place. Returns the norm that must still run before the product,
        or None: the reader of the product divides by the root mean square."""
        if not self.can_fold:
            return norm
        ops.scale_columns(self.weight, norm, out=self.weight)
        return None

    def product(
        self,
        x: Tensor,
        *,
        gate_up: Tensor | None = None,
        rms_eps: float | None = None,
        x_squares: Tensor | None = None,
        out_squares: Tensor | None = None,
        add_to_out: bool = False,
        out: Tensor,
    ) -> Tensor:
        """See ops.linear."""
        return ops.linear(
            x,
            self.weight,
            self.bias,
            gate_up=gate_up,
            rms_eps=rms_eps,
            x_squares=x_squares,
            out_squares=out_squares,
            add_to_out=add_to_out,
            weight_is_constant=True,
            out=out,
        )

    def squares_width(self, x: Tensor, out: Tensor) -> int:
        """See ops.linear_squares."""
        return ops.linear_squares(x, self.weight, out=out)

    def sample(self, hidden: Tensor, *numbers: Tensor, logits: Tensor, out: Tensor) -> Tensor:
        """Of a model's head: see spec.Model.sample."""
        return ops.sample_linear(hidden, self.weight, *numbers, logits=logits, weight_is_constant=True, out=out)


class ExpertLinear:
    """The same of experts, weight [num_experts, out_features, in_features]: the only caller of expert_linear."""

    def __init__(self, weight: Tensor) -> None:
        self.weight = weight

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
            x,
            self.weight,
            experts,
            weights=weights,
            gated=gated,
            add_to_out=add_to_out,
            weight_is_constant=True,
            experts_are_constant=experts_are_constant,
            out=out,
        )


def tune(linears: Iterable[Linear], num_rows: Sequence[int], **options: Any) -> None:
    """See ops.tune_linear."""
    ops.tune_linear([each.weight for each in linears if each.nbytes >= LARGE], num_rows, **options)


class TensorSource(ABC):
    """Where blocks get their tensors from, by name: in one dtype and on one device."""

    dtype: str
    device: str

    @abstractmethod
    def load(self, name: str, *shape: int) -> Tensor:
        """The tensor, which must have this shape."""

    @abstractmethod
    def load_stacked(self, rows: Mapping[str, int], *rest: int) -> Tensor:
        """Several tensors, each [rows, *rest], stacked along dimension 0: memory of its own."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is such a tensor."""

    @abstractmethod
    def check_all_used(self, ignored: Set[str] = frozenset()) -> None:
        """Raises if there is a tensor that was not loaded."""

    def linear(self, rows: Mapping[str, int], in_features: int, *, has_bias: bool = False) -> Linear:
        """One product for the projections of these names, which have so many outputs each."""
        weights = {f"{name}.weight": count for name, count in rows.items()}
        biases = {f"{name}.bias": count for name, count in rows.items()}
        bias = self._joined(biases) if has_bias else None
        return Linear(self._joined(weights, in_features), bias)

    def experts(self, name: str, num_experts: int, rows: Mapping[str, int], in_features: int) -> ExpertLinear:
        """One product for the projections of each expert, which have so many outputs each: of a tensor for all experts,
        whose name joins those of the projections, or of a tensor each."""
        size = sum(rows.values())
        stems = [each.removesuffix("_proj") for each in rows]
        joined = f"{name}.{'_'.join(stems)}_proj"
        if self.has(joined):
            return ExpertLinear(self.load(joined, num_experts, size, in_features))
        each = {f"{name}.{i}.{row}.weight": count for i in range(num_experts) for row, count in rows.items()}
        return ExpertLinear(self.load_stacked(each, in_features).view((num_experts, size, in_features)))

    def _joined(self, rows: Mapping[str, int], *rest: int) -> Tensor:
        """A single tensor may stay where it is."""
        if len(rows) > 1:
            return self.load_stacked(rows, *rest)
        ((name, count),) = rows.items()
        return self.load(name, count, *rest)
