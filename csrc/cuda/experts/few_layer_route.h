/* few_layer_route.h - the first steps of few_layer.cu: which experts the tokens have. */
#ifndef PK_CUDA_EXPERTS_FEW_LAYER_ROUTE_H
#define PK_CUDA_EXPERTS_FEW_LAYER_ROUTE_H

#include "cuda/experts/few_layer_plan.h"
#include "cuda/pack.h"
#include "ops/sampling.h"

#ifdef PK_SM90A

using namespace sm90;

struct layer_shared {
    uint64_t full[LAYER_WARPS][LAYER_SLOTS];
    float sums[2][LAYER_WARPS][128];
    float logits[LAYER_TOKENS][LAYER_EXPERTS];
    float weights[LAYER_DISTINCT][LAYER_TOKENS];
    int8_t pairs[LAYER_DISTINCT][LAYER_TOKENS]; /* which of the token's, or -1: it has not this expert */
    int distinct[LAYER_DISTINCT], chosen[LAYER_TOKENS][LAYER_CHOSEN];
    float chosen_weights[LAYER_TOKENS][LAYER_CHOSEN];
    uint32_t used[LAYER_EXPERTS / 32];
    int claimed[LAYER_CLAIMED];
};

template <typename T>
struct layer_route {
    const layer_params &params;
    layer_shared &shared;
    uint32_t tag;
    int warp, lane, group, quad;
    int all_units, all_pieces; /* of all experts; of down's weights for this CTA */

    __device__ __forceinline__ layer_route(const layer_params &params, layer_shared &shared)
        : params(params), shared(shared)
    {
        warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
    }
    __device__ __forceinline__ void set_up() const
    {
        if (lane == 0)
            for (int i = 0; i < LAYER_SLOTS; i++) barrier_init(smem_address(&shared.full[warp][i]), 1);
        barrier_init_fence();
        for (int i = threadIdx.x; i < LAYER_DISTINCT * LAYER_TOKENS; i += LAYER_THREADS)
            shared.pairs[i / LAYER_TOKENS][i % LAYER_TOKENS] = -1;
        if (threadIdx.x < LAYER_EXPERTS / 32) shared.used[threadIdx.x] = 0;
    }

    /* This thread's 8 inputs of the router's row that the CTA multiplies by. */
    __device__ __forceinline__ pk_packed<T> load_router() const
    {
        if ((int)blockIdx.x >= params.num_experts) return {};
        return pk_packed<T>::load((const T *)params.router + blockIdx.x * params.router_stride + threadIdx.x * 8);
    }
    /* The logits of one expert, for all CTAs. */
    __device__ __forceinline__ void tell_logits(const pk_packed<T> &weight) const
    {
        float of_weight[8], of_x[8];
        pk_packed<T> rows[LAYER_TOKENS] = {}; /* all on their way before the first is waited for */
        for (int token = 0; token < LAYER_TOKENS; token++)
            if (token < params.num_tokens)
                rows[token].bits =
                    __ldcg((const uint4 *)((const T *)params.x + token * params.x_stride + threadIdx.x * 8));
        weight.unpack(of_weight);
        for (int token = 0; token < LAYER_TOKENS; token++) {
            if (token >= params.num_tokens) break;
            float sum = 0;
            rows[token].unpack(of_x);
            for (int i = 0; i < 8; i++) sum += of_x[i] * of_weight[i];
            sum = pk_sum_over_warp(sum);
            if (lane == 0) shared.sums[0][warp][token] = sum;
        }
        __syncthreads();
        const int token = threadIdx.x;
        if (token >= params.num_tokens || (int)blockIdx.x >= params.num_experts) return;
        float sum = 0;
        for (int w = 0; w < LAYER_WARPS; w++) sum += shared.sums[0][w][token];
        store_word(&params.words->logits[token][blockIdx.x], word_of(__float_as_uint(sum)));
    }
    __device__ __forceinline__ uint64_t word_of(uint32_t value) const { return (uint64_t)tag << 32 | value; }
    __device__ __forceinline__ bool is_new(uint64_t word) const { return word >> 32 == tag; }
    __device__ __forceinline__ void hear_logits() const
    {
        constexpr int WORDS = LAYER_TOKENS * LAYER_EXPERTS / LAYER_THREADS; /* of a thread */
        uint64_t words[WORDS];
        bool are_new;
        do {
            are_new = true;
            for (int i = 0; i < WORDS; i++) {
                const int at = threadIdx.x + i * LAYER_THREADS, token = at / LAYER_EXPERTS, expert = at % LAYER_EXPERTS;
                const bool is_there = token < params.num_tokens && expert < params.num_experts;
                words[i] = is_there ? load_word(&params.words->logits[token][expert]) : word_of(0);
            }
            for (int i = 0; i < WORDS; i++) are_new = are_new && is_new(words[i]);
        } while (!are_new);
        for (int i = 0; i < WORDS; i++) {
            const int at = threadIdx.x + i * LAYER_THREADS;
            shared.logits[at / LAYER_EXPERTS][at % LAYER_EXPERTS] = __uint_as_float((uint32_t)words[i]);
        }
        __syncthreads();
    }
    /* A warp a token, as route_experts_kernel does it. */
    __device__ __forceinline__ void choose(pk_cuda_bad_id *bad_id) const
    {
        if (warp >= params.num_tokens) return;
        uint32_t keys[LAYER_EXPERTS / 32], greatest = 0;
        for (int i = 0; i < LAYER_EXPERTS / 32; i++) {
            keys[i] = i * 32 + lane < params.num_experts ? pk_ordered(shared.logits[warp][i * 32 + lane]) : 0;
            greatest = max(greatest, keys[i]);
        }
        greatest = __reduce_max_sync(~0u, greatest);
        const float origin = pk_from_ordered(greatest);
        const bool is_bad = greatest < PK_ORDERED_LOWEST || greatest >= PK_ORDERED_INFINITY;
        float weight = 0, sum = 0;
        for (int i = 0; i < LAYER_EXPERTS / 32 && !params.normalizes; i++)
            if (keys[i] > 0) sum += expf(pk_from_ordered(keys[i]) - origin);
        int expert = lane;
#pragma unroll 1
        for (int j = 0; j < params.num_chosen && !is_bad; j++) { /* lane j has the j-th */
            uint32_t best = 0;
            int own = 0;
            for (int i = 0; i < LAYER_EXPERTS / 32; i++)
                if (keys[i] > best) best = keys[i], own = i * 32 + lane;
            const uint32_t top = __reduce_max_sync(~0u, best);
            const int winner = __reduce_min_sync(~0u, best == top ? own : INT32_MAX);
            if (lane == j) expert = winner, weight = expf(pk_from_ordered(top) - origin);
            for (int i = 0; i < LAYER_EXPERTS / 32; i++)
                if (winner == i * 32 + lane) keys[i] = 0;
        }
        /* By the sum of the chosen weights where they are normalised: the softmax's own divisor would cancel. */
        weight /= pk_sum_over_warp(params.normalizes ? weight : sum);
        if (is_bad) weight = NAN;
        if (is_bad && lane == 0 && blockIdx.x == 0) pk_record_bad_id(bad_id, PK_BAD_ROUTE, warp, 0, 0);
        if (lane >= params.num_chosen) return;
        shared.chosen[warp][lane] = expert, shared.chosen_weights[warp][lane] = weight;
        atomicOr(&shared.used[expert / 32], 1u << expert % 32);
    }
    /* The experts that any token has, in the order of their ids. */
    __device__ __forceinline__ void list()
    {
        __syncthreads();
        const int token = threadIdx.x / LAYER_CHOSEN, j = threadIdx.x % LAYER_CHOSEN;
        int num_distinct = 0;
        for (uint32_t of_32 : shared.used) num_distinct += __popc(of_32);
        if (token < params.num_tokens && j < params.num_chosen) {
            const int expert = shared.chosen[token][j];
            const float weight = shared.chosen_weights[token][j];
            int rank = __popc(shared.used[expert / 32] & ((1u << expert % 32) - 1));
            for (int i = 0; i < LAYER_EXPERTS / 32; i++)
                if (i < expert / 32) rank += __popc(shared.used[i]);
            shared.distinct[rank] = expert, shared.pairs[rank][token] = (int8_t)j;
            shared.weights[rank][token] = weight;
            if (blockIdx.x == 0) params.experts[token * params.num_chosen + j] = expert;
            if (blockIdx.x == 0) params.weights[token * params.num_chosen + j] = weight;
        }
        all_units = num_distinct * params.units;
        all_pieces = blockIdx.x * 16 < LAYER_HIDDEN ? num_distinct * params.pieces : 0;
        __syncthreads();
    }
};

#endif  // PK_SM90A

#endif
