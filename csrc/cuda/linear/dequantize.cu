/* dequantize.cu - rows of a quantised weight as a matrix of x's dtype, for the products that no kernel makes of it as it
 * lies.
 *
 * A value is a product in float32, rounded to x's dtype: one of 16 bits loses as much as an element of x did. A range of
 * rows is small enough to stay in a large L2 until the product has read it.
 */
#include "cuda/divider.h"
#include "cuda/linear/linear.h"
#include "cuda/pack.h"

enum { PIECE = PK_INT4_WORD /* values of a thread */, PIECES = 64, ROWS = 4 /* of a CTA */ };

struct dequantize_params {
    pk_weight weight;
    divider block_rows, block_columns;
    int64_t first;
    int num_rows;
    void *to; /* [num_rows, in_features] */
};

__device__ static inline float scale_at(const pk_weight &weight, int64_t at)
{
    if (weight.scales_dtype == PK_F32) return ((const float *)weight.scales)[at];
    if (weight.scales_dtype == PK_F16) return pk_to_float(((const __half *)weight.scales)[at]);
    return pk_to_float(((const __nv_bfloat16 *)weight.scales)[at]);
}

/* The first `count` bytes, and zeros. */
template <int BYTES, bool IS_ALIGNED>
__device__ static inline uint64_t load_bytes(const uint8_t *from, int count)
{
    if constexpr (IS_ALIGNED && BYTES == 8) return *(const uint64_t *)from;
    if constexpr (IS_ALIGNED && BYTES == 4) return *(const uint32_t *)from;
    uint64_t bytes = 0;
    for (int i = 0; i < BYTES; i++)
        if (i < count) bytes |= (uint64_t)from[i] << (8 * i);
    return bytes;
}

template <bool IS_ALIGNED>
__device__ static inline void load_int4(float values[PIECE], const dequantize_params &params, int row, int column,
                                        int64_t scales)
{
    constexpr int BITS[PIECE] = PK_INT4_BIT;
    const pk_weight &weight = params.weight;
    const int64_t at = params.first + row;
    const uint8_t *from = (const uint8_t *)weight.data + at * weight.stride + column / 2;
    const uint32_t word = (uint32_t)load_bytes<PIECE / 2, IS_ALIGNED>(from, PIECE / 2);
    const int block = params.block_columns.divide(column);
    const int zero = weight.zeros ? weight.zeros[at * weight.zeros_stride + block] : PK_INT4_ZERO;
    const float scale = scale_at(weight, scales + block);
    for (int i = 0; i < PIECE; i++) values[i] = (float)((int)(word >> BITS[i] & 15) - zero) * scale;
}

template <bool IS_ALIGNED>
__device__ static inline void load_float8(float values[PIECE], const dequantize_params &params, int row, int column,
                                          int count, int64_t scales)
{
    const pk_weight &weight = params.weight;
    const uint8_t *from = (const uint8_t *)weight.data + (params.first + row) * weight.stride + column;
    const uint64_t bytes = load_bytes<PIECE, IS_ALIGNED>(from, count);
    const bool is_one_block = params.block_columns.divisor % PIECE == 0 || weight.block_columns >= weight.in_features;
    const float scale = scale_at(weight, scales + params.block_columns.divide(column));
    for (int i = 0; i < PIECE; i += 2) {
        const __half2_raw pair = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(bytes >> (8 * i)), __NV_E4M3);
        const float2 both = pk_to_floats(*(const __half2 *)&pair);
        values[i] = both.x * scale, values[i + 1] = both.y * scale;
        if (is_one_block) continue;
        if (i < count) values[i] = both.x * scale_at(weight, scales + params.block_columns.divide(column + i));
        if (i + 1 < count)
            values[i + 1] = both.y * scale_at(weight, scales + params.block_columns.divide(column + i + 1));
    }
}

template <typename T, bool IS_INT4, bool IS_ALIGNED>
__global__ void __launch_bounds__(PIECES *ROWS) dequantize_kernel(const dequantize_params params)
{
    constexpr int COUNT = pk_packed<T>::COUNT;
    const int size = (int)params.weight.in_features, row = (int)blockIdx.y * ROWS + (int)threadIdx.y;
    const int64_t column = ((int64_t)blockIdx.x * PIECES + threadIdx.x) * PIECE;
    if (row >= params.num_rows || column >= size) return;
    const int count = min(PIECE, size - (int)column);
    const int64_t scales = params.block_rows.divide((int)params.first + row) * params.weight.scales_stride;
    float values[PIECE];
    if constexpr (IS_INT4)
        load_int4<IS_ALIGNED>(values, params, row, (int)column, scales);
    else
        load_float8<IS_ALIGNED>(values, params, row, (int)column, count, scales);
    T *to = (T *)params.to + (int64_t)row * size + column;
    for (int i = 0; i < PIECE; i += COUNT) pk_packed<T>::pack(values + i).template store<IS_ALIGNED>(to + i, count - i);
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
    if (weight.out_features > INT32_MAX || weight.in_features > INT32_MAX)
        return pk_fail(call.err, PK_EUNSUPPORTED,
                       "weight: of quantised ones a GPU takes at most 2^31 - 1 rows and columns");
    if (weight.in_features == 0) return PK_OK;
    const bool is_int4 = weight.dtype == PK_U8;
    const bool is_aligned =
        weight.in_features % PIECE == 0 && pk_are_multiples(is_int4 ? PIECE / 2 : PIECE, weight.data, weight.stride);
    const dequantize_params params = {
        weight, make_divider(weight.block_rows), make_divider(weight.block_columns), first, (int)count, to};
    const dim3 grid((unsigned)pk_ceil_div(weight.in_features, PIECES * PIECE), (unsigned)pk_ceil_div(count, ROWS));
    return pk_for_float_dtype(call.err, args->x.dtype, [&](auto zero) {
        using T = decltype(zero);
        auto kernel = is_int4 ? (is_aligned ? dequantize_kernel<T, true, true> : dequantize_kernel<T, true, false>)
                              : (is_aligned ? dequantize_kernel<T, false, true> : dequantize_kernel<T, false, false>);
        return pk_cuda_launch(call, "dequantize_kernel", kernel, grid, dim3(PIECES, ROWS), 0, params);
    });
}
