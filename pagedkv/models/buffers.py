"""The memory of a step, by the names under which the blocks use it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from pagedkv import Tensor, ops


class Buffers:
    """[num_tokens, size] each. Which of them there are, and their sizes, is what the blocks of a model ask for (see
    layers.py); these two every model has."""

    residual: Tensor  # hidden_size: what the blocks add to
    normed: Tensor  # hidden_size
    partial: Tensor  # hidden_size, of several ranks: this one's term of what is added to residual

    # Of Attention.
    qkv: Tensor  # (num_q_heads + 2 * num_kv_heads) * head_dim
    q: Tensor  # num_q_heads * head_dim: the shape to plan for, and memory to swap with attention in only()
    attention: Tensor  # num_q_heads * head_dim

    # Of GatedMLP.
    gate_up: Tensor  # 2 * intermediate_size
    activation: Tensor  # intermediate_size

    # Of Experts.
    router_logits: Tensor  # num_experts, float32
    experts: Tensor  # num_chosen, int32
    expert_weights: Tensor  # num_chosen, float32
    expert_activation: Tensor  # num_chosen * expert_size

    adapter_slots: Tensor | None = None  # int32, of each token of a step in which any has an adapter

    # Of others: the model's.
    DTYPES: ClassVar = {"router_logits": "float32", "experts": "int32", "expert_weights": "float32"}

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        vars(self).update(tensors)

    def first(self, num_tokens: int) -> Buffers:
        """The same memory, cut to num_tokens rows."""
        return Buffers({name: tensor[:num_tokens] for name, tensor in vars(self).items()})

    def only(self, tokens: Tensor) -> Buffers:
        """Buffers for these tokens alone, with their residual and attention, whose memory is swapped with that of
        normed and q. A token may occur several times."""
        few = self.first(len(tokens))
        residual = ops.gather_rows(self.residual, tokens, out=few.normed)
        attention = ops.gather_rows(self.attention, tokens, out=few.q)
        swapped = {"residual": residual, "normed": few.residual, "attention": attention, "q": few.attention}
        return Buffers(vars(few) | swapped)
