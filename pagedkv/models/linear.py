"""Linear, the product with a weight, and what makes one of a checkpoint's tensors."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from pagedkv import Tensor, ops
from pagedkv.ops import Communicator

from . import DTYPES
from .lora import LoraPart, LoraSize
from .places import Places, is_readonly
from .share import Share, is_first
from .spec import Quantization
from .weight import Part, Weight, part_of, part_of_view, stackable

LARGE = 1 << 20  # bytes of a weight: with fewer, a product's time is that of a launch


class Linear:
    """x @ weight.T + bias: the only caller of linear and of its kin. weight: [out_features, in_features], in parts of
    different kinds where a checkpoint's ignore list divides what is one product here; bias: None or [out_features].
    Weights are promised to be constant: a kernel may fetch them before its turn.

    lora: memory for adapters of its projections; empty: it takes none.
    comm: of ranks that have a share of the inputs each, so that a product is one of the terms of the whole.
    batch_invariant: see ops.linear."""

    def __init__(
        self, *weights: Weight, bias: Tensor | None = None, lora: Sequence[LoraPart] = (),
        comm: Communicator | None = None, batch_invariant: bool = False,
    ) -> None:  # fmt: skip
        self.weights, self.bias, self.lora, self.comm = weights, bias, lora, comm
        self.batch_invariant = batch_invariant

    @property
    def nbytes(self) -> int:
        return sum(weight.nbytes for weight in self.weights)

    @property
    def can_fold(self) -> bool:
        """Whether the norm before the product may become a division after it. A bias is added before that division. In
        float16 a product of rows that are not yet divided may be too large. A scale is one for many columns. What an
        adapter adds is rounded once more, and would have to be multiplied by the norm, too."""
        is_plain = len(self.weights) == 1 and not self.weights[0].is_quantised and not self.lora
        return is_plain and self.bias is None and self.weights[0].data.dtype != "float16"

    def plain_weight(self, name: str) -> Tensor:
        """That of a product of nothing else. ValueError: why it is none."""
        if len(self.weights) > 1 or self.weights[0].is_quantised or self.bias is not None or self.lora:
            raise ValueError(f"{name} is quantised, has a bias, or takes adapters")
        return self.weights[0].data

    def fold(self, norm: Tensor) -> Tensor | None:
        """Multiplies a norm's weight into this one, in place unless it lies in a file's memory. Returns the norm that
        must still run before the product, or None: the reader of the product divides by the root mean square."""
        if not self.can_fold:
            return norm
        data = self.weights[0].data
        folded = ops.empty(data.shape, data.dtype) if is_readonly(data) else data
        self.weights = (Weight(ops.scale_columns(data, norm, out=folded)),)
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
        adapter_slots: Tensor | None = None,
        out: Tensor,
    ) -> Tensor:
        """See ops.linear. adapter_slots: of the rows of x; None: none has an adapter."""
        assert self.comm is None or not add_to_out, "all ranks would add what is added once: layers.add_to_residual"
        if adapter_slots is not None and self.lora:
            assert rms_eps is None and out_squares is None  # see can_fold
            return self._adapted(x, adapter_slots, gate_up, add_to_out, out)
        if len(self.weights) > 1:
            assert rms_eps is None and out_squares is None  # see can_fold and squares_width
            return self._products(x, gate_up, add_to_out, out)
        return _multiply(
            x, self.weights[0], self.bias, gate_up=gate_up, rms_eps=rms_eps, x_squares=x_squares,
            out_squares=out_squares, add_to_out=add_to_out, batch_invariant=self.batch_invariant, out=out,
        )  # fmt: skip

    def _products(self, x: Tensor, gate_up: Tensor | None, add_to_out: bool, out: Tensor) -> Tensor:
        """Each weight's, into its columns."""
        product, start = out if gate_up is None else gate_up, 0
        for weight in self.weights:
            end = start + len(weight.data)
            bias = None if self.bias is None else self.bias[start:end]
            options = {"add_to_out": add_to_out, "batch_invariant": self.batch_invariant}
            _multiply(x, weight, bias, **options, out=product[:, start:end])
            start = end
        return out if gate_up is None else ops.silu_and_mul(product, out=out)

    def _adapted(self, x: Tensor, slots: Tensor, gate_up: Tensor | None, add_to_out: bool, out: Tensor) -> Tensor:
        """With what adapters add to the product, which is therefore written before it is gated."""
        product = self.product(x, add_to_out=add_to_out, out=out if gate_up is None else gate_up)
        for part in self.lora:
            part.add(x, slots, product)
        return product if gate_up is None else ops.silu_and_mul(product, out=out)

    def squares_width(self, x: Tensor, out: Tensor) -> int:
        """See ops.linear_squares. Several weights leave none."""
        if len(self.weights) > 1:
            return 0
        return ops.linear_squares(x, **self.weights[0].arguments, batch_invariant=self.batch_invariant, out=out)


def _multiply(x: Tensor, weight: Weight, bias: Tensor | None, **options: Any) -> Tensor:
    """Of one weight: see ops.linear."""
    options |= weight.arguments | {"weight_is_constant": True, "quantize_x": weight.quantizes_x}
    product: Tensor = ops.linear(x, bias=bias, **options)
    return product


def tune(linears: Iterable[Linear], num_rows: Sequence[int], dtype: str, **options: Any) -> None:
    """See ops.tune_linear."""
    weights = [weight for each in linears for weight in each.weights if weight.nbytes >= LARGE]
    ops.tune_linear([weight.arguments for weight in weights], num_rows, dtype=dtype, **options)


class TensorSource(ABC):
    """Where blocks get their tensors from, by name: in one dtype and on one device."""

    dtype: str
    device: str
    quantization: Quantization | None = None  # in which form the weights of products are there
    lora: LoraSize | None = None  # what memory products have for adapters
    comm: Communicator | None = None  # of the ranks that have the tensors' shares; None: one has all
    batch_invariant: bool = False  # no token's bits may depend on the other tokens of a step
    has_head: bool = True  # one that is not, may still have the embedding for a head
    dequantised: list[str]  # those that could not stay as they were
    places: Places  # where they went

    @abstractmethod
    def load(self, name: str, *shape: int) -> Tensor:
        """The tensor, which must have this shape; of dimensions that are Shares, the rank's share."""

    @abstractmethod
    def load_stacked(self, rows: Mapping[str, int], *rest: int) -> Tensor:
        """Several tensors, each [rows, *rest], stacked along dimension 0: memory of its own."""

    @abstractmethod
    def has(self, name: str) -> bool:
        """Whether there is a tensor that need not be there."""

    @abstractmethod
    def view(self, name: str, shape: tuple[int, ...], dtypes: Collection[str]) -> Tensor:
        """The tensor as it is, on the host. It must have this shape and one of these dtypes."""

    @abstractmethod
    def error(self, name: str, message: str) -> Exception:
        """To be raised for a tensor's content. The message says where it is and what is wrong."""

    @abstractmethod
    def place(self, parts: Sequence[Part], num_experts: int | None = None) -> Weight:
        """The weight of parts of one kind, on the device; or that of experts, which have as many parts each."""

    @abstractmethod
    def check_all_used(self, copies: Mapping[str, str]) -> None:
        """Raises if there is a tensor that was not loaded, and is not one of `copies`: by their names those of the
        tensors that they must equal."""

    def linear(
        self, rows: Mapping[str, int], in_features: int, *, has_bias: bool = False, takes_adapters: bool = False
    ) -> Linear:
        """One product for the projections of these names, which have so many outputs each. takes_adapters: its caller
        hands adapter_slots to product()."""
        lora = self._lora_parts(rows, in_features, self.lora) if takes_adapters and self.lora is not None else []
        biases = {f"{name}.bias": count for name, count in rows.items()}
        # Of a sum one term has the bias.
        bias = self._joined(biases) if has_bias and is_first(in_features) else None
        if has_bias and bias is None:
            self.places.elsewhere.update(biases)
        comm = self.comm if isinstance(in_features, Share) else None
        if not any(map(self.is_quantised, rows)):
            weights = {f"{name}.weight": count for name, count in rows.items()}
            placed = [Weight(self._joined(weights, in_features))]
        else:
            parts = [self.part(name, count, in_features) for name, count in rows.items()]
            placed = [self.place(each) for each in stackable(parts)]
        return Linear(*placed, bias=bias, lora=lora, comm=comm, batch_invariant=self.batch_invariant)

    def is_quantised(self, name: str) -> bool:
        """Whether the weight of the product of this name is, or the one of all experts."""
        covers = False if self.quantization is None else self.quantization.covers(name)
        return not (self.has(f"{name}.weight") or self.has(name)) if covers is None else covers

    def _lora_parts(self, rows: Mapping[str, int], in_features: int, size: LoraSize) -> list[LoraPart]:
        parts: list[LoraPart] = []
        for name, count in rows.items():
            first: int = parts[-1].columns.stop if parts else 0
            parts.append(LoraPart(name, first, count, in_features, size, self.dtype, self.device))
        return parts

    def part(self, name: str, num_rows: int, in_features: int) -> Part:
        """The weight of the projection of this name, in the form in which it is to be placed."""
        quantization = self.quantization
        if quantization is not None and self.is_quantised(name):
            part = part_of(self, lambda source: quantization.read(source, name, num_rows, in_features))
            if part.scales is None:
                self.dequantised.append(name)
            return part
        shape = num_rows, in_features
        return part_of(self, lambda source: part_of_view(source.view(f"{name}.weight", shape, DTYPES), source.dtype))

    def _joined(self, rows: Mapping[str, int], *rest: int) -> Tensor:
        """A single tensor may stay where it is."""
        if len(rows) > 1:
            return self.load_stacked(rows, *rest)
        ((name, count),) = rows.items()
        return self.load(name, count, *rest)
