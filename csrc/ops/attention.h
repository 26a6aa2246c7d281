/* attention.h - paged_attention_fwd and plan_attention. */
#ifndef PK_OPS_ATTENTION_H
#define PK_OPS_ATTENTION_H

#include "ops/store.h"

PK_BEGIN_C

/* csrc/ops/attention.c says what is computed of it. */
typedef struct pk_attention_args {
    const void *q;                 /* [num_tokens, num_q_heads, head_dim] */
    const void *k_cache, *v_cache; /* [num_blocks, block_size, num_kv_heads, head_dim] */
    const int32_t *block_tables;   /* [num_seqs, max_blocks_per_seq], last dimension dense */
    const int32_t *context_lens;   /* [num_seqs]: keys that a sequence may see, its new tokens included */
    const int32_t *cu_seqlens_q;   /* [num_seqs + 1], or NULL: num_tokens / num_seqs queries each */
    const int32_t *key_starts;     /* [num_seqs]: slots of its pages in front of a sequence's keys, or NULL: none */
    const int32_t *table_starts;   /* [num_seqs]: entries of its row in front of its pages, or NULL: none */
    const float *alibi_slopes;     /* [num_seqs or 1, num_q_heads] or NULL */
    const float *sinks;            /* [num_q_heads] or NULL: a logit that joins the softmax with no value */
    void *out;                     /* [num_tokens, num_q_heads, head_dim] */
    float *lse;                    /* [num_q_heads, num_tokens] natural log, or NULL */
    int32_t *plan;                 /* [num_rows, 12] dense, or NULL; plan_attention writes it */
    int64_t num_tokens, num_seqs, num_q_heads, num_kv_heads, head_dim, num_blocks, block_size, max_blocks_per_seq;
    int64_t max_seqlen_q; /* an upper bound of the queries of one sequence */
    int64_t q_token_stride, q_head_stride, out_token_stride, out_head_stride;
    pk_cache_strides k_strides, v_strides;
    int64_t block_table_stride;
    int64_t alibi_seq_stride; /* 0 where the slopes are shared by all sequences */
    int64_t lse_head_stride;
    int64_t window_left, window_right; /* -1: unbounded; right is 0 where is_causal */
    float softmax_scale, softcap;      /* softcap 0: none */
    pk_scale_arg k_scale, v_scale;
    int num_splits; /* 0: the backend chooses; n: up to n ranges of the keys, whatever the batch */
    bool is_causal;
    bool
        is_batch_invariant; /* a query's bits depend on what it sees alone, not on the queries beside it or the lengths */
    bool past_is_constant; /* nothing that may still run writes the plan, the tables, or keys before the queries' */
    pk_dtype dtype, cache_dtype;
} pk_attention_args;

typedef struct pk_attention_call {
    const pk_view *q, *k_cache, *v_cache, *block_tables, *context_lens;
    const pk_view *cu_seqlens_q, *key_starts, *table_starts, *alibi_slopes, *sinks; /* optional */
    int64_t max_seqlen_q;                                                           /* INT64_MAX: not given */
    const double *softmax_scale;                                                    /* NULL: 1 / sqrt(head_dim) */
    bool is_causal;
    int64_t window[2]; /* left, right */
    double softcap;
    pk_scale k_scale, v_scale;
    int64_t num_splits;
    const pk_view *plan; /* optional */
    bool past_is_constant, is_batch_invariant;
    pk_output *out, *lse; /* lse NULL: not wanted */
} pk_attention_call;

pk_status pk_paged_attention_fwd(const pk_attention_call *call, pk_stream stream, pk_error *err);
/* call->out is the plan; what does not bear on it is absent. */
pk_status pk_plan_attention(const pk_attention_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
