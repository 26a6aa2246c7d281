/* qkv_attention.c - qkv_attention_fwd for Python: docstrings and tables of parameters. The rules are in
 * csrc/ops/qkv_attention.c. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/qkv_attention.h"

#define CALL pk_qkv_attention_call
const char py_qkv_attention_fwd_doc[] = PyDoc_STR(
    "qkv_attention_fwd($module, qkv, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slot_mapping, "
    "block_tables, context_lens, *, rms_of=None, rms_squares=None, eps=1e-06, cu_seqlens_q=None, max_seqlen_q=None, softmax_scale=None, "
    "window_size=(-1, -1), k_scale=None, v_scale=None, num_splits=0, batch_invariant=False, plan=None, past_is_constant=False, "
    "out=None, stream=None)\n--\n\n"
    "All that attention does after a fused projection: q = qk_norm_rope_store(qkv, ...), which stores the new keys\n"
    "and values, then causal paged_attention_fwd(q, ...). For few sequences with one token each, a GPU does both in\n"
    "one kernel, which can start while the projection still runs: up to 112 sequences (96 over an fp8 cache) with at\n"
    "most 2,048 elements of queries a token, up to 8 with more.\n"
    "\n"
    "The arguments are those of the two operations, but for these.\n"
    "\n"
    "Args:\n"
    "    slot_mapping: where a token's slot is not negative, it must be its own in block_tables. A row of padding may\n"
    "        have any slot that is not read here; what out has for it is undefined then.\n"
    "    k_scale, v_scale: one number, or one per KV head.\n"
    "    plan: what plan_attention returned for q.\n"
    "    past_is_constant: True promises the same of positions, slot_mapping, cos_sin, q_weight and k_weight as of\n"
    "        block_tables.\n" PY_DOC_OUT PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_tokens, num_q_heads, head_dim].\n" PY_DOC_RAISES
    "        An id out of range is treated as by the two operations.\n");
PY_OP(qkv_attention_fwd, P_AS(TENSOR, qkv, rope.qkv), P_AS(OPTIONAL, q_weight, rope.q_weight),
      P_AS(OPTIONAL, k_weight, rope.k_weight), P_AS(TENSOR, cos_sin, rope.cos_sin),
      P_AS(TENSOR, positions, rope.positions), P_AS(WRITTEN, k_cache, rope.k_cache),
      P_AS(WRITTEN, v_cache, rope.v_cache), P_AS(TENSOR, slot_mapping, rope.slot_mapping),
      P_AS(TENSOR, block_tables, attention.block_tables), P_AS(TENSOR, context_lens, attention.context_lens),
      P_AS(OPTIONAL, rms_of, rope.rms_of), P_AS(OPTIONAL, rms_squares, rope.rms_squares), P_AS(DOUBLE, eps, rope.eps),
      P_AS(OPTIONAL, cu_seqlens_q, attention.cu_seqlens_q), P_AS(INT, max_seqlen_q, attention.max_seqlen_q),
      P_AS(OPTIONAL_DOUBLE, softmax_scale, attention.softmax_scale), P_AS(PAIR, window_size, attention.window),
      P_AS(SCALE, k_scale, rope.k_scale), P_AS(SCALE, v_scale, rope.v_scale),
      P_AS(INT, num_splits, attention.num_splits), P_AS(BOOL, batch_invariant, attention.is_batch_invariant),
      P_AS(OPTIONAL, plan, attention.plan), P_AS(BOOL, past_is_constant, attention.past_is_constant),
      P_AS(OUTPUT, out, attention.out));
