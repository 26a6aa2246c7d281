/* lists.h - the pairs of few tokens by expert, listed by each CTA for itself in shared memory: a kernel less, and one that
 * the product would wait for. For more of them lists.cu does it once. */
#ifndef PK_CUDA_EXPERTS_LISTS_H
#define PK_CUDA_EXPERTS_LISTS_H

#include "cuda/experts/experts.h"

enum { LISTED_PAIRS = 2048 /* at most */ };

/* In shared memory: the lists, and what they are made with. */
static inline int64_t listed_bytes(const pk_expert_linear_args *args, int most_rows)
{
    return 16 + pk_num_pairs(args) * 4 + pk_most_groups(args, most_rows) * (int64_t)sizeof(pk_expert_group) +
           (3 * args->num_experts + 5) * 4;
}

/* The expert of a pair; num_experts: out of range. */
__device__ static inline int expert_of_pair(const pk_expert_linear_args &args, int pair)
{
    const int expert = __ldcg(&args.experts[pair]), num_experts = (int)args.num_experts;
    return expert >= 0 && expert < num_experts ? expert : num_experts;
}

/* firsts[i] becomes the sum of counts of all before i, and first_groups[i] that of their groups; the last are the sums of
 * all. By one warp, of which each lane has some neighbours. */
__device__ static inline void add_up_counts(const int *counts, int *firsts, int *first_groups, int count, int most_rows)
{
    const int lane = threadIdx.x % 32, share = (count + 31) / 32;
    const int begin = min(lane * share, count), end = min(begin + share, count);
    int sum = 0, groups = 0;
    for (int i = begin; i < end; i++) sum += counts[i], groups += (counts[i] + most_rows - 1) / most_rows;
    int before = sum, groups_before = groups;
    for (int distance = 1; distance < 32; distance *= 2) {
        const int other = __shfl_up_sync(~0u, before, distance), its = __shfl_up_sync(~0u, groups_before, distance);
        if (lane >= distance) before += other, groups_before += its;
    }
    if (lane == 31) firsts[count] = before, first_groups[count] = groups_before;
    before -= sum, groups_before -= groups;
    for (int i = begin; i < end; i++) {
        firsts[i] = before, first_groups[i] = groups_before;
        before += counts[i], groups_before += (counts[i] + most_rows - 1) / most_rows;
    }
}

/* By all threads of a CTA. The pairs of an expert are in any order: no output depends on it. */
template <int THREADS>
__device__ static inline pk_expert_groups list_pairs(const pk_expert_linear_args &args, int most_rows, char *smem,
                                                     pk_cuda_bad_id *bad_id)
{
    constexpr int MOST_OF_THREAD = (LISTED_PAIRS + THREADS - 1) / THREADS;
    const int num_experts = (int)args.num_experts, num_pairs = (int)pk_num_pairs(&args);
    pk_expert_groups lists = {most_rows, (int *)smem, (pk_expert_group *)(smem + 16), nullptr};
    lists.order = (int32_t *)(lists.groups + pk_most_groups(&args, most_rows));
    int *counts = lists.order + num_pairs, *firsts = counts + num_experts + 1, *first_groups = firsts + num_experts + 2;
    int experts[MOST_OF_THREAD], places[MOST_OF_THREAD]; /* places: among the pairs of the expert */
    for (int i = threadIdx.x; i <= num_experts; i += THREADS) counts[i] = 0;
#pragma unroll
    for (int i = 0; i < MOST_OF_THREAD; i++) {
        const int pair = i * THREADS + threadIdx.x;
        experts[i] = pair < num_pairs ? expert_of_pair(args, pair) : -1;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MOST_OF_THREAD; i++) {
        if (experts[i] < 0) break;
        places[i] = atomicAdd(&counts[experts[i]], 1);
        if (experts[i] == num_experts && blockIdx.x == 0) {
            const int pair = i * THREADS + threadIdx.x;
            pk_record_bad_id(bad_id, PK_BAD_EXPERT, pair / args.num_chosen, args.experts[pair], num_experts);
        }
    }
    __syncthreads();
    if (threadIdx.x < 32) add_up_counts(counts, firsts, first_groups, num_experts + 1, most_rows);
    __syncthreads();
#pragma unroll
    for (int i = 0; i < MOST_OF_THREAD; i++) {
        if (experts[i] < 0) break;
        lists.order[firsts[experts[i]] + places[i]] = i * THREADS + threadIdx.x;
    }
    for (int expert = threadIdx.x; expert <= num_experts; expert += THREADS)
        for (int i = 0; i * most_rows < counts[expert]; i++)
            lists.groups[first_groups[expert] + i] = {expert, firsts[expert] + i * most_rows,
                                                      min(most_rows, counts[expert] - i * most_rows)};
    if (threadIdx.x == 0) *lists.num_groups = first_groups[num_experts + 1];
    __syncthreads();
    return lists;
}

#endif
