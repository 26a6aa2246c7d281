/* sample_linear.h - sample_linear: the tokens that sample takes of a product. */
#ifndef PK_OPS_SAMPLE_LINEAR_H
#define PK_OPS_SAMPLE_LINEAR_H

#include "ops/linear.h"
#include "ops/sample.h"

PK_BEGIN_C

/* sample_linear, and linear_candidates of a part of the vocabulary: sample of linear's product. The two meet in memory for the logits, linear.out and sample.logits, of
 * float32; nobody reads there afterwards. No penalties, filters or counts; no bias or gate. */
typedef struct pk_sample_linear_args {
    pk_linear_args linear;
    pk_sample_args sample;
} pk_sample_linear_args;

typedef struct pk_sample_linear_call {
    const pk_view *x;
    pk_weight_call weight;
    bool weight_is_constant, is_batch_invariant;
    pk_sample_call sample; /* its logits are memory for the product; it has nothing optional */
    int64_t first_token;   /* of linear_candidates */
} pk_sample_linear_call;

pk_status pk_sample_linear(const pk_sample_linear_call *call, pk_stream stream, pk_error *err);
pk_status pk_linear_candidates(const pk_sample_linear_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
