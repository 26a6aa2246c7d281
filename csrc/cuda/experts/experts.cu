/* experts.cu - mixture of experts: which experts a token has, and which kernel answers expert_linear: that for Hopper
 * (grouped.cu), that for few tokens (few.cu), or a plain one for everything (any.cu). */
#include "cuda/experts/few_plan.h"
#include "cuda/experts/lists.h"
#include "cuda/pack.h"
#include "ops/sample.h"
#include "ops/sampling.h"

#include <algorithm>

enum { ROUTE_WARPS = 4, MOST_OF_LANE = PK_MAX_EXPERTS / 32, FEW_OF_LANE = 4 };
static_assert(PK_MAX_EXPERTS_OF_TOKEN <= 32, "a lane has one of them");

// --- kernels

/* A warp a token, of whose logits a lane has up to OF_LANE. Equal ones are found in the order of their experts. */
template <typename T, int OF_LANE>
__global__ void __launch_bounds__(ROUTE_WARPS * 32)
    route_experts_kernel(const pk_route_args args, pk_cuda_bad_id *bad_id)
{
    const int64_t token = (int64_t)blockIdx.x * ROUTE_WARPS + threadIdx.x / 32;
    const int lane = threadIdx.x % 32, num_experts = (int)args.num_experts, chosen = (int)args.num_chosen;
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    if (token >= args.num_tokens) return;
    const T *logits = (const T *)args.logits + token * args.logits_stride;
    uint32_t keys[OF_LANE], greatest = 0;
#pragma unroll
    for (int i = 0; i < OF_LANE; i++) {
        const int expert = i * 32 + lane;
        keys[i] = expert < num_experts ? pk_ordered(pk_to_float(logits[expert])) : 0;
        greatest = max(greatest, keys[i]);
    }
    greatest = __reduce_max_sync(~0u, greatest);
    const bool is_bad = greatest < PK_ORDERED_LOWEST || greatest >= PK_ORDERED_INFINITY;
    const float origin = pk_from_ordered(greatest);
    float sum = 0, weight = 0;
#pragma unroll
    for (int i = 0; i < OF_LANE; i++)
        if (keys[i] > 0) sum += expf(pk_from_ordered(keys[i]) - origin);
    sum = pk_sum_over_warp(sum);

    int expert = lane;
    for (int j = 0; j < chosen && !is_bad; j++) { /* lane j has the j-th */
        uint32_t best = 0;
        int own = 0;
#pragma unroll
        for (int i = 0; i < OF_LANE; i++)
            if (keys[i] > best) best = keys[i], own = i * 32 + lane;
        const uint32_t top = __reduce_max_sync(~0u, best);
        const int winner = __reduce_min_sync(~0u, best == top ? own : INT32_MAX);
        if (lane == j) expert = winner, weight = expf(pk_from_ordered(top) - origin) / sum;
#pragma unroll
        for (int i = 0; i < OF_LANE; i++)
            if (winner == i * 32 + lane) keys[i] = 0;
    }
    if (args.normalizes) weight /= pk_sum_over_warp(weight);
    if (is_bad) weight = NAN;
    if (is_bad && lane == 0) pk_record_bad_id(bad_id, PK_BAD_ROUTE, token, 0, 0);
    if (lane >= chosen) return;
    args.experts[token * chosen + lane] = expert;
    args.weights[token * chosen + lane] = weight;
}

// --- launchers

pk_status pk_cuda_route_experts(const pk_route_args *args, const pk_cuda_call &call)
{
    if (args->num_tokens == 0) return PK_OK;
    return pk_for_float_dtype(call.err, args->dtype, [&](auto zero) {
        using T = decltype(zero);
        const dim3 grid = pk_cuda_grid(pk_ceil_div(args->num_tokens, ROUTE_WARPS));
        /* The weights of experts leave no instruction in a cache: with a quarter of them a layer takes 2 us less. */
        const bool are_few = args->num_experts <= FEW_OF_LANE * 32;
        auto kernel = are_few ? route_experts_kernel<T, FEW_OF_LANE> : route_experts_kernel<T, MOST_OF_LANE>;
        return pk_cuda_launch_early(call, "route_experts_kernel", kernel, grid, dim3(ROUTE_WARPS * 32), 0, *args,
                                    call.device->bad_id);
    });
}

/* One kernel for any number of tokens, some of them at a time: that for Hopper would round the products of more pairs than
 * LISTED_PAIRS, and that for few tokens has no room for more. */
static pk_status launch_invariant(const pk_expert_linear_args *args, bool is_grouped, const pk_cuda_call &call)
{
    int64_t most = LISTED_PAIRS / args->num_chosen;
    if (!is_grouped) most = std::min<int64_t>(EXPERT_ROWS, EXPERT_FEW_PAIRS / args->num_chosen);
    const pk_expert_linear_args first = pk_experts_of_tokens(args, 0, most);
    if (!is_grouped && !pk_cuda_experts_few_applies(&first)) return pk_cuda_experts_any(args, call);
    const auto launch = is_grouped ? pk_cuda_experts_grouped : pk_cuda_experts_few;
    for (int64_t at = 0; at < args->linear.x.num_rows; at += most) {
        const int64_t left = args->linear.x.num_rows - at;
        pk_expert_linear_args some = pk_experts_of_tokens(args, at, left < most ? left : most);
        if (at > 0) some.experts_are_constant = false; /* the operation before has other tokens */
        PK_TRY(launch(&some, call));
    }
    return PK_OK;
}

pk_status pk_cuda_expert_linear(const pk_expert_linear_args *args, const pk_cuda_call &call)
{
    const pk_weight &weight = args->linear.weight;
    if (args->linear.x.num_rows == 0 || weight.out_features == 0) return PK_OK;
    /* Few tokens take less time with float8 that is decoded than with it as it lies: 42 us of a layer of 30B-A3B beside 45
     * for one, 196 beside 252 for 8. With int4 it is the other way: 53 beside 43, 259 beside 248. */
    const bool is_grouped = pk_cuda_experts_grouped_applies(args, call.device);
    if (args->linear.is_batch_invariant) return launch_invariant(args, is_grouped, call);
    if (is_grouped && form_of(weight) != IN_INT4) return pk_cuda_experts_grouped(args, call);
    if (pk_cuda_experts_few_applies(args)) return pk_cuda_experts_few(args, call);
    if (is_grouped) return pk_cuda_experts_grouped(args, call);
    return pk_cuda_experts_any(args, call);
}

pk_status pk_cuda_moe_mlp(const pk_moe_mlp_args *args, const pk_cuda_call &call)
{
    if (args->route.num_tokens == 0) return PK_OK;
    if (pk_cuda_moe_few_applies(args, call.device)) return pk_cuda_moe_few(args, call);
    PK_TRY(pk_cuda_linear(&args->router, call));
    PK_TRY(pk_cuda_route_experts(&args->route, call));
    if (pk_cuda_experts_share_lists(&args->up, &args->down, call.device))
        return pk_cuda_experts_with_shared_lists(&args->up, &args->down, call);
    PK_TRY(pk_cuda_expert_linear(&args->up, call));
    return pk_cuda_expert_linear(&args->down, call);
}
