/* rope.h - qk_norm_rope_store. */
#ifndef PK_OPS_ROPE_H
#define PK_OPS_ROPE_H

#include "ops/dense.h"
#include "ops/store.h"

PK_BEGIN_C

/* qk_norm_rope_store: from one fused projection (divided by `rms`), q and k are normalised a head (where the weights
 * are given) and rotated (halves: pairs (i, i + head_dim / 2)), q goes to q_out, k and v go to their slots. */
typedef struct pk_qk_norm_rope_store_args {
    const void *qkv;                 /* [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim] */
    const void *q_weight, *k_weight; /* [head_dim], both or neither */
    const float *cos_sin;            /* [max_positions, head_dim]: cos of every pair, then sin */
    const int32_t *positions;        /* [num_tokens] */
    void *q_out;                     /* [num_tokens, num_q_heads, head_dim] dense */
    int64_t qkv_stride, max_positions, num_q_heads;
    float eps;
    pk_rms_arg rms;
    pk_store_args store; /* key and value unset: they come from qkv */
} pk_qk_norm_rope_store_args;

typedef struct pk_qk_norm_rope_store_call {
    const pk_view *qkv, *q_weight, *k_weight, *cos_sin, *positions, *k_cache, *v_cache, *slot_mapping;
    const pk_view *rms_of, *rms_squares; /* or NULL */
    double eps;
    pk_scale k_scale, v_scale;
    pk_output *q_out; /* of qkv_attention_fwd NULL: its queries are nobody else's */
} pk_qk_norm_rope_store_call;

pk_status pk_qk_norm_rope_store(const pk_qk_norm_rope_store_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
