/* decode_step.h - decode_step and decode_step_words: a whole decode step of few rows as one kernel. */
#ifndef PK_OPS_DECODE_STEP_H
#define PK_OPS_DECODE_STEP_H

#include "ops/store.h"

PK_BEGIN_C

enum { PK_DECODE_LAYERS = 64 /* at most */ };

typedef struct pk_decode_layer {
    const void *qkv, *o, *gate_up,
        *down;                   /* [out_features, in_features], dense; norms are folded into the first and third */
    const void *q_norm, *k_norm; /* [head_dim], both or neither */
    void *k_cache, *v_cache;     /* [num_blocks, block_size, kv_heads, head_dim] */
} pk_decode_layer;

/* From tokens to tokens; everything but the caches is bfloat16. */
typedef struct pk_decode_step_args {
    const pk_decode_layer *layers;       /* [num_layers], of the caller's */
    const void *embedding, *norm, *head; /* [vocab, hidden], [hidden], [vocab, hidden] */
    const float *cos_sin;                /* [max_positions, head_dim] */
    int64_t num_layers, hidden, ffn, q_heads, kv_heads, head_dim, vocab, max_positions, block_size, num_blocks;
    float eps;
    pk_dtype cache_dtype; /* PK_BF16 or PK_F8E4M3 */
    pk_cache_strides k_strides, v_strides;
    pk_scale_arg k_scale, v_scale;
    int64_t num_rows, max_blocks, table_stride;
    const int32_t *token_ids, *positions, *slots, *context_lens, *next_positions; /* [num_rows] */
    const int32_t *block_tables;                                                  /* [num_rows, max_blocks] */
    const float *temperatures;
    const int64_t *seeds;
    int32_t *sampled; /* [num_rows] */
    uint64_t *words;
    int64_t num_words;
    bool in_clusters;
    int64_t *needed_words; /* not NULL: nothing is computed, and the rest of what is written is not there */
} pk_decode_step_args;

typedef struct pk_decode_step_call {
    const pk_view *token_ids, *sampled, *positions, *slot_mapping, *block_tables, *context_lens, *temperatures, *seeds,
        *next_positions;
    const pk_view *embedding, *norm, *head, *cos_sin;
    pk_views qkv_weights, o_weights, gate_up_weights, down_weights, q_norms, k_norms, k_caches, v_caches;
    const pk_view *words; /* not of decode_step_words */
    bool in_clusters;
    double eps;
    pk_scale k_scale, v_scale;
    int64_t needed_words; /* decode_step_words' result */
} pk_decode_step_call;

pk_status pk_decode_step(const pk_decode_step_call *call, pk_stream stream, pk_error *err);
pk_status pk_decode_step_words(pk_decode_step_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
