/* logprobs.h - token_logprobs. */
#ifndef PK_OPS_LOGPROBS_H
#define PK_OPS_LOGPROBS_H

#include "pk.h"

PK_BEGIN_C

enum { PK_MAX_BEST = 20 };

/* token_logprobs: log softmax(logits) of a token of each row, and of the num_best most likely (lowest first of equals)
 */
typedef struct pk_logprobs_args {
    const void *logits;       /* [num_rows, vocab_size] float32, bfloat16 or float16 */
    const int32_t *token_ids; /* [num_rows]; negative: the row is skipped */
    int32_t *ids;             /* [num_rows, 1 + num_best]: the token itself, then the best */
    float *logprobs;          /* the same shape */
    int64_t num_rows, vocab_size, num_best, logits_stride;
    pk_dtype dtype;
} pk_logprobs_args;

typedef struct pk_logprobs_call {
    const pk_view *logits, *token_ids;
    int64_t num_best;
    pk_output *out_ids, *out;
} pk_logprobs_call;

pk_status pk_token_logprobs(const pk_logprobs_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
