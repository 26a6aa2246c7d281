/* logits.h - bias_logits and mask_logits. */
#ifndef PK_OPS_LOGITS_H
#define PK_OPS_LOGITS_H

#include "pk.h"

PK_BEGIN_C

/* bias_logits: logits[rows[i], token_ids[i]] += values[i] */
typedef struct pk_bias_args {
    float *logits;                   /* [num_rows, vocab_size] */
    const int32_t *rows, *token_ids; /* [num_values] */
    const float *values;             /* [num_values] */
    int64_t num_rows, vocab_size, num_values, logits_stride;
} pk_bias_args;

/* mask_logits: logits[rows[i], t] = -inf where bit t % 32 of bitmask[i, t / 32] is 0 */
typedef struct pk_mask_args {
    float *logits;          /* [num_rows, vocab_size] */
    const int32_t *bitmask; /* [num_masks, ceil(vocab_size / 32)] */
    const int32_t *rows;    /* [num_masks], or NULL: mask i is for row i */
    int64_t num_rows, num_masks, vocab_size, logits_stride, bitmask_stride;
} pk_mask_args;

typedef struct pk_bias_call {
    const pk_view *logits, *rows, *token_ids, *values;
} pk_bias_call;

typedef struct pk_mask_call {
    const pk_view *logits, *bitmask;
    const pk_view *rows; /* optional */
} pk_mask_call;

pk_status pk_bias_logits(const pk_bias_call *call, pk_stream stream, pk_error *err);
pk_status pk_mask_logits(const pk_mask_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
