/* plan.h - whether a step can be one kernel, and what its launch is given. Host code. */
#ifndef PK_CUDA_STEP_PLAN_H
#define PK_CUDA_STEP_PLAN_H

#include "cuda/step/step.h"

#include <initializer_list>

enum { STEP_LEAST_STAGES = 3, STEP_MOST_STAGES = 12, STEP_ALIGNMENT = 128 /* bytes, of weights */ };

/* What of the model or the batch the kernel does not take, by name; NULL: it takes all. It looks at shapes alone, so a
 * graph's capture decides it. Whether so many CTAs run at once is asked beside it. */
static inline const char *pk_step_refusal(const pk_step_args &args, bool is_cluster, int smem_bytes)
{
    const int teams = args.kv_heads, group = teams > 0 ? args.q_heads / teams : 0;
    const int vector = 8; /* elements, so that 16 bytes of bf16 and 8 of e4m3 are aligned */
    if (args.num_rows != 1 && args.num_rows != 2 && args.num_rows != STEP_ROWS) return "rows";
    if (teams < 1 || teams > STEP_TEAMS) return "kv_heads";
    if (group * teams != args.q_heads || (group != 1 && group != 2 && group != 4 && group != 8)) return "q_heads";
    if (group == 8 && is_cluster) return "q_heads"; /* there are no registers for so many */
    if (args.hidden % STEP_WIDE || args.hidden % (STEP_RANKS * STEP_NARROW_ROWS)) return "hidden";
    if (args.ffn % (teams * STEP_NARROW) || args.ffn % (teams * STEP_RANKS * 8)) return "ffn";
    if (args.vocab % 8 || args.vocab < teams * STEP_RANKS * 16) return "vocab"; /* each CTA has some */
    for (const pk_cache_strides &strides : {args.k_strides, args.v_strides})
        if (strides.block % vector || strides.slot % vector || strides.head % vector) return "cache strides";
    if (step_smem(args, STEP_LEAST_STAGES).bytes > smem_bytes) return "shared memory";
    return nullptr;
}

/* Shared memory of a CTA at most: of a cluster, where two CTAs share an SM. 1 KB of each is CUDA's. */
static inline int pk_step_smem_limit(bool is_cluster, int smem_per_sm, int smem_per_cta)
{
    return is_cluster ? smem_per_sm / 2 - 1024 : smem_per_cta;
}

/* Words of 8 bytes that steps need, zeros before the first one. Graphs of one model and number of rows may share them. */
static inline int64_t pk_step_num_words(const pk_step_args &args)
{
    const int64_t rows = args.num_rows, teams = args.kv_heads;
    return 8 + rows * teams * args.hidden + 2 * rows * teams * STEP_RANKS +
           teams * step_smem(args, STEP_LEAST_STAGES).mail_words;
}

/* After pk_step_refusal has taken the step. `words`: pk_step_num_words of them. */
static inline void pk_step_plan(pk_step_params *params, bool is_cluster, int smem_bytes, uint64_t *words)
{
    const pk_step_args &args = params->args;
    int num_stages = STEP_MOST_STAGES;
    while (step_smem(args, num_stages).bytes > smem_bytes) num_stages--;
    params->num_stages = num_stages, params->at = step_smem(args, num_stages);
    params->num_chunks = step_num_chunks(args), params->in_flight = 3,
    params->prefetch = is_cluster ? 0 : 8; /* the probe's */
    params->flags = 0;
    for (int phase = STEP_QKV; phase <= STEP_HEAD; phase++) params->phases[phase] = step_phase(args, phase);
    params->words.head = (uint32_t *)words;
    params->words.sums = (uint32_t *)(words + 8);
    params->words.best = words + 8 + (int64_t)args.num_rows * args.kv_heads * args.hidden;
    params->words.mails = params->words.best + (int64_t)2 * args.num_rows * args.kv_heads * STEP_RANKS;
}

// --- where weights are. One map serves all weights of a width: a map that is new to an SM costs a trip to the memory.

/* Where a weight of so many inputs begins, seen from `base`, which lies before all weights: both at STEP_ALIGNMENT. */
struct step_place {
    uint32_t row, column; /* of the map: of `inputs`; of 64 inputs */
};
static inline step_place pk_step_place(const void *base, const void *weight, int inputs)
{
    const uint64_t at = (uint64_t)((const char *)weight - (const char *)base), pitch = (uint64_t)inputs * 2;
    return {(uint32_t)(at / pitch), (uint32_t)(at % pitch / (STEP_COLUMNS * 2))};
}
/* The map of the weights with so many inputs: columns in pieces of 64 as a dimension of their own, and twice as many as a
 * row has, because a weight may begin inside of one. `encode`: cuTensorMapEncodeTiled. */
static inline CUresult pk_step_map(decltype(&cuTensorMapEncodeTiled) encode, CUtensorMap *map, const void *base,
                                   int64_t bytes, int inputs, bool is_narrow)
{
    const cuuint64_t size[3] = {STEP_COLUMNS, (cuuint64_t)(bytes / (inputs * 2) + 1),
                                (cuuint64_t)(2 * inputs / STEP_COLUMNS)},
                     stride_bytes[2] = {(cuuint64_t)inputs * 2, STEP_COLUMNS * 2};
    const cuuint32_t box[3] = {STEP_COLUMNS, (cuuint32_t)(is_narrow ? STEP_NARROW_ROWS : 8),
                               (cuuint32_t)((is_narrow ? STEP_NARROW : STEP_WIDE) / STEP_COLUMNS)},
                     steps[3] = {1, 1, 1};
    return encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, (void *)base, size, stride_bytes, box, steps,
                  CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_NONE,
                  CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
}

#endif
