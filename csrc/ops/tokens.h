/* tokens.h - take_sampled and count_tokens. */
#ifndef PK_OPS_TOKENS_H
#define PK_OPS_TOKENS_H

#include "pk.h"

PK_BEGIN_C

/* take_sampled: token_ids[t] = max(sampled[-1 - token_ids[t]], 0) where token_ids[t] is negative */
typedef struct pk_take_sampled_args {
    int32_t *token_ids;     /* [num_tokens] */
    const int32_t *sampled; /* [num_rows], -1: no token could be sampled */
    int64_t num_tokens, num_rows;
} pk_take_sampled_args;

/* count_tokens: counts[v] = 2 * (times that output_ids holds v) + (whether prompt_ids holds v) */
typedef struct pk_count_args {
    const void *prompt_ids, *output_ids; /* [num_prompt], [num_output] int32 or int64 */
    int32_t *counts;                     /* [vocab_size] */
    int64_t num_prompt, num_output, vocab_size;
    bool prompt_is_int64, output_is_int64;
} pk_count_args;

typedef struct pk_take_sampled_call {
    const pk_view *token_ids, *sampled;
} pk_take_sampled_call;

typedef struct pk_count_call {
    const pk_view *prompt_ids, *output_ids, *counts;
} pk_count_call;

pk_status pk_take_sampled(const pk_take_sampled_call *call, pk_stream stream, pk_error *err);
pk_status pk_count_tokens(const pk_count_call *call, pk_stream stream, pk_error *err);

PK_END_C
#endif
