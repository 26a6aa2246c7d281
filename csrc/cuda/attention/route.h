/* route.h - which kernel answers which sequences of a call. */
#ifndef PK_CUDA_ATTENTION_ROUTE_H
#define PK_CUDA_ATTENTION_ROUTE_H

#include "cuda/attention/plan/plan.h"

/* Which sequences the kernels take; a filter of max_rows 0 is none. */
struct attention_route {
    bool is_simple; /* all of them by simple.cu */
    row_filter decode, prefill;
    bool is_hopper; /* prefill is that of Hopper, unless the scale or ALiBi forbid it, of which a plan knows nothing */

    bool plans_prefill() const { return prefill.max_rows && is_hopper; }
};

static inline bool pk_has_queries(const pk_attention_args *args)
{
    return args->num_tokens > 0 && args->num_seqs > 0 && args->max_seqlen_q > 0;
}

attention_route choose_route(const pk_attention_args *args, const pk_cuda_device *device);

#endif
