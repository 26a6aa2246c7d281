/* store.h - store_kvcache, and scales of fp8 caches. */
#ifndef PK_OPS_STORE_H
#define PK_OPS_STORE_H

#include "pk.h"

PK_BEGIN_C

/* A scale of an fp8 cache: absent (view NULL: `value` counts, 1.0 by default), or float32 of shape
 * [1], [num_kv_heads] or, for attention only, [num_seqs, num_kv_heads]. stored = x / scale. */
typedef struct pk_scale {
    const pk_view *view;
    float value;
} pk_scale;

/* A scale as a backend sees it: data[seq * seq_stride + head * head_stride], or `value` where data is NULL. */
typedef struct pk_scale_arg {
    const float *data; /* on the operation's device */
    int64_t seq_stride, head_stride;
    float value;
} pk_scale_arg;

/* Of a cache, in elements; those of head_dim are dense. */
typedef struct pk_cache_strides {
    int64_t block, slot, head;
} pk_cache_strides;

/* store_kvcache: cache[slot_mapping[t]] = (key[t], value[t]) */
typedef struct pk_store_args {
    const void *key, *value;  /* [num_tokens, num_kv_heads, head_dim], last dimension dense */
    void *k_cache, *v_cache;  /* [num_blocks, block_size, num_kv_heads, head_dim], last dimension dense */
    const void *slot_mapping; /* [num_tokens] int32 or int64 (slots_are_int64), negative = skip */
    int64_t num_tokens, num_kv_heads, head_dim, num_blocks, block_size;
    int64_t key_token_stride, key_head_stride, value_token_stride, value_head_stride;
    pk_cache_strides k_strides, v_strides;
    pk_scale_arg k_scale, v_scale; /* used where cache_dtype is fp8 */
    pk_dtype dtype, cache_dtype;   /* cache_dtype is dtype or PK_F8E4M3 */
    bool slots_are_int64;
} pk_store_args;

typedef struct pk_store_call {
    const pk_view *key, *value, *k_cache, *v_cache, *slot_mapping;
    pk_scale k_scale, v_scale;
} pk_store_call;

pk_status pk_store_kvcache(const pk_store_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
