/* weights.c - quantised weights on the CPU: rows of them as numbers. */
#include "cpu/linear.h"
#include "bits.h"

static float scale_at(const pk_weight *weight, int64_t row, int64_t column)
{
    float scale;
    const int64_t at = row / weight->block_rows * weight->scales_stride + column / weight->block_columns;
    pk_cpu_row_to_f32(&scale, (const char *)weight->scales + at * (int64_t)pk_dtype_bytes(weight->scales_dtype),
                      weight->scales_dtype, 1);
    return scale;
}

static void decode_int4(float *to, const uint8_t *from, int64_t count, float zero, float scale)
{
    static const int bits[PK_INT4_WORD] = PK_INT4_BIT;
    for (int64_t i = 0; i < count; i += PK_INT4_WORD) {
        const uint8_t *at = from + i / 2;
        const uint32_t word = at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
        for (int j = 0; j < PK_INT4_WORD; j++) to[i + j] = ((float)(word >> bits[j] & 15) - zero) * scale;
    }
}

static void decode_block(float *to, const pk_weight *weight, int64_t row, int64_t column, int64_t count)
{
    const float scale = scale_at(weight, row, column);
    const uint8_t *from = (const uint8_t *)weight->data + row * weight->stride;
    if (weight->dtype == PK_U8) {
        const uint8_t *zeros = weight->zeros;
        const int zero = zeros ? zeros[row * weight->zeros_stride + column / weight->block_columns] : PK_INT4_ZERO;
        decode_int4(to, from + column / 2, count, (float)zero, scale);
        return;
    }
    pk_cpu_row_to_f32(to, from + column, PK_F8E4M3, count);
    for (int64_t i = 0; i < count; i++) to[i] *= scale;
}

void pk_cpu_decode_weight(void *to, pk_dtype dtype, const pk_weight *weight, int64_t first, int64_t count)
{
    enum { PIECE = 512 };
    const int64_t size = weight->in_features, bytes = (int64_t)pk_dtype_bytes(dtype);
    for (int64_t row = 0; row < count; row++)
        for (int64_t at = 0, left; at < size; at += left) {
            float values[PIECE];
            left = weight->block_columns - at % weight->block_columns;
            if (left > size - at) left = size - at;
            if (left > PIECE) left = PIECE;
            decode_block(values, weight, first + row, at, left);
            pk_cpu_row_from_f32((char *)to + (row * size + at) * bytes, dtype, values, left);
        }
}
