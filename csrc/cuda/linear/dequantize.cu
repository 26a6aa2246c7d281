/* dequantize.cu - rows of a quantised weight as a matrix of x's dtype, for the products that no kernel makes of it as it
 * lies.
 *
 * A value is a product in float32, rounded to x's dtype: one of 16 bits loses as much as an element of x did. A range of
 * rows is small enough to stay in a large L2 until the product has read it.
 */
#include "cuda/linear/dequantize.h"
#include "cuda/linear/linear.h"

enum { PIECES = 64, ROWS = 4 /* of a CTA */ };

struct dequantize_params {
    weight_pieces pieces;
    int64_t first;
    int num_rows;
    void *to; /* [num_rows, in_features] */
};

template <typename T, bool IS_INT4, bool IS_ALIGNED>
__global__ void __launch_bounds__(PIECES *ROWS) dequantize_kernel(const dequantize_params params)
{
    constexpr int COUNT = pk_packed<T>::COUNT;
    const int size = (int)params.pieces.weight.in_features, row = (int)blockIdx.y * ROWS + (int)threadIdx.y;
    const int64_t column = ((int64_t)blockIdx.x * PIECES + threadIdx.x) * WEIGHT_PIECE;
    if (row >= params.num_rows || column >= size) return;
    const int count = min((int)WEIGHT_PIECE, size - (int)column);
    float values[WEIGHT_PIECE];
    const weight_row from = row_of_weight(params.pieces, (int)params.first + row);
    load_piece<IS_INT4, IS_ALIGNED>(values, params.pieces, from, (int)column, count);
    T *to = (T *)params.to + (int64_t)row * size + column;
    for (int i = 0; i < WEIGHT_PIECE; i += COUNT)
        pk_packed<T>::pack(values + i).template store<IS_ALIGNED>(to + i, count - i);
}

int64_t pk_cuda_dequantized_rows(const pk_linear_args *args)
{
    constexpr int64_t MOST_ROWS = 1 << 17, EVEN = 128; /* all ranges are alike for cuBLASLt, but for the last one */
    const int64_t row_bytes = args->weight.in_features * (int64_t)pk_dtype_bytes(args->x.dtype);
    const int64_t rows = args->weight.out_features, most = row_bytes > 0 ? PK_SCRATCH_BYTES / row_bytes : MOST_ROWS;
    const int64_t even = std::max(std::min(most, MOST_ROWS) / EVEN * EVEN, EVEN);
    return std::min(rows, pk_ceil_div(pk_ceil_div(rows, pk_ceil_div(rows, even)), EVEN) * EVEN);
}

pk_status pk_cuda_dequantize(const pk_linear_args *args, int64_t first, int64_t count, void *to,
                             const pk_cuda_call &call)
{
    const pk_weight &weight = args->weight;
    dequantize_params params = {{}, first, (int)count, to};
    PK_TRY(make_weight_pieces(&params.pieces, weight, call.err));
    if (weight.in_features == 0) return PK_OK;
    const bool is_int4 = weight.dtype == PK_U8, is_aligned = are_pieces_aligned(weight);
    const dim3 grid((unsigned)pk_ceil_div(weight.in_features, PIECES * WEIGHT_PIECE),
                    (unsigned)pk_ceil_div(count, ROWS));
    return pk_for_float_dtype(call.err, args->x.dtype, [&](auto zero) {
        using T = decltype(zero);
        auto kernel = is_int4 ? (is_aligned ? dequantize_kernel<T, true, true> : dequantize_kernel<T, true, false>)
                              : (is_aligned ? dequantize_kernel<T, false, true> : dequantize_kernel<T, false, false>);
        return pk_cuda_launch(call, "dequantize_kernel", kernel, grid, dim3(PIECES, ROWS), 0, params);
    });
}
