"""Every operation on no rows at all: nothing is computed, nothing is refused. (More of attention: tests/cases.py.)"""

import numpy as np
import pytest
from pools import put
from test_overlap import operations

import pagedkv
from pagedkv import ops

CALLS = {
    "store_kvcache": lambda t: pagedkv.store_kvcache(t(0, 2, 8), t(0, 2, 8), t(3, 4, 2, 8), t(3, 4, 2, 8), t(0, dtype=np.int32)),
    "append_kvcache": lambda t: ops.append_kvcache(
        t(0, 2, 8), t(0, 2, 8), t(3, 4, 2, 8), t(3, 4, 2, 8), t(0, 2, dtype=np.int32), t(0, dtype=np.int32)),
    "rope_append_kvcache": lambda t: ops.rope_append_kvcache(
        t(0, 4, 8), t(9, 4), t(9, 4), t(0, 2, 8), t(0, 2, 8), t(3, 4, 2, 8), t(3, 4, 2, 8), t(0, 2, dtype=np.int32),
        t(0, dtype=np.int32)),
    "paged_attention_fwd": lambda t: pagedkv.paged_attention_fwd(
        t(0, 4, 8), t(3, 4, 2, 8), t(3, 4, 2, 8), t(0, 2, dtype=np.int32), t(0, dtype=np.int32)),
    "plan_attention": lambda t: pagedkv.plan_attention(
        t(0, 4, 8), t(3, 4, 2, 8), t(3, 4, 2, 8), t(0, 2, dtype=np.int32), t(0, dtype=np.int32)),
    "copy_blocks": lambda t: pagedkv.copy_blocks([t(3, 4, 2, 8)], np.zeros((0, 2), np.int32)),
    "swap_blocks": lambda t: pagedkv.swap_blocks([t(3, 4, 2, 8)], [np.zeros((3, 4, 2, 8), np.float32)], np.zeros((0, 2), np.int32)),
    "merge_attention_states": lambda t: pagedkv.merge_attention_states(t(3, 0, 2, 8), t(3, 2, 0)),
    "embedding": lambda t: ops.embedding(t(0, dtype=np.int32), t(5, 8)),
    "gather_rows": lambda t: ops.gather_rows(t(5, 8), t(0, dtype=np.int64)),
    "rms_norm": lambda t: ops.rms_norm(t(0, 8), t(8)),
    "scale_columns": lambda t: ops.scale_columns(t(0, 8), t(8)),
    "silu_and_mul": lambda t: ops.silu_and_mul(t(0, 16)),
    "linear": lambda t: ops.linear(t(0, 8), t(16, 8)),
    "linear, gated": lambda t: ops.linear(t(0, 8), t(16, 8), gate_up=t(0, 16), rms_eps=1e-6),
    "route_experts": lambda t: ops.route_experts(t(0, 5), out_experts=t(0, 2, dtype=np.int32), out_weights=t(0, 2)),
    "expert_linear": lambda t: ops.expert_linear(t(0, 8), t(5, 16, 8), t(0, 2, dtype=np.int32)),
    "expert_linear, summed": lambda t: ops.expert_linear(
        t(0, 2, 8), t(5, 16, 8), t(0, 2, dtype=np.int32), weights=t(0, 2)),
    "moe_mlp": lambda t: ops.moe_mlp(
        t(0, 8), t(5, 8), t(5, 6, 8), t(5, 8, 3), logits=t(0, 5), experts=t(0, 2, dtype=np.int32), weights=t(0, 2), activation=t(0, 2, 3)),
    "lora_add": lambda t: ops.lora_add(t(0, 8), t(2, 3, 8), t(2, 16, 3), t(0, dtype=np.int32), out=t(0, 16)),
    "qk_norm_rope_store": lambda t: ops.qk_norm_rope_store(
        t(0, 48), t(8), t(8), t(9, 8), t(0, dtype=np.int32), t(3, 4, 2, 8), t(3, 4, 2, 8), t(0, dtype=np.int32)),
    "qkv_attention_fwd": lambda t: ops.qkv_attention_fwd(
        t(0, 48), t(8), t(8), t(9, 8), t(0, dtype=np.int32), t(3, 4, 2, 8), t(3, 4, 2, 8), t(0, dtype=np.int32),
        t(0, 2, dtype=np.int32), t(0, dtype=np.int32)),
    "sample_linear": lambda t: ops.sample_linear(
        t(0, 8), t(11, 8), t(0), t(0, dtype=np.int64), t(0, dtype=np.int32), logits=t(0, 11)),
    "linear_candidates": lambda t: ops.linear_candidates(
        t(0, 8), t(11, 8), t(0), t(0, dtype=np.int64), t(0, dtype=np.int32), 64, logits=t(0, 11)),
    "bias_logits": lambda t: ops.bias_logits(t(3, 11), t(0, dtype=np.int32), t(0, dtype=np.int32), t(0)),
    "mask_logits": lambda t: ops.mask_logits(t(0, 11), t(0, 1, dtype=np.int32)),
    "mask_logits, rows": lambda t: ops.mask_logits(t(3, 11), t(0, 1, dtype=np.int32), t(0, dtype=np.int32)),
    "sample": lambda t: ops.sample(t(0, 11), t(0), t(0, dtype=np.int64), t(0, dtype=np.int32)),
    "take_sampled": lambda t: ops.take_sampled(t(0, dtype=np.int32), t(0, dtype=np.int32)),
    "count_tokens": lambda t: ops.count_tokens(t(0, dtype=np.int32), t(0, dtype=np.int32), t(11, dtype=np.int32)),
    "token_logprobs": lambda t: ops.token_logprobs(t(0, 11), t(0, dtype=np.int32), 3),
}  # fmt: skip


def test_every_operation_is_called():
    """Of one that is missing, CALLS needs a line."""
    of_groups = {"all_reduce", "all_gather", "sample_candidates"}  # test_collectives.py
    assert {name.partition(",")[0] for name in CALLS} | of_groups == operations().keys()


@pytest.mark.parametrize("name", CALLS)
def test_no_rows(name, device):
    result = CALLS[name](lambda *shape, dtype=np.float32: put(np.zeros(shape, dtype), device))
    for out in result if isinstance(result, tuple) else [result]:
        assert out is None or 0 in out.shape
    ops.synchronize(device)
