"""The blocks of a decoder's layers. A block holds its weights and writes into buffers that the caller owns.

A block begins with a norm. It is no call of its own where it is folded into the first product (see Linear.fold): then
the reader of that product divides by the root mean square. With few tokens it finds the squares of x where the product
that made x has left them. What every block has is in Block; a kind of MLP needs forward() besides.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from pagedkv import Tensor, ops
from pagedkv.ops import Communicator

from .buffers import Buffers
from .config import DecoderConfig, ExpertsConfig
from .experts import load_experts
from .linear import Linear, TensorSource
from .spec import Batch, KVLayer


def window_size(num_keys: int) -> tuple[int, int]:
    """window_size of attention for queries that see num_keys keys, their own included; 0: all."""
    return (num_keys - 1, 0) if num_keys else (-1, -1)


class Block(ABC):
    """into_new, into_residual: its products, by whether they add to what is there, so that they can be tuned."""

    into_new: tuple[Linear, ...]
    into_residual: tuple[Linear, ...]

    def __init__(self, config: DecoderConfig, source: TensorSource, norm: str, first: Linear | None) -> None:
        """norm: the name of the norm before `first`; None: before several products, so that it is not folded."""
        self.eps = config.rms_norm_eps
        weight = source.load(f"{norm}.weight", config.hidden_size)
        self.norm: Tensor | None = weight
        if first is not None:
            before = first.weights[0].data
            self.norm = first.fold(weight)
            if self.norm is None:
                source.places.add_fold(before, first.weights[0].data, weight)

    @staticmethod
    @abstractmethod
    def buffer_sizes(config: Any) -> dict[str, int]:
        """The numbers of a token in each of the buffers that the block needs."""

    @abstractmethod
    def squares_width(self, buffers: Buffers) -> int:
        """Of how many columns of buffers.residual the block leaves the sum of squares as one number; 0: of none."""

    def normed(self, buffers: Buffers) -> Tensor:
        """What the first product multiplies."""
        if self.norm is None:
            return buffers.residual
        return ops.rms_norm(buffers.residual, self.norm, self.eps, out=buffers.normed)


def add_to_residual(linear: Linear, x: Tensor, buffers: Buffers, squares: Tensor | None) -> None:
    """A block's last product: buffers.residual += that of x; leaves its squares."""
    slots = buffers.adapter_slots
    if linear.comm is None:
        linear.product(x, out_squares=squares, add_to_out=True, adapter_slots=slots, out=buffers.residual)
    else:
        add_all_to_residual(linear.product(x, adapter_slots=slots, out=buffers.partial), linear.comm, buffers, squares)


def add_all_to_residual(partial: Tensor, comm: Communicator, buffers: Buffers, squares: Tensor | None) -> None:
    """buffers.residual += the sum of what all ranks have; leaves its squares."""
    ops.all_reduce(partial, comm, residual=buffers.residual, out_squares=squares, out=buffers.residual)


def squares_width_of(linear: Linear, x: Tensor, buffers: Buffers) -> int:
    """Of that product: see Block.squares_width."""
    return linear.squares_width(x, buffers.residual) if linear.comm is None else buffers.residual.shape[1]


class Attention(Block):
    def __init__(
        self, config: DecoderConfig, source: TensorSource, cos_sin: Tensor, layer: KVLayer, *, name: str, norm: str
    ) -> None:
        self.num_q_heads, self.head_dim, self.cos_sin = config.num_q_heads, layer.head_dim, cos_sin
        self.window, self.batch_invariant = window_size(layer.window), source.batch_invariant
        q_size, kv_size = config.num_q_heads * layer.head_dim, layer.num_kv_heads * layer.head_dim
        rows = {f"{name}.q_proj": q_size, f"{name}.k_proj": kv_size, f"{name}.v_proj": kv_size}
        self.qkv = source.linear(rows, config.hidden_size, has_bias=config.qkv_bias, takes_adapters=True)
        rows = {f"{name}.o_proj": config.hidden_size}
        self.output = source.linear(rows, q_size, has_bias=config.o_bias, takes_adapters=True)
        self.into_new, self.into_residual = (self.qkv,), (self.output,)
        super().__init__(config, source, norm, self.qkv)
        self.q_norm = self.k_norm = None
        if config.qk_norm:
            self.q_norm = source.load(f"{name}.q_norm.weight", layer.head_dim)
            self.k_norm = source.load(f"{name}.k_norm.weight", layer.head_dim)

    @staticmethod
    def buffer_sizes(config: DecoderConfig) -> dict[str, int]:
        q_size, kv_size = config.num_q_heads * config.head_dim, config.num_kv_heads * config.head_dim
        return {"qkv": q_size + 2 * kv_size, "q": q_size, "attention": q_size}

    def heads(self, tensor: Tensor) -> Tensor:
        """[num_tokens, num_q_heads, head_dim]"""
        return tensor.view((len(tensor), self.num_q_heads, self.head_dim))

    def forward(
        self, batch: Batch, k_cache: Tensor, v_cache: Tensor, buffers: Buffers, squares: Tensor | None
    ) -> None:
        """buffers.attention = the heads of attention(norm(buffers.residual)); writes the tokens' KV into the caches.
        squares: of buffers.residual, where a product has left them."""
        is_folded = self.norm is None
        x = self.normed(buffers)
        self.qkv.product(x, adapter_slots=buffers.adapter_slots, out=buffers.qkv)
        ops.qkv_attention_fwd(
            buffers.qkv, self.q_norm, self.k_norm, self.cos_sin, batch.positions, k_cache, v_cache, batch.slot_mapping,
            batch.block_tables, batch.context_lens, rms_of=x if is_folded else None,
            rms_squares=squares if is_folded else None, eps=self.eps, cu_seqlens_q=batch.cu_seqlens_q,
            max_seqlen_q=batch.max_seqlen_q, window_size=self.window, batch_invariant=self.batch_invariant,
            plan=batch.plans.get(self.window), past_is_constant=True, out=self.heads(buffers.attention),
        )  # fmt: skip

    def project(self, buffers: Buffers, squares: Tensor | None) -> None:
        """buffers.residual += buffers.attention, projected; leaves its squares"""
        add_to_residual(self.output, buffers.attention, buffers, squares)

    def step_arguments(self, index: int) -> dict[str, Tensor]:
        """Of this layer: see Model.step_arguments."""
        if self.window != window_size(0):
            raise ValueError(f"layer {index} has a window")
        named = ("qkv_weights", self.qkv), ("o_weights", self.output)
        weights = {name: each.plain_weight(f"{name} of layer {index}") for name, each in named}
        assert self.norm is None, "it is folded into a plain weight"
        if self.q_norm is None or self.k_norm is None:
            return weights
        return weights | {"q_norms": self.q_norm, "k_norms": self.k_norm}

    def squares_width(self, buffers: Buffers) -> int:
        return squares_width_of(self.output, buffers.attention, buffers)


class MLP(Block):
    @abstractmethod
    def forward(self, buffers: Buffers, squares: Tensor | None) -> None:
        """buffers.residual += mlp(norm(buffers.residual)); takes its squares and leaves them"""

    def step_arguments(self, index: int) -> dict[str, Tensor]:
        """Of this layer: see Model.step_arguments."""
        raise ValueError(f"layer {index} has no plain MLP")


class GatedMLP(MLP):
    def __init__(self, config: DecoderConfig, source: TensorSource, *, name: str, norm: str) -> None:
        size, has_bias = config.intermediate_size, config.mlp_bias
        rows = {f"{name}.gate_proj": size, f"{name}.up_proj": size}
        self.gate_up = source.linear(rows, config.hidden_size, has_bias=has_bias, takes_adapters=True)
        rows = {f"{name}.down_proj": config.hidden_size}
        self.down = source.linear(rows, size, has_bias=has_bias, takes_adapters=True)
        self.into_new, self.into_residual = (self.gate_up,), (self.down,)
        super().__init__(config, source, norm, self.gate_up)

    @staticmethod
    def buffer_sizes(config: DecoderConfig) -> dict[str, int]:
        return {"gate_up": 2 * config.intermediate_size, "activation": config.intermediate_size}

    def forward(self, buffers: Buffers, squares: Tensor | None) -> None:
        is_folded = self.norm is None
        self.gate_up.product(
            self.normed(buffers),
            gate_up=buffers.gate_up,
            rms_eps=self.eps if is_folded else None,
            x_squares=squares if is_folded else None,
            adapter_slots=buffers.adapter_slots,
            out=buffers.activation,
        )
        add_to_residual(self.down, buffers.activation, buffers, squares)

    def step_arguments(self, index: int) -> dict[str, Tensor]:
        named = ("gate_up_weights", self.gate_up), ("down_weights", self.down)
        weights = {name: each.plain_weight(f"{name} of layer {index}") for name, each in named}
        assert self.norm is None, "it is folded into a plain weight"
        return weights

    def squares_width(self, buffers: Buffers) -> int:
        return squares_width_of(self.down, buffers.activation, buffers)


class Experts(MLP):
    """A mixture of experts: each token has those of the greatest logits, and their sum, weighed.

    The logits are float32 and the weights are not rounded, where transformers rounds both to the model's dtype."""

    into_new = into_residual = ()

    def __init__(self, config: ExpertsConfig, source: TensorSource, *, name: str, norm: str) -> None:
        hidden, size, count = config.hidden_size, config.expert_size, config.num_experts
        self.num_chosen, self.size, self.normalizes = config.num_chosen, size, config.normalizes
        self.router = source.linear({f"{name}.gate": count}, hidden)
        self.gate_up = load_experts(source, f"{name}.experts", count, {"gate_proj": size, "up_proj": size}, hidden)
        self.down = load_experts(source, f"{name}.experts", count, {"down_proj": hidden}, size)
        super().__init__(config, source, norm, None)

    @staticmethod
    def buffer_sizes(config: ExpertsConfig) -> dict[str, int]:
        return {
            "router_logits": config.num_experts,
            "experts": config.num_chosen,
            "expert_weights": config.num_chosen,
            "expert_activation": config.num_chosen * config.expert_size,
        }

    def forward(self, buffers: Buffers, squares: Tensor | None) -> None:
        comm = self.down.comm
        out = buffers.residual if comm is None else buffers.partial
        (self.forward_quantised if self.is_quantised else self.forward_plain)(buffers, out, comm is None)
        if comm is not None:
            add_all_to_residual(out, comm, buffers, squares)

    @property
    def is_quantised(self) -> bool:
        return any(each.is_quantised for each in (*self.router.weights, self.gate_up.weight, self.down.weight))

    def forward_plain(self, buffers: Buffers, out: Tensor, add_to_out: bool) -> None:
        x = self.normed(buffers)
        (router,) = self.router.weights
        ops.moe_mlp(
            x, router.data, self.gate_up.weight.data, self.down.weight.data, normalize=self.normalizes,
            add_to_out=add_to_out, weight_is_constant=True, batch_invariant=self.router.batch_invariant,
            logits=buffers.router_logits, experts=buffers.experts, weights=buffers.expert_weights,
            activation=buffers.expert_activation.view((len(x), self.num_chosen, self.size)), out=out,
        )  # fmt: skip

    def forward_quantised(self, buffers: Buffers, out: Tensor, add_to_out: bool) -> None:
        x, experts, weights = self.normed(buffers), buffers.experts, buffers.expert_weights
        activation = buffers.expert_activation.view((len(x), self.num_chosen, self.size))
        self.router.product(x, out=buffers.router_logits)
        ops.route_experts(buffers.router_logits, normalize=self.normalizes, out_experts=experts, out_weights=weights)
        self.gate_up.product(x, experts, gated=True, out=activation)
        self.down.product(
            activation, experts, weights=weights, add_to_out=add_to_out, experts_are_constant=True, out=out
        )

    def squares_width(self, buffers: Buffers) -> int:
        return 0 if self.down.comm is None else buffers.residual.shape[1]
