/* dequantize.h - a quantised weight in registers: eight neighbours of a row at a time, each a product in float32. */
#ifndef PK_CUDA_LINEAR_DEQUANTIZE_H
#define PK_CUDA_LINEAR_DEQUANTIZE_H

#include "cuda/divider.h"
#include "cuda/pack.h"
#include "ops/linear.h"

enum { WEIGHT_PIECE = PK_INT4_WORD };

struct weight_pieces {
    pk_weight weight;
    divider block_rows, block_columns;
};
static inline pk_status make_weight_pieces(weight_pieces *pieces, const pk_weight &weight, pk_error *err)
{
    if (weight.out_features > INT32_MAX || weight.in_features > INT32_MAX)
        return pk_fail(err, PK_EUNSUPPORTED, "weight: of quantised ones a GPU takes at most 2^31 - 1 rows and columns");
    *pieces = {weight, make_divider(weight.block_rows), make_divider(weight.block_columns)};
    return PK_OK;
}
/* Whether a piece is one load. */
static inline bool are_pieces_aligned(const pk_weight &weight)
{
    const int unit = weight.dtype == PK_U8 ? WEIGHT_PIECE / 2 : WEIGHT_PIECE;
    return weight.in_features % WEIGHT_PIECE == 0 && weight.stride % unit == 0 && weight.of_experts.data % unit == 0 &&
           pk_are_multiples(unit, weight.data);
}

/* Where a row begins, of a weight or of an expert's. */
struct weight_row {
    const uint8_t *data, *zeros;
    int64_t scales;
};
__device__ static inline weight_row row_of_weight(const weight_pieces &its, int row, int64_t expert = 0)
{
    const pk_weight &weight = its.weight;
    return {(const uint8_t *)weight.data + expert * weight.of_experts.data + row * weight.stride,
            weight.zeros ? weight.zeros + expert * weight.of_experts.zeros + row * weight.zeros_stride : nullptr,
            expert * weight.of_experts.scales + its.block_rows.divide(row) * weight.scales_stride};
}

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

/* A piece as it lies, of one scale: what is loaded early may be decoded late. */
template <bool IS_INT4>
struct raw_piece {
    std::conditional_t<IS_INT4, uint32_t, uint2> bits = {};
    float scale = 0, zero = 0;

    __device__ __forceinline__ void decode(float (&values)[WEIGHT_PIECE]) const
    {
        if constexpr (IS_INT4) {
            for (int i = 0; i < WEIGHT_PIECE / 2; i++) { /* PK_INT4_BIT: as the last bits of 128 in bfloat16 */
                const uint32_t pair = (bits >> 4 * i & 0x000f000f) | 0x43004300;
                values[2 * i] = (__uint_as_float(pair << 16) - (128 + zero)) * scale;
                values[2 * i + 1] = (__uint_as_float(pair & 0xffff0000) - (128 + zero)) * scale;
            }
        } else {
            const uint2 low = fp8_to_f16(bits.x), high = fp8_to_f16(bits.y);
            const uint32_t pairs[WEIGHT_PIECE / 2] = {low.x, low.y, high.x, high.y};
            for (int i = 0; i < WEIGHT_PIECE / 2; i++) {
                const float2 both = pk_to_floats(*(const __half2 *)&pairs[i]);
                values[2 * i] = both.x * scale, values[2 * i + 1] = both.y * scale;
            }
        }
    }
};

/* The first `count` values from `column` on, a multiple of WEIGHT_PIECE; what is behind them is anything. */
template <bool IS_INT4, bool IS_ALIGNED>
__device__ static inline void load_piece(float (&values)[WEIGHT_PIECE], const weight_pieces &its, const weight_row &row,
                                         int column, int count)
{
    const pk_weight &weight = its.weight;
    const int block = its.block_columns.divide(column);
    raw_piece<IS_INT4> raw;
    raw.scale = scale_at(weight, row.scales + block);
    if constexpr (IS_INT4) {
        raw.bits = (uint32_t)load_bytes<WEIGHT_PIECE / 2, IS_ALIGNED>(row.data + column / 2, WEIGHT_PIECE / 2);
        raw.zero = row.zeros ? row.zeros[block] : PK_INT4_ZERO;
        raw.decode(values);
    } else {
        const uint64_t bytes = load_bytes<WEIGHT_PIECE, IS_ALIGNED>(row.data + column, count);
        const bool is_one_block =
            its.block_columns.divisor % WEIGHT_PIECE == 0 || weight.block_columns >= weight.in_features;
        raw.bits = {(uint32_t)bytes, (uint32_t)(bytes >> 32)};
        if (!is_one_block) raw.scale = 1;
        raw.decode(values);
        if (is_one_block) return;
        for (int i = 0; i < WEIGHT_PIECE; i++)
            if (i < count) values[i] *= scale_at(weight, row.scales + its.block_columns.divide(column + i));
    }
}

#endif
