/* append.h - append_kvcache and rope_append_kvcache. */
#ifndef PK_OPS_APPEND_H
#define PK_OPS_APPEND_H

#include "ops/store.h"

PK_BEGIN_C

/* append_kvcache and rope_append_kvcache */
typedef struct pk_append_args {
    pk_store_args store;          /* slot_mapping unset: the tables say where a token goes */
    const int32_t *block_tables;  /* [num_seqs, max_blocks_per_seq], last dimension dense */
    const int32_t *cache_lens;    /* [num_seqs] */
    const int32_t *key_starts;    /* [num_seqs] or NULL: 0 */
    const int32_t *cu_seqlens;    /* [num_seqs + 1] of key, or NULL: num_tokens / num_seqs each */
    const int32_t *cu_seqlens_q;  /* the same of q */
    const int32_t *rotary_starts; /* [num_seqs] or NULL: cache_lens */
    const void *cos, *sin;        /* [max_positions, rotary_dim / 2] dense, of angle_dtype; NULL: nothing is rotated */
    const void *q;                /* [num_q_tokens, num_q_heads, head_dim] */
    void *out;                    /* the same shape */
    int64_t num_seqs, max_blocks_per_seq, block_table_stride, num_q_tokens, num_q_heads;
    int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride;
    int64_t max_positions, rotary_dim;
    bool is_interleaved; /* pairs of neighbours, not of halves */
    bool q_is_at_start;  /* all queries have the position of the first new key */
    pk_dtype angle_dtype;
} pk_append_args;

typedef struct pk_append_call {
    const pk_view *key, *value, *k_cache, *v_cache, *block_tables, *cache_lens;
    const pk_view *cu_seqlens, *key_starts; /* optional */
    pk_scale k_scale, v_scale;
    const pk_view *q, *cos, *sin;                /* of rope_append_kvcache; NULL: append_kvcache */
    const pk_view *cu_seqlens_q, *rotary_starts; /* optional */
    bool is_interleaved, q_is_at_start;
    pk_output *out;
} pk_append_call;

pk_status pk_append_kvcache(const pk_append_call *call, pk_stream stream, pk_error *err);
pk_status pk_rope_append_kvcache(const pk_append_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
