/* plan.h - whether a step can be one kernel, and what its launch is given. Host code. */
#ifndef PK_CUDA_STEP_PLAN_H
#define PK_CUDA_STEP_PLAN_H

#include "cuda/step/step.h"

#include <stdio.h>

#include <initializer_list>

enum { STEP_LEAST_STAGES = 3, STEP_MOST_STAGES = 12, STEP_ALIGNMENT = 128 /* bytes, of weights */, PK_STEP_WHY = 128 };

/* Whether the kernel does not take the model or the batch, and why: of which argument of decode_step. It looks at shapes
 * alone. Whether so many CTAs run at once is asked beside it. */
static inline bool pk_step_refuses(const pk_step_args &args, int smem_bytes, char (&why)[PK_STEP_WHY])
{
    auto refuse = [&](const char *what, int64_t value, const char *must) {
        snprintf(why, sizeof why, "%s %lld but must be %s", what, (long long)value, must);
        return true;
    };
    const int teams = args.kv_heads, group = teams > 0 ? args.q_heads / teams : 0;
    if (args.num_rows < 1 || args.num_rows > STEP_ROWS) return refuse("token_ids: dim 0 is", args.num_rows, "1 or 2");
    if (args.num_layers < 1 || args.num_layers > STEP_LAYERS)
        return refuse("k_caches: there are", args.num_layers, "1 to 64");
    if (teams < 1 || teams > STEP_TEAMS) return refuse("k_caches: the KV heads are", teams, "1 to 8");
    if (group * teams != args.q_heads || (group != 2 && group != 4))
        return refuse("o_weights: the query heads are", args.q_heads, "2 or 4 for each KV head");
    if (args.hidden % STEP_WIDE || args.hidden % (STEP_RANKS * STEP_NARROW_ROWS))
        return refuse("embedding: dim 1 is", args.hidden, "a multiple of 1024");
    if (args.ffn % (teams * STEP_NARROW) || args.ffn % (teams * STEP_RANKS * 8))
        return refuse("down_weights: dim 1 is", args.ffn, "a multiple of 128 times the KV heads");
    if (args.vocab % 16 || args.vocab < teams * STEP_RANKS * 16) /* each CTA has some */
        return refuse("embedding: dim 0 is", args.vocab, "a multiple of 16, and 256 times the KV heads at least");
    for (int64_t stride : {args.strides.block, args.strides.slot, args.strides.head})
        if (stride % STEP_VECTOR) return refuse("k_caches: a stride is", stride, "a multiple of 8");
    if (const int bytes = step_smem(args, STEP_LEAST_STAGES).bytes; bytes > smem_bytes)
        return refuse("the shared memory of a CTA is", bytes, "less");
    return false;
}

/* Shared memory of a CTA at most: of a cluster, where two CTAs share an SM. 1 KB of each is CUDA's. */
constexpr int pk_step_smem_limit(bool in_clusters, const pk_cuda_card &card)
{
    return in_clusters ? card.smem_per_sm / 2 - 1024 : card.smem_per_cta;
}

/* Words of 8 bytes that steps need, zeros before the first one. Graphs of one model and number of rows may share them. */
static inline int64_t pk_step_num_words(const pk_step_args &args)
{
    const int64_t rows = args.num_rows, teams = args.kv_heads;
    return 8 + rows * teams * args.hidden + 2 * rows * teams * STEP_RANKS +
           teams * step_smem(args, STEP_LEAST_STAGES).mail_words;
}

/* After pk_step_refuses has taken the step. `words`: pk_step_num_words of them. */
static inline void pk_step_plan(pk_step_params *params, int smem_bytes, uint64_t *words)
{
    const pk_step_args &args = params->args;
    int num_stages = STEP_MOST_STAGES;
    while (step_smem(args, num_stages).bytes > smem_bytes) num_stages--;
    params->num_stages = num_stages, params->at = step_smem(args, num_stages);
    params->num_chunks = step_num_chunks(args), params->patience_ns = 1000000000;
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

#endif
