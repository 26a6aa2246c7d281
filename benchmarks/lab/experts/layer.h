/* layer.h - a layer of experts for up to 8 tokens in one kernel, from the router to the sum: what few tokens could gain.
 *
 * A layer of one token takes 33 us, of which 17 are its bytes: the rest is four kernels that wait for each other, and that each
 * fill and drain the memory's pipeline. Here it is filled once. Each CTA computes one logit of each token, tells the others by
 * words that say themselves that they are new, and finds the experts of all tokens like every other CTA. From then on it knows
 * all that it will read: its share of the gates and ups, sixteen rows a unit, and after those the weights of its 16 outputs of
 * down, of all experts. Each warp has a ring of its own, which the copy engine fills; so the weights of down are on their way,
 * 192 KB a CTA, while the CTAs still exchange what they have made of the gates and ups. No sum crosses CTAs.
 *
 * For the shapes of Qwen3-30B-A3B: 256 inputs of x are one warp's, those of an expert's width are pieces of 256.
 * All CTAs must run at once: one on each SM. What is exchanged carries a tag, which the last launch has left behind in memory.
 */
#ifndef EXPERTS_LAYER_H
#define EXPERTS_LAYER_H

#include "cuda/experts/experts.h"
#include "cuda/mma.h"
#include "cuda/pack.h"
#include "cuda/sm90.h"
#include "layer_plan.h"
#include "many_sm90.h"
#include "ops/sampling.h"

struct layer_params {
    CUtensorMap up_map, down_map; /* in_features, 8 rows, 2 of these, all such sixteens, experts */
    const void *x, *router;       /* [num_tokens, hidden], [LAYER_EXPERTS, hidden] */
    void *act, *out;              /* [num_tokens * LAYER_CHOSEN, width]; [num_tokens, hidden], which is added to */
    int num_tokens, hidden, width;
    int32_t *experts; /* [num_tokens, LAYER_CHOSEN], for who looks at them */
    float *weights;   /* the same shape */
    /* Zeros before the first launch, and then left alone. */
    uint32_t *tag;    /* of the last launch */
    uint64_t *logits; /* [LAYER_TOKENS][LAYER_EXPERTS]: a tag and a float */
    uint32_t *done;   /* [CTAs]: the tag, once the CTA's part of act is there */
    int64_t *clocks;  /* [CTAs][LAYER_PHASES] or NULL: when each phase has ended */
    bool is_cooperative;
};
enum { LAYER_PHASES = 8 };

#ifdef PK_SM90A

using namespace sm90;

struct layer_shared {
    uint64_t full[LAYER_WARPS][LAYER_SLOTS];
    float sums[2][LAYER_WARPS][128];
    float logits[LAYER_TOKENS][LAYER_EXPERTS];
    float weights[LAYER_DISTINCT][LAYER_TOKENS]; /* 0: the token has not this expert */
    int8_t pairs[LAYER_DISTINCT][LAYER_TOKENS];  /* which of the token's, or -1 */
    int distinct[LAYER_DISTINCT], chosen[LAYER_TOKENS][LAYER_CHOSEN];
    float chosen_weights[LAYER_TOKENS][LAYER_CHOSEN];
    uint32_t used[LAYER_EXPERTS / 32];
};

/* 256 inputs of a row, as an instruction's operand. */
struct layer_row {
    uint4 bits[LAYER_PIECE / LAYER_LINE][2];
};

template <typename T>
struct layer_cta {
    const layer_params &params;
    layer_shared &shared;
    uint32_t ring; /* of this warp */
    uint32_t tag;
    int warp, lane, group, quad;
    layer_share share;
    int num_units, num_items; /* of this warp: units, and with pieces of down */

    __device__ __forceinline__ layer_cta(const layer_params &params, char *smem, layer_shared &shared)
        : params(params), shared(shared)
    {
        warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32, group = lane / 4, quad = lane % 4;
        ring = ((smem_address(smem) + 1023) & ~1023u) + warp * LAYER_SLOTS * LAYER_PIECE_BYTES;
    }
    __device__ __forceinline__ void set_up() const
    {
        if (lane == 0)
            for (int i = 0; i < LAYER_SLOTS; i++) barrier_init(smem_address(&shared.full[warp][i]), 1);
        barrier_init_fence();
        for (int i = threadIdx.x; i < LAYER_DISTINCT * LAYER_TOKENS; i += LAYER_WARPS * 32)
            shared.weights[i / LAYER_TOKENS][i % LAYER_TOKENS] = 0,
                                                 shared.pairs[i / LAYER_TOKENS][i % LAYER_TOKENS] = -1;
        if (threadIdx.x < LAYER_EXPERTS / 32) shared.used[threadIdx.x] = 0;
    }

    // --- routing

    /* The logits of one expert, for all CTAs. `weight`: this thread's 8 inputs of its row. */
    __device__ __forceinline__ void tell_logits(const pk_packed<T> &weight) const
    {
        float of_weight[8], of_x[8];
        pk_packed<T> rows[LAYER_TOKENS] = {}; /* all on their way before the first is waited for */
        for (int token = 0; token < LAYER_TOKENS; token++)
            if (token < params.num_tokens)
                rows[token].bits =
                    __ldcg((const uint4 *)((const T *)params.x + (int64_t)token * params.hidden + threadIdx.x * 8));
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
        if (token >= params.num_tokens || blockIdx.x >= LAYER_EXPERTS) return;
        float sum = 0;
        for (int w = 0; w < LAYER_WARPS; w++) sum += shared.sums[0][w][token];
        store_relaxed(&params.logits[token * LAYER_EXPERTS + blockIdx.x], (uint64_t)tag << 32 | __float_as_uint(sum));
    }
    __device__ __forceinline__ void hear_logits() const
    {
        constexpr int WORDS = LAYER_TOKENS * LAYER_EXPERTS / (LAYER_WARPS * 32); /* of a thread */
        uint64_t words[WORDS];
        bool are_new;
        do {
            are_new = true;
            for (int i = 0; i < WORDS; i++) {
                const int at = threadIdx.x + i * LAYER_WARPS * 32;
                words[i] =
                    at < params.num_tokens * LAYER_EXPERTS ? load_relaxed(&params.logits[at]) : (uint64_t)tag << 32;
            }
            for (int i = 0; i < WORDS; i++) are_new = are_new && words[i] >> 32 == tag;
        } while (!are_new);
        for (int i = 0; i < WORDS; i++) {
            const int at = threadIdx.x + i * LAYER_WARPS * 32;
            shared.logits[at / LAYER_EXPERTS][at % LAYER_EXPERTS] = __uint_as_float((uint32_t)words[i]);
        }
        __syncthreads();
    }
    /* A warp a token, as route_experts_kernel does it. (What it does of logits without a softmax is left out here.) */
    __device__ __forceinline__ void choose() const
    {
        if (warp >= params.num_tokens) return;
        uint32_t keys[LAYER_EXPERTS / 32], greatest = 0;
        for (int i = 0; i < LAYER_EXPERTS / 32; i++)
            keys[i] = pk_ordered(shared.logits[warp][i * 32 + lane]), greatest = max(greatest, keys[i]);
        const float origin = pk_from_ordered(__reduce_max_sync(~0u, greatest));
        int expert = 0;
        float weight = 0;
        for (int j = 0; j < LAYER_CHOSEN; j++) { /* lane j has the j-th */
            uint32_t best = 0;
            int own = 0;
            for (int i = 0; i < LAYER_EXPERTS / 32; i++)
                if (keys[i] > best) best = keys[i], own = i * 32 + lane;
            const uint32_t top = __reduce_max_sync(~0u, best);
            const int winner = __reduce_min_sync(~0u, best == top ? own : INT32_MAX);
            if (lane == j) expert = winner, weight = __expf(pk_from_ordered(top) - origin);
            for (int i = 0; i < LAYER_EXPERTS / 32; i++)
                if (winner == i * 32 + lane) keys[i] = 0;
        }
        weight /=
            pk_sum_over_warp(weight); /* of those that were chosen: what they all were divided by is no part of it */
        if (lane >= LAYER_CHOSEN) return;
        shared.chosen[warp][lane] = expert, shared.chosen_weights[warp][lane] = weight;
        atomicOr(&shared.used[expert / 32], 1u << expert % 32);
    }
    /* The experts that any token has, in the order of their ids, and what this CTA reads of them. */
    __device__ __forceinline__ void list()
    {
        auto rank_of = [&](int expert) {
            int rank = __popc(shared.used[expert / 32] & ((1u << expert % 32) - 1));
            for (int i = 0; i < expert / 32; i++) rank += __popc(shared.used[i]);
            return rank;
        };
        __syncthreads();
        if ((int)threadIdx.x < params.num_tokens * LAYER_CHOSEN) {
            const int token = threadIdx.x / LAYER_CHOSEN, j = threadIdx.x % LAYER_CHOSEN,
                      expert = shared.chosen[token][j];
            const int rank = rank_of(expert);
            shared.distinct[rank] = expert, shared.pairs[rank][token] = (int8_t)j;
            shared.weights[rank][token] = shared.chosen_weights[token][j];
            if (blockIdx.x == 0) params.experts[threadIdx.x] = expert;
            if (blockIdx.x == 0) params.weights[threadIdx.x] = shared.chosen_weights[token][j];
        }
        int num_distinct = 0;
        for (uint32_t of_32 : shared.used) num_distinct += __popc(of_32);
        share = layer_share_of(blockIdx.x, gridDim.x, num_distinct, params.hidden, params.width);
        num_units = share.end - share.first, num_items = layer_items(share, warp);
        __syncthreads();
    }

    // --- a warp's items: its 256 inputs of each unit, then its pieces of down

    __device__ __forceinline__ void copy(int item) const
    {
        if (item >= num_items || lane != 0) return;
        const int slot = item % LAYER_SLOTS;
        const uint32_t barrier = smem_address(&shared.full[warp][slot]), to = ring + slot * LAYER_PIECE_BYTES;
        const layer_item its = layer_item_of(share, item, warp, blockIdx.x);
        barrier_arrive_expect(barrier, LAYER_PIECE_BYTES);
        for (int line = 0; line < LAYER_PIECE / LAYER_LINE; line++)
            copy_5d(to + line * LAYER_LINE_BYTES, its.is_down ? &params.down_map : &params.up_map, barrier,
                    its.column + line * LAYER_LINE, 0, 0, its.sixteen, shared.distinct[its.rank]);
    }
    __device__ __forceinline__ void wait(int item) const
    {
        barrier_wait(smem_address(&shared.full[warp][item % LAYER_SLOTS]), item / LAYER_SLOTS & 1);
    }
    /* Everything that a slot holds times the same inputs of 8 rows: c[0, 1] of row `group` of the weight, c[2, 3] of the 8th
     * after it, by rows 2 quad and 2 quad + 1 of x. */
    __device__ __forceinline__ void multiply(float (&acc)[4], int item, const layer_row &x) const
    {
        const uint32_t from = ring + item % LAYER_SLOTS * LAYER_PIECE_BYTES;
        float odd[4] = {}; /* two chains */
        for (int line = 0; line < LAYER_PIECE / LAYER_LINE; line++)
            for (int p = 0; p < 2; p++) {
                uint4 rows[2];
                for (int half = 0; half < 2; half++)
                    rows[half] = load_16(from + line * LAYER_LINE_BYTES + layer_place(group, half, quad, p));
                const uint4 &bits = x.bits[line][p];
                mma_16816<T>(acc, {rows[0].x, rows[1].x, rows[0].y, rows[1].y}, {bits.x, bits.y});
                mma_16816<T>(odd, {rows[0].z, rows[1].z, rows[0].w, rows[1].w}, {bits.z, bits.w});
            }
        for (int i = 0; i < 4; i++) acc[i] += odd[i];
    }
    /* Its inputs of a row; NULL: zeros. */
    __device__ __forceinline__ void load(layer_row &to, const T *row) const
    {
        for (int line = 0; line < LAYER_PIECE / LAYER_LINE; line++)
            for (int p = 0; p < 2; p++)
                to.bits[line][p] =
                    row ? __ldcg((const uint4 *)(row + line * LAYER_LINE + layer_input(quad, p))) : uint4{};
    }
    __device__ __forceinline__ void leave(int turn, const float (&acc)[4]) const
    {
        for (int i = 0; i < 4; i++) shared.sums[turn][warp][i * 32 + lane] = acc[i];
    }
    /* Of the row-th of a unit's 16 rows by a token, all warps'. */
    __device__ __forceinline__ float sum_of(int turn, int row, int token) const
    {
        float sum = 0;
        for (int w = 0; w < LAYER_WARPS; w++) sum += shared.sums[turn][w][layer_sum_at(row, token)];
        return sum;
    }
    __device__ __forceinline__ void multiply_units(const layer_row &x) const
    {
        const int row = threadIdx.x / LAYER_TOKENS, token = threadIdx.x % LAYER_TOKENS; /* of 64 threads that write */
#pragma unroll 1
        for (int item = 0; item < num_units; item++) {
            const layer_item its = layer_item_of(share, item, warp, blockIdx.x);
            float acc[4] = {};
            wait(item);
            multiply(acc, item, x);
            __syncwarp();
            copy(item + LAYER_SLOTS);
            leave(item % 2, acc);
            __syncthreads();
            const int j = threadIdx.x < 64 ? shared.pairs[its.rank][token] : -1;
            if (j < 0) continue;
            const float gate = pk_round<T>(pk_silu<T>(pk_round<T>(sum_of(item % 2, row, token))));
            const float up = pk_round<T>(sum_of(item % 2, row + 8, token));
            T *to = (T *)params.act + (int64_t)(token * LAYER_CHOSEN + j) * params.width + its.sixteen * 8;
            to[row] = pk_from_float<T>(gate * up);
        }
    }
    /* All CTAs have made their parts of act. */
    __device__ __forceinline__ void exchange() const
    {
        __syncthreads();
        if (threadIdx.x == 0) store_release(&params.done[blockIdx.x], tag); /* by a barrier, of all threads' writes */
        if (threadIdx.x < gridDim.x)
            while (load_acquire(&params.done[threadIdx.x]) != tag) {
            }
        __syncthreads();
        if (blockIdx.x == 0 && threadIdx.x == 0) *params.tag = tag; /* all have read the one before */
    }
    __device__ __forceinline__ void multiply_down() const
    {
        auto load_act = [&](layer_row &to, int item) {
            if (item >= num_items) return;
            const layer_item its = layer_item_of(share, item, warp, blockIdx.x);
            const int j = shared.pairs[its.rank][group];
            const T *row = (const T *)params.act + (int64_t)(group * LAYER_CHOSEN + j) * params.width;
            load(to, j < 0 ? nullptr : row + its.column);
        };
        float total[4] = {};
        layer_row act, next;
        load_act(next, num_units);
#pragma unroll 1
        for (int item = num_units; item < num_items; item++) {
            const int rank = layer_item_of(share, item, warp, blockIdx.x).rank;
            float acc[4] = {};
            act = next;
            load_act(next, item + 1);
            wait(item);
            multiply(acc, item, act);
            __syncwarp();
            copy(item + LAYER_SLOTS);
            for (int i = 0; i < 4; i++) total[i] += shared.weights[rank][quad * 2 + i % 2] * acc[i];
        }
        leave(0, total);
        __syncthreads();
        const int row = threadIdx.x / LAYER_TOKENS, token = threadIdx.x % LAYER_TOKENS;
        if (row >= 16 || token >= params.num_tokens) return;
        T *out = (T *)params.out + (int64_t)token * params.hidden + blockIdx.x * 16 + row;
        *out = pk_from_float<T>(pk_to_float(*out) + sum_of(0, row, token));
    }
};

#endif  // PK_SM90A

// --- kernels

template <typename T>
__global__ void __launch_bounds__(LAYER_WARPS * 32, 1) expert_layer_kernel(const __grid_constant__ layer_params params)
{
#ifdef PK_SM90A
    extern __shared__ char dynamic_smem[];
    __shared__ layer_shared shared;
    layer_cta<T> cta(params, dynamic_smem, shared);
    auto ended = [&](int phase) {
        if (params.clocks && threadIdx.x == 0) params.clocks[blockIdx.x * LAYER_PHASES + phase] = clock64();
    };
    ended(0);
    cta.set_up();
    if (threadIdx.x == 0) prefetch_tensor_map(&params.up_map);
    if (threadIdx.x == 32) prefetch_tensor_map(&params.down_map);
    pk_packed<T> weight = {};
    if (blockIdx.x < LAYER_EXPERTS)
        weight = pk_packed<T>::load((const T *)params.router + (int64_t)blockIdx.x * params.hidden + threadIdx.x * 8);
    pk_wait_for_previous_kernel();
    ended(1);
    cta.tag = __ldcg(params.tag) + 1;
    cta.tell_logits(weight);
    ended(2);
    layer_row x;
    const bool is_token = cta.group < params.num_tokens;
    cta.load(x, is_token ? (const T *)params.x + (int64_t)cta.group * params.hidden + cta.warp * LAYER_PIECE : nullptr);
    cta.hear_logits();
    ended(3);
    cta.choose();
    cta.list();
    for (int item = 0; item < LAYER_SLOTS; item++) cta.copy(item);
    ended(4);
    cta.multiply_units(x);
    ended(5);
    cta.exchange();
    ended(6);
    pk_let_next_kernel_start();
    if (cta.share.down_pieces > 0) cta.multiply_down();
    ended(7);
#endif
}

// --- launchers

static pk_status map_experts(CUtensorMap *map, const pk_weight &weight, bool is_gated, pk_error *err)
{
    const int64_t apart = is_gated ? weight.out_features / 2 : 8;
    const int64_t sizes[] = {weight.in_features, 8, 2, weight.out_features / 16, LAYER_EXPERTS};
    const int64_t strides[] = {1, weight.stride, apart * weight.stride, (is_gated ? 8 : 16) * weight.stride,
                               weight.of_experts.data};
    const int box[] = {LAYER_LINE, 8, 2, 1, 1};
    return pk_cuda_tensor_map(map, "weight", weight.dtype, weight.data, 5, sizes, strides, box, err);
}
template <typename T>
static pk_status launch_layer(layer_params &params, const pk_weight &up, const pk_weight &down,
                              const pk_cuda_call &call)
{
    static uint64_t allowed;
    enum { SMEM_BYTES = 1024 + LAYER_RING_BYTES };
    params.hidden = (int)up.in_features, params.width = (int)down.in_features;
    if (params.num_tokens > LAYER_TOKENS || params.hidden != LAYER_WARPS * LAYER_PIECE || params.width % LAYER_PIECE ||
        params.hidden > 16 * call.device->num_sms || call.device->num_sms > LAYER_MOST_CTAS)
        return pk_fail(call.err, PK_EUNSUPPORTED, "expert_layer_kernel: %d tokens, hidden %d, width %d, %d SMs",
                       params.num_tokens, params.hidden, params.width, call.device->num_sms);
    PK_TRY(map_experts(&params.up_map, up, true, call.err));
    PK_TRY(map_experts(&params.down_map, down, false, call.err));
    PK_TRY(pk_cuda_allow_smem(call, expert_layer_kernel<T>, SMEM_BYTES, &allowed));
    cudaLaunchAttribute attributes[3] = {};
    attributes[0].id = cudaLaunchAttributePreferredSharedMemoryCarveout;
    attributes[0].val.sharedMemCarveout = cudaSharedmemCarveoutMaxShared;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    attributes[2].id = cudaLaunchAttributeCooperative;
    attributes[2].val.cooperative = 1;
    const cudaLaunchConfig_t config = {dim3((unsigned)call.device->num_sms), dim3(LAYER_WARPS * 32), SMEM_BYTES,
                                       call.stream, attributes, params.is_cooperative ? 3u : 2u};
    PK_CUDA(call.err, cudaLaunchKernelEx(&config, expert_layer_kernel<T>, (const layer_params)params));
    return PK_OK;
}

#endif
