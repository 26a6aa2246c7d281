/* weights_float8.h - float8 by rows of x, and as numbers. With AVX a vector is 16 bits of float16 first, which hold the
 * value / 256.
 */
#ifndef PK_CPU_WEIGHTS_FLOAT8_H
#define PK_CPU_WEIGHTS_FLOAT8_H

#include "cpu/weights_parts.h"

enum {
    F8_STEP = VW >= 8 ? 4 * VW : VW, /* values */
    F8_VECTORS = VW >= 8 ? 2 : 1,    /* that are loaded at once */
};

#if VW >= 8
static const float F8_UNIT = 256;
/* 2 VW values / 256; NaN becomes 480 / 256. */
PK_INLINE void f8_load(vf values[2], const uint8_t *p)
{
#if VW == 16
    const __m512i high = _mm512_slli_epi16(_mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i *)p)), 8);
    const __m512i half = _mm512_and_si512(_mm512_srai_epi16(high, 1), _mm512_set1_epi16((short)0xbfff));
    values[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
    values[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
#else
    const __m256i high = _mm256_slli_epi16(_mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p)), 8);
    const __m256i half = _mm256_and_si256(_mm256_srai_epi16(high, 1), _mm256_set1_epi16((short)0xbfff));
    values[0] = _mm256_cvtph_ps(_mm256_castsi256_si128(half));
    values[1] = _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1));
#endif
}
/* Not 0 where one of F8_STEP values is NaN. */
PK_INLINE uint64_t f8_nans(const uint8_t *p)
{
#if VW == 16
    const __m512i nan = _mm512_set1_epi8(0x7f);
    return _mm512_cmpeq_epi8_mask(_mm512_and_si512(_mm512_loadu_si512(p), nan), nan);
#else
    const __m256i nan = _mm256_set1_epi8(0x7f), x = _mm256_loadu_si256((const __m256i *)p);
    return (uint32_t)_mm256_movemask_epi8(_mm256_cmpeq_epi8(_mm256_and_si256(x, nan), nan));
#endif
}
#else
static const float F8_UNIT = 1;
PK_INLINE void f8_load(vf values[1], const uint8_t *p) { values[0] = vf_load_as(p, PK_F8E4M3); }
PK_INLINE uint64_t f8_nans(const uint8_t *p)
{
    (void)p; /* they are NaN as numbers, too */
    return 0;
}
#endif

// --- products

PK_INLINE void f8_step(vf *sums, const uint8_t *from, const float *x, int64_t x_stride, const int num_rows)
{
    const int parts = parts_of(num_rows);
#pragma GCC unroll 2
    for (int at = 0; at < F8_STEP; at += F8_VECTORS * VW) {
        vf values[F8_VECTORS];
        f8_load(values, from + at);
#pragma GCC unroll 2
        for (int v = 0; v < F8_VECTORS; v++)
#pragma GCC unroll 4
            for (int r = 0; r < num_rows; r++) {
                vf *sum = &sums[r * parts + v % parts];
                *sum = vf_fma(values[v], vf_load(x + r * x_stride + at + v * VW), *sum);
            }
    }
}

/* `count` values of a block. */
PK_INLINE uint64_t f8_block(vf *totals, const uint8_t *from, const float *x, int64_t x_stride, int64_t count,
                            float scale, const int num_rows)
{
    vf sums[MAX_SUMS];
    uint64_t nans = 0;
#pragma GCC unroll 4
    for (int i = 0; i < num_rows * parts_of(num_rows); i++) sums[i] = vf_set1(0.0f);
    int64_t at = 0;
    for (; at + F8_STEP <= count; at += F8_STEP) {
        __builtin_prefetch(from + at + AHEAD, 0, PK_INTO_L2);
        nans |= f8_nans(from + at);
        f8_step(sums, from + at, x + at, x_stride, num_rows);
    }
    if (at < count) {
        uint8_t rest[F8_STEP] = {0};
        float rest_of_x[MAX_ROWS * F8_STEP] = {0};
        memcpy(rest, from + at, (size_t)(count - at));
        for (int r = 0; r < num_rows; r++)
            memcpy(rest_of_x + r * F8_STEP, x + r * x_stride + at, (size_t)(count - at) * sizeof *x);
        nans |= f8_nans(rest);
        f8_step(sums, rest, rest_of_x, F8_STEP, num_rows);
    }
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++)
        totals[r] = vf_fma(sum_of_parts(sums, r, num_rows) * vf_set1(F8_UNIT), vf_set1(scale), totals[r]);
    return nans;
}

/* Columns [from, to) of a row; not 0 where one is NaN. */
PK_INLINE uint64_t f8_columns(vf *totals, const pk_weight *weight, int64_t row, int64_t from, int64_t to,
                              const float *x, int64_t x_stride, const int num_rows)
{
    const uint8_t *data = (const uint8_t *)weight->data + row * weight->stride;
    const int64_t columns = weight->block_columns;
    uint64_t nans = 0;
    for (int64_t at = from, block = from / columns, count; at < to; at += count, block++) {
        count = at_most((block + 1) * columns, to) - at;
        nans |= f8_block(totals, data + at, x + at, x_stride, count, scale_at(weight, row, block), num_rows);
    }
    return nans;
}

// --- as numbers

PK_INLINE void decode_f8(void *to, const pk_dtype dtype, int64_t at, const uint8_t *from, int64_t count, float scale)
{
    const vf factor = vf_set1(scale * F8_UNIT);
    int64_t i = 0;
    for (; i + F8_STEP <= count && !f8_nans(from + i); i += F8_STEP)
#pragma GCC unroll 2
        for (int part = 0; part < F8_STEP; part += F8_VECTORS * VW) {
            vf values[F8_VECTORS];
            f8_load(values, from + i + part);
#pragma GCC unroll 2
            for (int v = 0; v < F8_VECTORS; v++) store_as(to, dtype, at + i + part + v * VW, values[v] * factor, VW);
        }
    for (; i < count; i += VW) { /* the end, or all from a NaN on */
        uint8_t rest[VW] = {0};
        memcpy(rest, from + i, (size_t)at_most(VW, count - i));
        store_as(to, dtype, at + i, vf_load_as(rest, PK_F8E4M3) * vf_set1(scale), count - i);
    }
}

#endif
