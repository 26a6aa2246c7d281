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
        count = pk_min((block + 1) * columns, to) - at;
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
        memcpy(rest, from + i, (size_t)pk_min(VW, count - i));
        store_as(to, dtype, at + i, vf_load_as(rest, PK_F8E4M3) * vf_set1(scale), count - i);
    }
}

#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#define HAS_F8_TABLES
enum {
    F8_CODES = 128,          /* without the sign */
    MIN_TABLE_VALUES = 1024, /* that a table is worth its making for */
    MAX_TABLES = 32,         /* 8 KB */
};

/* What all codes mean in bf16: the low bytes and the high ones. */
typedef struct {
    __m512i low[2], high[2];
} f8_table;

PK_INLINE void f8_numbers(float numbers[F8_CODES])
{
    uint8_t codes[F8_CODES];
    for (int i = 0; i < F8_CODES; i++) codes[i] = (uint8_t)i;
    for (int i = 0; i < F8_CODES; i += VW) vf_store(numbers + i, vf_load_as(codes + i, PK_F8E4M3));
}

PK_INLINE f8_table f8_table_of(const float numbers[F8_CODES], float scale)
{
    f8_table table;
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
        __m256i low[2], high[2];
#pragma GCC unroll 2
        for (int half = 0; half < 2; half++) {
            const float *from = numbers + i * 64 + half * 32;
            const vf even = vf_load(from) * vf_set1(scale), odd = vf_load(from + VW) * vf_set1(scale);
            const __m512i pairs = (__m512i)_mm512_cvtne2ps_pbh(odd, even);
            low[half] = _mm512_cvtepi16_epi8(pairs), high[half] = _mm512_cvtepi16_epi8(_mm512_srli_epi16(pairs, 8));
        }
        table.low[i] = _mm512_inserti64x4(_mm512_castsi256_si512(low[0]), low[1], 1);
        table.high[i] = _mm512_inserti64x4(_mm512_castsi256_si512(high[0]), high[1], 1);
    }
    return table;
}

/* 64 values. */
PK_INLINE void f8_look_up(uint16_t *to, const uint8_t *from, const f8_table *table)
{
    __builtin_prefetch(from + AHEAD, 0, PK_INTO_L2);
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7);
    const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(from));
    const __m512i low = _mm512_permutex2var_epi8(table->low[0], codes, table->low[1]);
    const __m512i size = _mm512_permutex2var_epi8(table->high[0], codes, table->high[1]);
    const __m512i high = _mm512_xor_si512(size, _mm512_and_si512(codes, _mm512_set1_epi8((char)0x80)));
    _mm512_storeu_si512(to, _mm512_unpacklo_epi8(low, high));
    _mm512_storeu_si512(to + 32, _mm512_unpackhi_epi8(low, high));
}

/* Rows to bf16, all `count` of one row of blocks: up to MAX_TABLES blocks of one after the other, as they lie. */
static void f8_rows_by_tables(uint16_t *to, const pk_weight *weight, int64_t first, int64_t count)
{
    const int64_t size = weight->in_features, columns = pk_min(weight->block_columns, size);
    float numbers[F8_CODES];
    f8_table tables[MAX_TABLES];
    f8_numbers(numbers);
    for (int64_t start = 0, block = 0; start < size; start += MAX_TABLES * columns, block += MAX_TABLES) {
        const int64_t end = pk_min(start + MAX_TABLES * columns, size);
        for (int64_t i = 0; i < MAX_TABLES && start + i * columns < end; i++)
            tables[i] = f8_table_of(numbers, scale_at(weight, first, block + i));
        for (int64_t r = 0; r < count; r++) {
            const uint8_t *from = (const uint8_t *)weight->data + (first + r) * weight->stride;
            const f8_table *table = tables;
            for (int64_t at = start, next; at < end; at = next, table++) {
                next = pk_min(at + columns, end);
                for (; at + 64 <= next; at += 64) f8_look_up(to + r * size + at, from + at, table);
                if (at < next)
                    decode_f8(to, PK_BF16, r * size + at, from + at, next - at, scale_at(weight, first, at / columns));
            }
        }
    }
}
#endif

#endif
