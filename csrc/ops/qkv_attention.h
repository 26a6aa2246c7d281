/* qkv_attention.h - qkv_attention_fwd: qk_norm_rope_store, then attention. */
#ifndef PK_OPS_QKV_ATTENTION_H
#define PK_OPS_QKV_ATTENTION_H

#include "ops/attention.h"
#include "ops/rope.h"

PK_BEGIN_C

/* qk_norm_rope_store, then attention, whose q is q_out: in one kernel, or by way of memory of the backend's own for
 * q. */
typedef struct pk_qkv_attention_args {
    pk_qk_norm_rope_store_args rope;
    pk_attention_args attention;
} pk_qkv_attention_args;

/* What `attention` says of q, the caches, their scales and the mask is ignored: those are of `rope`, and causal. */
typedef struct pk_qkv_attention_call {
    pk_qk_norm_rope_store_call rope;
    pk_attention_call attention;
} pk_qkv_attention_call;

pk_status pk_qkv_attention_fwd(const pk_qkv_attention_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
