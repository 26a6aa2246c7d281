/* any.cu - expert_linear of any dtypes, strides and numbers of tokens, by quantised weights, too: a warp an output.
 *
 * A quantised weight is decoded in registers, as dequantize.h does, and no value is rounded. Each pair reads its expert's
 * weight, from the L2 cache where another has just done so: little is lost with few tokens, and most of the time with many.
 */
#include "cuda/experts/experts.h"
#include "cuda/linear/dequantize.h"

enum { ANY_WARPS = 8 };

struct expert_any_params {
    pk_expert_linear_args args;
    weight_pieces pieces; /* of a quantised weight */
};

// --- kernels

/* A row of x by a row of an expert's weight: a lane's share of the sum. */
template <typename T, weight_form FORM, bool IS_ALIGNED>
__device__ static inline float part_of_product(const expert_any_params &params, const T *x, int64_t expert, int64_t row)
{
    const pk_weight &weight = params.args.linear.weight;
    const int64_t size = weight.in_features, lane = threadIdx.x % 32;
    float sum = 0;
    if constexpr (FORM == AS_X) {
        const T *from = (const T *)weight.data + expert * weight.of_experts.data + row * weight.stride;
        for (int64_t i = lane; i < size; i += 32) sum += pk_to_float(x[i]) * pk_to_float(from[i]);
    } else {
        constexpr int COUNT = pk_packed<T>::COUNT;
        const weight_row from = row_of_weight(params.pieces, (int)row, expert);
#pragma unroll 3
        for (int64_t column = lane * WEIGHT_PIECE; column < size; column += 32 * WEIGHT_PIECE) {
            float values[WEIGHT_PIECE], its_x[WEIGHT_PIECE];
            const int count = size - column < WEIGHT_PIECE ? (int)(size - column) : WEIGHT_PIECE;
            load_piece<FORM == IN_INT4, IS_ALIGNED>(values, params.pieces, from, (int)column, count);
            for (int i = 0; i < WEIGHT_PIECE; i += COUNT)
                pk_packed<T>::template load<IS_ALIGNED>(x + column + i, count - i).unpack(its_x + i);
            for (int i = 0; i < WEIGHT_PIECE; i++)
                if (IS_ALIGNED || i < count) sum += its_x[i] * values[i];
        }
    }
    return sum;
}

/* A row of x by a row of a pair's weight, in all lanes of a warp; 0 where the expert is out of range. */
template <typename T, weight_form FORM, bool IS_ALIGNED>
__device__ static inline float pair_product(const expert_any_params &params, int64_t token, int64_t j, int64_t row,
                                            pk_cuda_bad_id *bad_id)
{
    const pk_expert_linear_args &args = params.args;
    const int64_t expert = args.experts[token * args.num_chosen + j];
    if (expert < 0 || expert >= args.num_experts) {
        if (row == 0 && threadIdx.x % 32 == 0) pk_record_bad_id(bad_id, PK_BAD_EXPERT, token, expert, args.num_experts);
        return 0;
    }
    const T *x = (const T *)args.linear.x.data + token * args.linear.x.stride + j * args.x_pair_stride;
    return pk_sum_over_warp(part_of_product<T, FORM, IS_ALIGNED>(params, x, expert, row));
}

template <typename T, weight_form FORM, bool IS_ALIGNED>
__global__ void __launch_bounds__(ANY_WARPS * 32)
    expert_any_kernel(const __grid_constant__ expert_any_params params, pk_cuda_bad_id *bad_id)
{
    const pk_expert_linear_args &args = params.args;
    const pk_epilogue &to = args.linear.epilogue;
    const int64_t width = args.linear.weight.out_features / (to.is_gated ? 2 : 1),
                  of_token = args.weights ? 1 : args.num_chosen;
    const int64_t at = ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32, row = at / width,
                  column = at - row * width;
    const int64_t token = row / of_token, j = row - token * of_token;
    auto product = [&](int64_t its_j, int64_t its_row) {
        return pair_product<T, FORM, IS_ALIGNED>(params, token, its_j, its_row, bad_id);
    };
    pk_wait_for_previous_kernel();
    pk_let_next_kernel_start();
    if (token >= args.linear.x.num_rows) return;
    float sum = 0;
    if (args.weights) {
        for (int64_t each = 0; each < args.num_chosen; each++) {
            const int64_t pair = token * args.num_chosen + each, expert = args.experts[pair];
            const float of_pair = product(each, column);
            if (expert >= 0 && expert < args.num_experts) sum += args.weights[pair] * of_pair;
        }
    } else {
        sum = product(j, column);
    }
    if (to.is_gated) sum = pk_round<T>(pk_silu<T>(pk_round<T>(sum))) * pk_round<T>(product(j, width + column));
    if (threadIdx.x % 32 != 0) return;
    T *out = (T *)to.out + token * to.out_stride + j * args.out_pair_stride + column;
    *out = pk_from_float<T>(to.adds_to_out ? pk_to_float(*out) + sum : sum);
}

// --- launchers

template <typename T, weight_form FORM, bool IS_ALIGNED>
static pk_status launch(const expert_any_params &params, const pk_cuda_call &call)
{
    const pk_expert_linear_args *args = &params.args;
    const int64_t rows = args->weights ? args->linear.x.num_rows : pk_num_pairs(args);
    const int64_t outputs = rows * (args->linear.weight.out_features / (args->linear.epilogue.is_gated ? 2 : 1));
    return pk_cuda_launch_early(call, "expert_any_kernel", expert_any_kernel<T, FORM, IS_ALIGNED>,
                                pk_cuda_grid(pk_ceil_div(outputs, ANY_WARPS)), dim3(ANY_WARPS * 32), 0, params,
                                call.device->bad_id);
}

pk_status pk_cuda_experts_any(const pk_expert_linear_args *args, const pk_cuda_call &call)
{
    const pk_weight &weight = args->linear.weight;
    const pk_rows &x = args->linear.x;
    expert_any_params params = {*args};
    if (weight.scales) PK_TRY(make_weight_pieces(&params.pieces, weight, call.err));
    return pk_for_float_dtype(call.err, x.dtype, [&](auto zero) {
        using T = decltype(zero);
        const bool is_aligned = are_pieces_aligned(weight) && pk_are_multiples(16, x.data) &&
                                pk_are_multiples(pk_packed<T>::COUNT, x.stride, args->x_pair_stride);
        if (!weight.scales) return launch<T, AS_X, false>(params, call);
        if (weight.dtype == PK_U8)
            return is_aligned ? launch<T, IN_INT4, true>(params, call) : launch<T, IN_INT4, false>(params, call);
        return is_aligned ? launch<T, IN_FLOAT8, true>(params, call) : launch<T, IN_FLOAT8, false>(params, call);
    });
}
