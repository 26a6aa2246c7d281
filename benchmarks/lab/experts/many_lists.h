/* many_lists.h - what stands beside many.h's products: lists of the pairs by expert, x's rows in their order, and a token's sum.
 *
 * The lists of lists.cu take every CTA over all pairs, three times. Here a CTA has 1,024 of them: one kernel counts, the other
 * adds up what all CTAs have counted and puts its pairs in their places, in the same order in every run.
 */
#ifndef MANY_LISTS_H
#define MANY_LISTS_H

#include "cuda/experts/experts.h"
#include "cuda/pack.h"
#include "many_plan.h"

enum { MANY_CHUNK = 1024 /* pairs of a CTA, one a thread */, MANY_WARPS = MANY_CHUNK / 32 };

struct many_lists {
    pk_expert_groups lists;
    int *counts;              /* [chunks][num_experts + 1] */
    int num_chunks, together; /* the last: groups of an expert are a multiple of it */
};

// --- kernels

/* num_experts: out of range. */
__device__ static inline int many_expert_of(const pk_expert_linear_args &args, int pair)
{
    const int expert = args.experts[pair];
    return expert >= 0 && expert < args.num_experts ? expert : (int)args.num_experts;
}

__global__ void __launch_bounds__(MANY_CHUNK)
    expert_counts_kernel(const pk_expert_linear_args args, const many_lists to, pk_cuda_bad_id *bad_id)
{
    __shared__ int counts[PK_MAX_EXPERTS + 1];
    const int num_experts = (int)args.num_experts, pair = blockIdx.x * MANY_CHUNK + threadIdx.x;
    for (int i = threadIdx.x; i <= num_experts; i += MANY_CHUNK) counts[i] = 0;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    __syncthreads();
    if (pair < pk_num_pairs(&args)) {
        const int expert = many_expert_of(args, pair);
        atomicAdd(&counts[expert], 1);
        if (expert == num_experts)
            pk_record_bad_id(bad_id, PK_BAD_EXPERT, pair / args.num_chosen, args.experts[pair], num_experts);
    }
    __syncthreads();
    for (int i = threadIdx.x; i <= num_experts; i += MANY_CHUNK)
        to.counts[blockIdx.x * (num_experts + 1) + i] = counts[i];
}

/* firsts[i] becomes the sum of size_of(i) of all before; the last is the sum of all. By one warp. */
template <typename Size>
__device__ static inline void many_add_up(int *firsts, int count, Size size_of)
{
    const int lane = threadIdx.x % 32;
    int before = 0;
    for (int first = 0; first < count; first += 32) {
        const int i = first + lane, size = i < count ? size_of(i) : 0;
        int sum = size;
        for (int distance = 1; distance < 32; distance *= 2) {
            const int other = __shfl_up_sync(~0u, sum, distance);
            if (lane >= distance) sum += other;
        }
        if (i < count) firsts[i] = before + sum - size;
        before += __shfl_sync(~0u, sum, 31);
    }
    if (lane == 0) firsts[count] = before;
}

__global__ void __launch_bounds__(MANY_CHUNK) expert_order_kernel(const pk_expert_linear_args args, const many_lists to)
{
    __shared__ int totals[PK_MAX_EXPERTS + 1], before[PK_MAX_EXPERTS + 1], firsts[PK_MAX_EXPERTS + 2];
    __shared__ uint8_t of_warps[MANY_WARPS][PK_MAX_EXPERTS + 1];
    const int num_experts = (int)args.num_experts, kinds = num_experts + 1, most = to.lists.most_rows,
              together = to.together;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, pair = blockIdx.x * MANY_CHUNK + threadIdx.x;
    const bool is_pair = pair < pk_num_pairs(&args);
    for (int i = threadIdx.x; i < kinds; i += MANY_CHUNK) totals[i] = before[i] = 0;
    for (int i = lane; i < kinds; i += 32) of_warps[warp][i] = 0;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    const int expert = is_pair ? many_expert_of(args, pair) : -1;
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < to.num_chunks * kinds; i += MANY_CHUNK) {
        const int chunk = i / kinds, its = to.counts[i];
        atomicAdd(&totals[i - chunk * kinds], its);
        if (chunk < (int)blockIdx.x) atomicAdd(&before[i - chunk * kinds], its);
    }
    const unsigned same = __match_any_sync(~0u, expert); /* of this warp's pairs */
    const int rank = __popc(same & ((1u << lane) - 1));
    if (is_pair && rank == 0) of_warps[warp][expert] = (uint8_t)__popc(same);
    __syncthreads();
    if (warp == 0) many_add_up(firsts, kinds, [&](int i) { return totals[i]; });
    __syncthreads();
    if (is_pair) {
        int place = firsts[expert] + before[expert] + rank;
        for (int w = 0; w < warp; w++) place += of_warps[w][expert];
        to.lists.order[place] = pair;
    }
    if (blockIdx.x > 0) return; /* the first CTA lists the groups, too */
    __syncthreads();
    int *first_groups = before;
    if (warp == 0)
        many_add_up(first_groups, num_experts, [&](int i) { return many_groups(totals[i], most, together); });
    __syncthreads();
    for (int i = warp; i < kinds; i += MANY_WARPS) {
        const int count = totals[i], rows = many_rows_of_group(count, most, together);
        const int first = i < num_experts ? first_groups[i] : first_groups[num_experts];
        const int groups = many_groups(count, most, together);
        for (int j = lane; j < groups; j += 32) {
            const int its = many_rows_of(count, rows, j);
            to.lists.groups[first + j] = {i, its ? firsts[i] + j * rows : 0, its};
        }
        if (i == num_experts && lane == 0) *to.lists.num_groups = first + groups;
    }
}

/* The rows of x in the order of the lists: a warp a row. */
template <typename T>
__global__ void __launch_bounds__(256)
    expert_gather_kernel(const pk_expert_linear_args args, const int32_t *order, T *to)
{
    const int64_t place = (int64_t)blockIdx.x * 8 + threadIdx.x / 32, size = args.linear.weight.in_features;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    if (place >= pk_num_pairs(&args)) return;
    const int64_t pair = order[place], token = pair / args.num_chosen, j = pair - token * args.num_chosen;
    const T *x = (const T *)args.linear.x.data + token * args.linear.x.stride + j * args.x_pair_stride;
#pragma unroll 8
    for (int64_t i = threadIdx.x % 32 * 8; i < size; i += 256)
        *(uint4 *)(to + place * size + i) = *(const uint4 *)(x + i);
}

/* A thread adds 8 outputs of a token, in the order of its pairs. */
template <typename T>
__global__ void __launch_bounds__(256) expert_sum_8_kernel(const pk_expert_linear_args args, const T *products)
{
    const pk_epilogue &to = args.linear.epilogue;
    const int64_t token = blockIdx.x, output = ((int64_t)blockIdx.y * blockDim.x + threadIdx.x) * 8;
    const int64_t first = token * args.num_chosen, size = args.linear.weight.out_features;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    if (output >= size) return;
    float total[8] = {}, values[8];
#pragma unroll 8
    for (int64_t pair = first; pair < first + args.num_chosen; pair++) {
        pk_packed<T> product;
        product.bits = __ldcs((const uint4 *)(products + pair * size + output));
        const float weight = args.weights[pair];
        if (args.experts[pair] < 0 || args.experts[pair] >= args.num_experts) continue;
        product.unpack(values);
        for (int i = 0; i < 8; i++) total[i] += weight * values[i];
    }
    T *out = (T *)to.out + token * to.out_stride + output;
    if (to.adds_to_out) {
        pk_packed<T>::load(out).unpack(values);
        for (int i = 0; i < 8; i++) total[i] += values[i];
    }
    pk_packed<T>::pack(total).store(out);
}

// --- launchers

static int64_t many_lists_bytes(const pk_expert_linear_args *args, int most_rows, int together)
{
    const int64_t pairs = pk_num_pairs(args), chunks = pk_ceil_div(pairs, MANY_CHUNK);
    return 16 +
           many_most_groups(pairs, (int)args->num_experts, most_rows, together) * (int64_t)sizeof(pk_expert_group) +
           pairs * 4 + chunks * (args->num_experts + 1) * 4;
}
static many_lists many_lists_in(char *data, const pk_expert_linear_args *args, int most_rows, int together)
{
    const int64_t pairs = pk_num_pairs(args);
    many_lists made = {};
    made.num_chunks = (int)pk_ceil_div(pairs, MANY_CHUNK), made.together = together;
    made.lists = {most_rows, (int *)data, (pk_expert_group *)(data + 16), nullptr};
    made.lists.order =
        (int32_t *)(made.lists.groups + many_most_groups(pairs, (int)args->num_experts, most_rows, together));
    made.counts = made.lists.order + pairs;
    return made;
}
static pk_status list_many(const pk_expert_linear_args *args, const many_lists &lists, const pk_cuda_call &call)
{
    PK_TRY(pk_cuda_launch_early(call, "expert_counts_kernel", expert_counts_kernel, pk_cuda_grid(lists.num_chunks),
                                dim3(MANY_CHUNK), 0, *args, lists, call.device->bad_id));
    return pk_cuda_launch_early(call, "expert_order_kernel", expert_order_kernel, pk_cuda_grid(lists.num_chunks),
                                dim3(MANY_CHUNK), 0, *args, lists);
}

#endif
