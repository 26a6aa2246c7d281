"""Qwen3 with experts (30B-A3B, 235B-A22B), https://arxiv.org/abs/2505.09388: Qwen3, in which most layers or all of them
have experts for an MLP."""

from __future__ import annotations

from typing import Any

from .config import ExpertsConfig, Keys, checked, common_fields, count, count_layers, experts_fields, no_windows
from .config_keys import flag
from .decoder import Decoder
from .layers import MLP, Attention, Block, Experts, GatedMLP
from .linear import TensorSource
from .spec import Family

READ = """
    attention_bias decoder_sparse_step max_window_layers mlp_only_layers moe_intermediate_size norm_topk_prob
    num_experts num_experts_per_tok num_local_experts output_router_logits router_aux_loss_coef sliding_window
"""
KEYS = Keys(
    architectures=("Qwen3MoeForCausalLM", "Qwen3MoeModel"),
    read=tuple(READ.split()),
    neutral={
        "use_sliding_window": (False,),  # and so neither sliding_window nor max_window_layers counts
        "qkv_bias": (False,),  # this and what follows: Qwen3-Coder's file
        "shared_expert_intermediate_size": (0,),
        "use_qk_norm": (True,),
    },
    defaults={
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "decoder_sparse_step": 1,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
)


class Qwen3MoE(Decoder):
    config: ExpertsConfig

    @classmethod
    def blocks(cls, config: Any) -> tuple[type[Block], ...]:
        kinds = {Experts if has_experts else GatedMLP for has_experts in config.has_experts}
        return Attention, *kinds

    def make_mlp(self, index: int, source: TensorSource, *, name: str, norm: str) -> MLP:
        kind = Experts if self.config.has_experts[index] else GatedMLP
        return kind(self.config, source, name=name, norm=norm)


def parse(raw: dict[str, Any], generation: dict[str, Any]) -> ExpertsConfig:
    raw = checked(raw, KEYS)
    has_bias, num_layers = flag(raw, "attention_bias"), count_layers(raw)
    dense, step = raw.get("mlp_only_layers") or (), count(raw, "decoder_sparse_step")
    if not all(isinstance(i, int) for i in dense):
        raise ValueError(f"mlp_only_layers is {dense!r} but must be a list of integers")
    return ExpertsConfig(
        **common_fields(raw, generation),
        **experts_fields(raw),
        has_experts=tuple(i not in dense and (i + 1) % step == 0 for i in range(num_layers)),
        windows=no_windows(raw),
        qk_norm=True,
        qkv_bias=has_bias,
        o_bias=has_bias,
    )


FAMILY = Family(parse, Qwen3MoE)
