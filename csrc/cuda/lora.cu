/* lora.cu - lora_add: two kernels, hidden = x @ a.T in float32 scratch memory, then out += hidden @ b.T.
 *
 * Few tokens may all have different adapters, so a CTA has one of them. The tokens of a prompt have one adapter: a CTA
 * takes some neighbours, and what it reads of a matrix serves all of them that have the same slot. The order of each sum
 * depends on the sizes alone, so a token's bits do not depend on its batch. Slots are read on the device: a graph may be
 * replayed with others. */
#include "cuda/pack.h"
#include "ops/lora.h"

namespace
{

constexpr int WARPS = 8, FEW_TOKENS = 256 /* up to which a CTA has one */, NEIGHBOURS = 8;

/* The slot of a token; negative: none. */
__device__ static int slot_of(const pk_lora_args &args, int64_t token)
{
    const int slot = args.slots[token];
    return slot < args.num_slots ? slot : -1;
}

/* Calls body(first, end, slot) for the neighbours of one slot among a CTA's tokens, which have one. */
template <int TOKENS, typename Body>
__device__ static void for_runs(const pk_lora_args &args, int64_t start, Body body)
{
    const int count = (int)min((int64_t)TOKENS, args.num_tokens - start);
    for (int first = 0, end; first < count; first = end) {
        const int slot = slot_of(args, start + first);
        for (end = first + 1; end < count && slot_of(args, start + end) == slot;) end++;
        if (slot >= 0) body(first, end, slot);
    }
}

/* Grid: tokens x ranks, a rank a warp. */
template <typename T, int TOKENS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(WARPS * 32)
    lora_shrink_kernel(const pk_lora_args args, float *hidden, pk_cuda_bad_id *bad_id)
{
    using packed = pk_packed<T>;
    constexpr int VEC = packed::COUNT;
    const int lane = threadIdx.x % 32;
    const int64_t start = (int64_t)blockIdx.x * TOKENS, rank = (int64_t)blockIdx.y * WARPS + threadIdx.x / 32;
    if (blockIdx.y == 0 && threadIdx.x < TOKENS && start + threadIdx.x < args.num_tokens) {
        const int64_t token = start + threadIdx.x;
        if (args.slots[token] >= args.num_slots)
            pk_record_bad_id(bad_id, PK_BAD_ADAPTER, token, args.slots[token], args.num_slots);
    }
    if (rank >= args.rank) return;
    for_runs<TOKENS>(args, start, [&](int first, int end, int slot) {
        const T *row = (const T *)args.a + slot * args.a_slot_stride + rank * args.a_stride;
        float sums[TOKENS] = {};
        for (int64_t at = lane * VEC; at < args.in_features; at += 32 * VEC) {
            const int64_t count = args.in_features - at;
            float a[VEC], x[VEC];
            packed::template load<IS_ALIGNED>(row + at, count).unpack(a);
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                if (t < first || t >= end) continue;
                packed::template load<IS_ALIGNED>((const T *)args.x + (start + t) * args.x_stride + at, count)
                    .unpack(x);
                for (int i = 0; i < VEC; i++) sums[t] += a[i] * x[i];
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            const float sum = pk_sum_over_warp(sums[t]);
            if (lane == 0 && t >= first && t < end) hidden[(start + t) * args.rank + rank] = sum;
        }
    });
}

/* Grid: tokens x outputs, an output a thread. */
template <typename T, int TOKENS, bool IS_ALIGNED>
static __global__ void __launch_bounds__(WARPS * 32) lora_expand_kernel(const pk_lora_args args, const float *hidden)
{
    using packed = pk_packed<T>;
    constexpr int VEC = packed::COUNT;
    const int64_t start = (int64_t)blockIdx.x * TOKENS, output = (int64_t)blockIdx.y * blockDim.x + threadIdx.x;
    if (output >= args.out_features) return;
    T *out = (T *)args.out + output;
    for_runs<TOKENS>(args, start, [&](int first, int end, int slot) {
        const T *row = (const T *)args.b + slot * args.b_slot_stride + output * args.b_stride;
        float sums[TOKENS] = {};
        for (int64_t at = 0; at < args.rank; at += VEC) {
            const int64_t count = args.rank - at;
            float b[VEC];
            packed::template load<IS_ALIGNED>(row + at, count).unpack(b);
#pragma unroll
            for (int t = 0; t < TOKENS; t++) {
                if (t < first || t >= end) continue;
                const float *of_token = hidden + (start + t) * args.rank + at; /* the same for the whole warp */
                for (int i = 0; i < VEC; i++)
                    if (i < count) sums[t] += b[i] * of_token[i];
            }
        }
#pragma unroll
        for (int t = 0; t < TOKENS; t++) {
            if (t < first || t >= end) continue;
            T *to = out + (start + t) * args.out_stride;
            *to = pk_from_float<T>(pk_to_float(*to) + sums[t]);
        }
    });
}

template <typename T, int TOKENS, bool IS_ALIGNED>
static pk_status launch_both(const pk_lora_args *args, const pk_cuda_call &call)
{
    pk_cuda_scratch scratch;
    PK_TRY(pk_cuda_scratch_of(call, &scratch, (size_t)(args->num_tokens * args->rank) * sizeof(float)));
    float *hidden = (float *)scratch.data;
    dim3 grid = pk_cuda_grid(pk_ceil_div(args->num_tokens, TOKENS));
    grid.y = (unsigned)pk_ceil_div(args->rank, WARPS);
    PK_TRY(pk_cuda_launch(call, "lora_shrink_kernel", lora_shrink_kernel<T, TOKENS, IS_ALIGNED>, grid, dim3(WARPS * 32),
                          0, *args, hidden, call.device->bad_id));
    grid.y = (unsigned)pk_ceil_div(args->out_features, WARPS * 32);
    return pk_cuda_launch(call, "lora_expand_kernel", lora_expand_kernel<T, TOKENS, IS_ALIGNED>, grid, dim3(WARPS * 32),
                          0, *args, hidden);
}

template <typename T, bool IS_ALIGNED>
static pk_status launch_for_tokens(const pk_lora_args *args, const pk_cuda_call &call)
{
    if (args->num_tokens <= FEW_TOKENS) return launch_both<T, 1, IS_ALIGNED>(args, call);
    return launch_both<T, NEIGHBOURS, IS_ALIGNED>(args, call);
}

}  // namespace

pk_status pk_cuda_lora_add(const pk_lora_args *args, const pk_cuda_call &call)
{
    if (args->num_tokens == 0 || args->out_features == 0 || args->in_features == 0 || args->rank == 0) return PK_OK;
    return pk_for_float_dtype(call.err, args->dtype, [&](auto number) {
        using T = decltype(number);
        constexpr size_t VEC = pk_packed<T>::COUNT;
        const bool is_aligned =
            pk_are_multiples(16, args->x, args->a, args->b) &&
            pk_are_multiples(VEC, args->in_features, args->rank, args->x_stride, args->a_slot_stride, args->a_stride,
                             args->b_slot_stride, args->b_stride);
        return is_aligned ? launch_for_tokens<T, true>(args, call) : launch_for_tokens<T, false>(args, call);
    });
}
