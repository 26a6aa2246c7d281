/* merge.cu - merge_attention_states: attention over parts of the keys, put together by their log-sum-exps.
 *
 *     lse = log sum_p exp(lse_p)        out = sum_p out_p * exp(lse_p - lse)
 *
 * One warp a row of one head: the few log-sum-exps sit in registers of every lane, the values are read once. A part
 * with lse -inf saw no key: it is skipped, so what it holds (NaN too) does not count.
 */
#include "cuda/cuda.h"

// --- kernels

enum { WARPS = 4 };

template <typename T>
__global__ void __launch_bounds__(WARPS * 32) merge_attention_states_kernel(const pk_merge_args args)
{
    int64_t row = (int64_t)blockIdx.x * WARPS + threadIdx.x / 32, num_rows = args.num_tokens * args.num_heads;
    if (row >= num_rows) return;
    int lane = threadIdx.x % 32;
    int64_t token = row / args.num_heads, head = row - token * args.num_heads;
    const float *part_lses = args.part_lses + head * args.num_tokens + token;

    float max_lse = -INFINITY, sum = 0;
    for (int64_t part = 0; part < args.num_parts; part++) max_lse = fmaxf(max_lse, part_lses[part * num_rows]);
    float base = max_lse == -INFINITY ? 0 : max_lse;
    for (int64_t part = 0; part < args.num_parts; part++) sum += expf(part_lses[part * num_rows] - base);
    float lse = max_lse == -INFINITY ? -INFINITY : base + logf(sum);

    T *out = (T *)args.out + row * args.head_dim;
    const T *parts = (const T *)args.parts + row * args.head_dim;
    for (int64_t dim = lane; dim < args.head_dim; dim += 32) {
        float value = 0;
        for (int64_t part = 0; part < args.num_parts; part++) {
            float part_lse = part_lses[part * num_rows];
            if (part_lse != -INFINITY)
                value += expf(part_lse - lse) * pk_to_float(parts[part * num_rows * args.head_dim + dim]);
        }
        out[dim] = pk_from_float<T>(value);
    }
    if (args.lse && lane == 0) args.lse[head * args.num_tokens + token] = lse;
}

// --- launchers

pk_status pk_cuda_merge_attention_states(const pk_merge_args *args, pk_stream stream, pk_error *err)
{
    int64_t num_rows = args->num_tokens * args->num_heads;
    if (num_rows == 0) return PK_OK;
    pk_cuda_scope scope(args->out ? args->out : args->lse, err);
    if (scope.status != PK_OK) return scope.status;
    return pk_for_float_dtype(err, args->dtype, [&](auto *type) {
        using T = std::remove_pointer_t<decltype(type)>;
        return PK_CUDA_LAUNCH(err, merge_attention_states_kernel<T>, dim3((unsigned)pk_ceil_div(num_rows, WARPS)),
                              dim3(WARPS * 32), 0, stream, *args);
    });
}
