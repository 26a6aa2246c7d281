/* sample.h - sample: one token per row. */
#ifndef PK_OPS_SAMPLE_H
#define PK_OPS_SAMPLE_H

#include "pk.h"

PK_BEGIN_C

/* sample: one token per row. csrc/ops/sampling.h defines what is computed, to the bit. An optional array that is NULL
 * is off for every row. */
typedef struct pk_sample_args {
    const void *logits;        /* [num_rows, vocab_size] float32, bfloat16 or float16 */
    const float *temperatures; /* [num_rows]; 0: greedy */
    const int64_t *seeds;      /* [num_rows] */
    const int32_t *positions;  /* [num_rows]: position of the token to be sampled in its sequence */
    const int32_t *top_k;      /* [num_rows] or NULL; <= 0: off */
    const float *top_p;        /* [num_rows] or NULL; >= 1: off */
    const float *min_p;        /* [num_rows] or NULL; <= 0: off */
    const float *repetition_penalties, *presence_penalties, *frequency_penalties; /* [num_rows] or NULL; 1, 0, 0: off */
    int32_t *counts;      /* [num_slots, vocab_size] or NULL: tokens seen, see count_tokens; the new ones are added */
    const int32_t *slots; /* [num_rows]: the row of counts, negative: none; NULL: row i has slot i */
    int32_t *out;         /* [num_rows] */
    uint64_t *candidates; /* [num_rows] or NULL: written instead of out, see csrc/ops/sampling.h */
    int64_t first_token;  /* of logits that are a part of the vocabulary; else 0 */
    int64_t num_rows, vocab_size, logits_stride, num_slots, counts_stride;
    pk_dtype dtype;
} pk_sample_args;

typedef struct pk_sample_call {
    const pk_view *logits, *temperatures, *seeds, *positions;
    const pk_view *top_k, *top_p, *min_p, *repetition_penalties, *presence_penalties,
        *frequency_penalties;      /* optional */
    const pk_view *counts, *slots; /* optional */
    pk_output *out;
} pk_sample_call;

pk_status pk_sample(const pk_sample_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
