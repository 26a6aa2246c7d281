/* lists.h - lists the pairs of few tokens by expert. Each CTA does it for itself in shared memory, which saves a kernel that
 * the product would wait for. For more pairs lists.cu does it once. */
#ifndef PK_CUDA_EXPERTS_LISTS_H
#define PK_CUDA_EXPERTS_LISTS_H

#include "cuda/experts/groups.h"

/* In shared memory: the lists, and what they are made with. */
static inline int64_t listed_bytes(const pk_expert_linear_args *args, int most_rows)
{
    return 16 + 2 * pk_num_pairs(args) * 4 + pk_most_groups(args, most_rows) * (int64_t)sizeof(pk_expert_group) +
           (3 * args->num_experts + 5) * 4;
}

/* firsts[i] becomes the sum of counts of all before i, and first_groups[i] that of their groups; the last are the sums of
 * all. By one warp, of which each lane has some neighbours. */
template <int MOST_ROWS>
__device__ static inline void add_up_counts(const int *counts, int *firsts, int *first_groups, int count)
{
    const int lane = threadIdx.x % 32, share = (count + 31) / 32;
    const int begin = min(lane * share, count), end = min(begin + share, count);
    int sum = 0, groups = 0;
#pragma unroll 1
    for (int i = begin; i < end; i++) sum += counts[i], groups += (counts[i] + MOST_ROWS - 1) / MOST_ROWS;
    int before = sum, groups_before = groups;
#pragma unroll 1
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, before, distance), its = __shfl_up_sync(~0u, groups_before, distance);
        if (lane >= distance) before += other, groups_before += its;
    }
    if (lane == 31) firsts[count] = before, first_groups[count] = groups_before;
    before -= sum, groups_before -= groups;
#pragma unroll 1
    for (int i = begin; i < end; i++) {
        firsts[i] = before, first_groups[i] = groups_before;
        before += counts[i], groups_before += (counts[i] + MOST_ROWS - 1) / MOST_ROWS;
    }
}

/* By all threads of a CTA, in groups of up to MOST_ROWS. The pairs of a group are in any order: no output depends on it. No
 * loop is unrolled but where loads wait: instructions come from memory, too, for the weights have taken the L2 cache. */
template <int THREADS, int MOST_ROWS>
__device__ static inline pk_expert_groups list_pairs(const pk_expert_linear_args &args, char *smem,
                                                     pk_cuda_bad_id *bad_id)
{
    const int num_experts = (int)args.num_experts, num_pairs = (int)pk_num_pairs(&args);
    pk_expert_groups lists = {MOST_ROWS, (int *)smem, (pk_expert_group *)(smem + 16), nullptr};
    lists.order = (int32_t *)(lists.groups + pk_most_groups(&args, MOST_ROWS));
    int *experts = lists.order + num_pairs, *counts = experts + num_pairs; /* experts: a thread's own pairs */
    int *firsts = counts + num_experts + 1, *first_groups = firsts + num_experts + 2;
#pragma unroll 4
    for (int pair = threadIdx.x; pair < num_pairs; pair += THREADS) experts[pair] = __ldcg(&args.experts[pair]);
#pragma unroll 1
    for (int i = threadIdx.x; i <= num_experts; i += THREADS) counts[i] = 0;
    __syncthreads();
#pragma unroll 1
    for (int pair = threadIdx.x; pair < num_pairs; pair += THREADS) {
        int expert = experts[pair];
        if (expert < 0 || expert >= num_experts) {
            if (blockIdx.x == 0) pk_record_bad_id(bad_id, PK_BAD_EXPERT, pair / args.num_chosen, expert, num_experts);
            expert = num_experts;
        }
        if (args.linear.x.num_rows == 1) /* each pair is a group, and that is all */
            lists.order[pair] = pair, lists.groups[pair] = {expert, pair, 1};
        else
            experts[pair] = expert << 16 | atomicAdd(&counts[expert], 1);
    }
    if (args.linear.x.num_rows == 1) {
        if (threadIdx.x == 0) *lists.num_groups = num_pairs;
        __syncthreads();
        return lists;
    }
    __syncthreads();
    if (threadIdx.x < 32) add_up_counts<MOST_ROWS>(counts, firsts, first_groups, num_experts + 1);
    __syncthreads();
    auto put_in_order = [&]() {
#pragma unroll 1
        for (int pair = threadIdx.x; pair < num_pairs; pair += THREADS)
            lists.order[firsts[experts[pair] >> 16] + (experts[pair] & 0xffff)] = pair;
    };
    put_in_order();
    /* Other CTAs must divide an expert's pairs as this one does, where they are several groups: in the order of the pairs. */
    bool is_divided = false;
#pragma unroll 1
    for (int expert = threadIdx.x; expert <= num_experts; expert += THREADS) is_divided |= counts[expert] > MOST_ROWS;
    if (__syncthreads_or(is_divided)) {
#pragma unroll 1
        for (int pair = threadIdx.x; pair < num_pairs; pair += THREADS) {
            const int expert = experts[pair] >> 16;
            int rank = 0;
#pragma unroll 1
            for (int i = firsts[expert]; i < firsts[expert + 1]; i++) rank += lists.order[i] < pair;
            experts[pair] = expert << 16 | rank;
        }
        __syncthreads();
        put_in_order();
    }
#pragma unroll 1
    for (int expert = threadIdx.x; expert <= num_experts; expert += THREADS)
        for (int first = 0; first < counts[expert]; first += MOST_ROWS)
            lists.groups[first_groups[expert] + first / MOST_ROWS] = {expert, firsts[expert] + first,
                                                                      min(MOST_ROWS, counts[expert] - first)};
    if (threadIdx.x == 0) *lists.num_groups = first_groups[num_experts + 1];
    __syncthreads();
    return lists;
}

#endif
