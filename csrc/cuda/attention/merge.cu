/* merge.cu - merge_attention_states: attention over parts of the keys, put together by their log-sum-exps.
 *
 *     lse = log sum_p exp(lse_p)        out = sum_p out_p * exp(lse_p - lse)
 *
 * As many threads per row of one head as it has 16-byte pieces. A part with lse -inf saw no key: it is skipped, so what
 * it holds (NaN too) does not count.
 */
#include "cuda/pack.h"
#include "ops/merge.h"

// --- kernels

template <typename T, bool IS_ALIGNED>
__global__ void __launch_bounds__(128) merge_attention_states_kernel(const pk_merge_args args)
{
    using packed = pk_packed<T>;
    constexpr int VEC = packed::COUNT;
    int64_t row = (int64_t)blockIdx.x * blockDim.y + threadIdx.y, num_rows = args.num_tokens * args.num_heads;
    if (row >= num_rows) return;
    int64_t token = row / args.num_heads, head = row - token * args.num_heads;
    const float *part_lses = args.part_lses + head * args.num_tokens + token;

    float max_lse = -INFINITY, sum = 0;
    for (int64_t part = 0; part < args.num_parts; part++) max_lse = fmaxf(max_lse, part_lses[part * num_rows]);
    float base = max_lse == -INFINITY ? 0 : max_lse;
    for (int64_t part = 0; part < args.num_parts; part++) sum += expf(part_lses[part * num_rows] - base);
    float lse = max_lse == -INFINITY ? -INFINITY : base + logf(sum);

    for (int64_t dim = threadIdx.x * VEC; dim < args.head_dim; dim += blockDim.x * VEC) {
        const T *parts = (const T *)args.parts + row * args.head_dim + dim;
        float merged[VEC] = {};
#pragma unroll 4
        for (int64_t part = 0; part < args.num_parts; part++) {
            float weight = expf(part_lses[part * num_rows] - lse), values[VEC];
            const T *from = parts + part * num_rows * args.head_dim;
            packed piece = IS_ALIGNED ? packed{__ldcs((const uint4 *)from)}
                                      : packed::template load<false>(from, args.head_dim - dim);
            piece.unpack(values);
            for (int i = 0; i < VEC; i++) merged[i] += weight > 0 ? weight * values[i] : 0;
        }
        packed::pack(merged).template store<IS_ALIGNED>((T *)args.out + row * args.head_dim + dim, args.head_dim - dim);
    }
    if (args.lse && threadIdx.x == 0) args.lse[head * args.num_tokens + token] = lse;
}

// --- launchers

pk_status pk_cuda_merge_attention_states(const pk_merge_args *args, const pk_cuda_call &call)
{
    int64_t num_rows = args->num_tokens * args->num_heads;
    if (num_rows == 0) return PK_OK;
    return pk_for_float_dtype(call.err, args->dtype, [&](auto zero) {
        using T = decltype(zero);
        constexpr int64_t VEC = 16 / sizeof(T);
        bool is_aligned = args->head_dim % VEC == 0 && pk_are_multiples(16, args->parts, args->out);
        int64_t pieces = pk_ceil_div(args->head_dim, VEC);
        dim3 cta((unsigned)(pieces < 32 ? pieces : 32));
        cta.y = 128 / cta.x;
        auto kernel = is_aligned ? merge_attention_states_kernel<T, true> : merge_attention_states_kernel<T, false>;
        dim3 grid = pk_cuda_grid(pk_ceil_div(num_rows, cta.y));
        return pk_cuda_launch(call, "merge_attention_states_kernel", kernel, grid, cta, 0, *args);
    });
}
