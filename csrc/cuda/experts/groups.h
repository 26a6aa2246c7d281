/* groups.h - how the pairs of an expert are divided into groups, and where the lists of many pairs lie in memory. */
#ifndef PK_CUDA_EXPERTS_GROUPS_H
#define PK_CUDA_EXPERTS_GROUPS_H

#include "cuda/experts/experts.h"

enum {
    GROUP_STEP = 16,     /* rows of x are multiplied in multiples of it */
    LIST_CHUNK = 1024,   /* pairs of a CTA that lists many, one a thread */
    LISTED_PAIRS = 2048, /* up to so many, each CTA of a product lists them for itself (lists.h) */
};

__host__ __device__ static inline int rounded_up(int count, int of) { return (count + of - 1) / of * of; }

/* The rows of each group of an expert's pairs, which are divided evenly; the last group may have fewer. */
__host__ __device__ static inline int rows_of_group(int count, int most)
{
    const int groups = (count + most - 1) / most;
    return groups == 0 ? GROUP_STEP : rounded_up((count + groups - 1) / groups, GROUP_STEP);
}
__host__ __device__ static inline int groups_of(int count, int most)
{
    const int rows = rows_of_group(count, most);
    return (count + rows - 1) / rows;
}

/* Pairs by expert, in scratch memory. */
struct expert_lists {
    pk_expert_groups groups;
    int *counts; /* [num_chunks, num_experts + 1]: of each chunk, by expert */
    int num_chunks;
};
static inline int64_t expert_lists_bytes(const pk_expert_linear_args *args, int most_rows)
{
    const int64_t pairs = pk_num_pairs(args), chunks = pk_ceil_div(pairs, LIST_CHUNK);
    return 16 + pk_most_groups(args, most_rows) * (int64_t)sizeof(pk_expert_group) +
           (pairs + chunks * (args->num_experts + 1)) * (int64_t)sizeof(int);
}
static inline expert_lists expert_lists_in(void *data, const pk_expert_linear_args *args, int most_rows)
{
    const int64_t pairs = pk_num_pairs(args);
    expert_lists made = {{most_rows, (int *)data, (pk_expert_group *)((char *)data + 16), nullptr}, nullptr, 0};
    made.groups.order = (int32_t *)(made.groups.groups + pk_most_groups(args, most_rows));
    made.counts = made.groups.order + pairs;
    made.num_chunks = (int)pk_ceil_div(pairs, LIST_CHUNK);
    return made;
}

/* lists.cu */
pk_status pk_cuda_list_experts(const pk_expert_linear_args *args, const expert_lists &lists, const pk_cuda_call &call);

#endif
