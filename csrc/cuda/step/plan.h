/* plan.h - whether a step can be one kernel, and how it is launched. Host code. */
#ifndef PK_CUDA_STEP_PLAN_H
#define PK_CUDA_STEP_PLAN_H

#include "cuda/step/step.h"

#include <initializer_list>

enum { STEP_MOST_STAGES = 12, STEP_LEAST_STAGES = STEP_PANEL + 1 /* one on its way while a panel's are read */ };

/* What of the model or the batch the kernel does not take, by name; NULL: it takes all. Only shapes are looked at, so that
 * it is decided once, where a graph is captured. */
static inline const char *pk_step_refusal(const pk_step_args &args, int num_ctas, int smem_bytes)
{
    const int heads = args.q_heads + 2 * args.kv_heads, group = args.kv_heads > 0 ? args.q_heads / args.kv_heads : 0;
    const int vector = 8; /* elements, so that 16 bytes of bf16 and 8 of e4m3 are aligned */
    if (args.num_rows != 1 && args.num_rows != 2 && args.num_rows != STEP_ROWS) return "rows";
    if ((group != 1 && group != 2 && group != 4 && group != 8) || group * args.kv_heads != args.q_heads)
        return "q_heads";
    if (args.num_rows * args.kv_heads > num_ctas) return "kv_heads";
    if (args.hidden % vector || args.hidden > STEP_OUTPUTS * num_ctas) return "hidden";
    if (args.ffn % vector) return "ffn";
    if (args.vocab % 2) return "vocab";
    for (int outputs : {heads * STEP_HEAD_DIM, args.hidden, args.ffn, args.vocab})
        if (outputs / 2 < num_ctas) return "num_ctas"; /* each has at least two */
    for (const pk_cache_strides &strides : {args.k_strides, args.v_strides})
        if (strides.block % vector || strides.slot % vector || strides.head % vector) return "cache strides";
    if (step_smem(args, STEP_LEAST_STAGES).bytes > smem_bytes) return "shared memory";
    return nullptr;
}

/* After pk_step_refusal has taken the step. */
static inline void pk_step_plan(pk_step_params *params, int num_ctas, int smem_bytes)
{
    const pk_step_args &args = params->args;
    const int splits = num_ctas / (args.num_rows * args.kv_heads);
    params->num_ctas = num_ctas, params->num_splits = splits < STEP_SPLITS ? splits : STEP_SPLITS;
    params->num_stages = STEP_MOST_STAGES;
    while (step_smem(args, params->num_stages).bytes > smem_bytes) params->num_stages--;
    params->at = step_smem(args, params->num_stages);
    params->in_flight = 3, params->prefetch = 1, params->prefetch_bytes = 128 << 10; /* not measured yet */
    params->flags = 0;
}

#endif
