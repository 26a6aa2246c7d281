/* merge.h - merge_attention_states. */
#ifndef PK_OPS_MERGE_H
#define PK_OPS_MERGE_H

#include "pk.h"

PK_BEGIN_C

/* merge_attention_states: out = sum_i out_i * exp(lse_i - lse), lse = log sum_i exp(lse_i) */
typedef struct pk_merge_args {
    const void *parts;      /* [num_parts, num_tokens, num_heads, head_dim] dense */
    const float *part_lses; /* [num_parts, num_heads, num_tokens] dense */
    void *out;              /* [num_tokens, num_heads, head_dim] dense */
    float *lse;             /* [num_heads, num_tokens] dense, or NULL */
    int64_t num_parts, num_tokens, num_heads, head_dim;
    pk_dtype dtype;
} pk_merge_args;

typedef struct pk_merge_call {
    const pk_view *o, *lse;
    pk_output *out, *out_lse; /* out_lse NULL: not wanted */
} pk_merge_call;

pk_status pk_merge_attention_states(const pk_merge_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
