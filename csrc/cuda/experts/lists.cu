/* lists.cu - the pairs of tokens and experts, ordered by expert: in the same order in every run, without a sort.
 *
 * Every CTA counts the pairs of all experts. Then it lists those of some experts: its warps share the pairs, count those of
 * the expert by ballots, and write them behind what the warps before have.
 */
#include "cuda/experts/experts.h"
#include "cuda/pack.h"

enum { LIST_WARPS = 16, LIST_THREADS = LIST_WARPS * 32 };

// --- kernels

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

__global__ void __launch_bounds__(LIST_THREADS)
    expert_lists_kernel(const pk_expert_linear_args args, const pk_expert_groups lists, pk_cuda_bad_id *bad_id)
{
    __shared__ int counts[PK_MAX_EXPERTS + 1], firsts[PK_MAX_EXPERTS + 2], first_groups[PK_MAX_EXPERTS + 2];
    __shared__ int of_warps[LIST_WARPS];
    const int num_experts = (int)args.num_experts, num_pairs = (int)pk_num_pairs(&args), rows = lists.most_rows;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    auto expert_of = [&](int pair) { /* num_experts: out of range */
                                     const int expert = args.experts[pair];
                                     return expert >= 0 && expert < num_experts ? expert : num_experts;
    };
    for (int i = threadIdx.x; i <= num_experts; i += LIST_THREADS) counts[i] = 0;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    __syncthreads();
    for (int pair = threadIdx.x; pair < num_pairs; pair += LIST_THREADS) {
        const int expert = expert_of(pair);
        atomicAdd(&counts[expert], 1);
        if (expert == num_experts && blockIdx.x == 0)
            pk_record_bad_id(bad_id, PK_BAD_EXPERT, pair / args.num_chosen, args.experts[pair], num_experts);
    }
    __syncthreads();
    if (warp == 0) add_up(firsts, num_experts + 1, [&](int i) { return counts[i]; });
    if (warp == 1) add_up(first_groups, num_experts + 1, [&](int i) { return (counts[i] + rows - 1) / rows; });
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 0) *lists.num_groups = first_groups[num_experts + 1];

    const int share = (num_pairs + LIST_THREADS - 1) / LIST_THREADS * 32; /* of a warp */
    const int begin = warp * share, end = min(begin + share, num_pairs);
#pragma unroll 1
    for (int expert = blockIdx.x; expert <= num_experts; expert += gridDim.x) {
        const int count = counts[expert], first = firsts[expert];
        if (count == 0) continue;
        int own = 0;
        for (int at = begin; at < end; at += 32)
            own += __popc(__ballot_sync(~0u, at + lane < end && expert_of(at + lane) == expert));
        if (lane == 0) of_warps[warp] = own;
        __syncthreads();
        int place = first;
        for (int w = 0; w < warp; w++) place += of_warps[w];
        for (int at = begin; at < end; at += 32) {
            const bool is_its = at + lane < end && expert_of(at + lane) == expert;
            const unsigned all = __ballot_sync(~0u, is_its);
            if (is_its) lists.order[place + __popc(all & ((1u << lane) - 1))] = at + lane;
            place += __popc(all);
        }
        for (int i = threadIdx.x; i * rows < count; i += LIST_THREADS)
            lists.groups[first_groups[expert] + i] = {expert, first + i * rows, min(rows, count - i * rows)};
        __syncthreads(); /* of_warps have been read */
    }
}

// --- launchers

pk_status pk_cuda_list_experts(const pk_expert_linear_args *args, const pk_expert_groups &groups,
                               const pk_cuda_call &call)
{
    const int64_t ctas = args->num_experts + 1 < call.device->num_sms ? args->num_experts + 1 : call.device->num_sms;
    return pk_cuda_launch_early(call, "expert_lists_kernel", expert_lists_kernel, pk_cuda_grid(ctas),
                                dim3(LIST_THREADS), 0, *args, groups, call.device->bad_id);
}
