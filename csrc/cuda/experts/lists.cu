/* lists.cu - the pairs of tokens and experts, ordered by expert: in the same order in every run, without a sort.
 *
 * A CTA has 1,024 pairs. One kernel counts those of each expert; the other adds up what all CTAs have counted, and puts its
 * pairs behind those of the CTAs before, of the warps before and of the lanes before. No count depends on who was first.
 */
#include "cuda/experts/groups.h"
#include "cuda/pack.h"

enum { LIST_WARPS = LIST_CHUNK / 32 };

// --- kernels

/* num_experts: out of range. */
__device__ static inline int expert_of(const pk_expert_linear_args &args, int pair)
{
    const int expert = args.experts[pair];
    return expert >= 0 && expert < args.num_experts ? expert : (int)args.num_experts;
}

__global__ void __launch_bounds__(LIST_CHUNK)
    expert_counts_kernel(const pk_expert_linear_args args, const expert_lists to, pk_cuda_bad_id *bad_id)
{
    __shared__ int counts[PK_MAX_EXPERTS + 1];
    const int num_experts = (int)args.num_experts, pair = blockIdx.x * LIST_CHUNK + threadIdx.x;
    for (int i = threadIdx.x; i <= num_experts; i += LIST_CHUNK) counts[i] = 0;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    __syncthreads();
    if (pair < pk_num_pairs(&args)) {
        const int expert = expert_of(args, pair);
        atomicAdd(&counts[expert], 1);
        if (expert == num_experts)
            pk_record_bad_id(bad_id, PK_BAD_EXPERT, pair / args.num_chosen, args.experts[pair], num_experts);
    }
    __syncthreads();
    for (int i = threadIdx.x; i <= num_experts; i += LIST_CHUNK)
        to.counts[blockIdx.x * (num_experts + 1) + i] = counts[i];
}

/* firsts[i] becomes the sum of size_of(i) of all before; the last is the sum of all. By one warp. */
template <typename Size>
__device__ static inline void add_up(int *firsts, int count, Size size_of)
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

/* By one CTA. first_groups: memory for as many as there are experts, those out of range among them, and one more. */
__device__ static inline void list_groups(const pk_expert_groups &to, const int *counts, const int *firsts,
                                          int *first_groups, int count)
{
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, most = to.most_rows;
    if (warp == 0) add_up(first_groups, count, [&](int i) { return groups_of(counts[i], most); });
    __syncthreads();
    for (int i = warp; i < count; i += LIST_WARPS) {
        const int rows = rows_of_group(counts[i], most);
        for (int first = lane * rows; first < counts[i]; first += 32 * rows)
            to.groups[first_groups[i] + first / rows] = {i, firsts[i] + first, min(rows, counts[i] - first)};
    }
    if (threadIdx.x == 0) *to.num_groups = first_groups[count];
}

__global__ void __launch_bounds__(LIST_CHUNK)
    expert_order_kernel(const pk_expert_linear_args args, const expert_lists to)
{
    __shared__ int totals[PK_MAX_EXPERTS + 1], before[PK_MAX_EXPERTS + 2], firsts[PK_MAX_EXPERTS + 2];
    __shared__ uint8_t of_warps[LIST_WARPS][PK_MAX_EXPERTS + 1];
    const int kinds = (int)args.num_experts + 1, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int pair = blockIdx.x * LIST_CHUNK + threadIdx.x;
    const bool is_pair = pair < pk_num_pairs(&args);
    for (int i = threadIdx.x; i < kinds; i += LIST_CHUNK) totals[i] = before[i] = 0;
    for (int i = lane; i < kinds; i += 32) of_warps[warp][i] = 0;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    const int expert = is_pair ? expert_of(args, pair) : -1;
    __syncthreads();
#pragma unroll 4
    for (int i = threadIdx.x; i < to.num_chunks * kinds; i += LIST_CHUNK) {
        const int chunk = i / kinds, its = to.counts[i];
        atomicAdd(&totals[i - chunk * kinds], its);
        if (chunk < (int)blockIdx.x) atomicAdd(&before[i - chunk * kinds], its);
    }
    const unsigned same = __match_any_sync(~0u, expert); /* of this warp's pairs */
    const int rank = __popc(same & ((1u << lane) - 1));
    if (is_pair && rank == 0) of_warps[warp][expert] = (uint8_t)__popc(same);
    __syncthreads();
    if (warp == 0) add_up(firsts, kinds, [&](int i) { return totals[i]; });
    __syncthreads();
    if (is_pair) {
        int place = firsts[expert] + before[expert] + rank;
        for (int w = 0; w < warp; w++) place += of_warps[w][expert];
        to.groups.order[place] = pair;
    }
    if (blockIdx.x > 0) return;
    __syncthreads(); /* `before` has been read */
    list_groups(to.groups, totals, firsts, before, kinds);
}

// --- launchers

pk_status pk_cuda_list_experts(const pk_expert_linear_args *args, const expert_lists &lists, const pk_cuda_call &call)
{
    const dim3 grid = pk_cuda_grid(lists.num_chunks), cta(LIST_CHUNK);
    PK_TRY(pk_cuda_launch_early(call, "expert_counts_kernel", expert_counts_kernel, grid, cta, 0, *args, lists,
                                call.device->bad_id));
    return pk_cuda_launch_early(call, "expert_order_kernel", expert_order_kernel, grid, cta, 0, *args, lists);
}
