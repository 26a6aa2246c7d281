/* weights_parts.h - what the kernels of weights.inc share: sums, scales, vectors as numbers of another dtype. */
#ifndef PK_CPU_WEIGHTS_PARTS_H
#define PK_CPU_WEIGHTS_PARTS_H

#include "cpu/weights.h"
#include "cpu/simd.h"

typedef uint32_t vu __attribute__((vector_size(4 * VW)));
typedef int32_t vi __attribute__((vector_size(4 * VW)));
enum {
    MAX_ROWS = 4, /* of x, side by side */
    MAX_SUMS = 4, /* of all of them */
    SLICE = 6144, /* columns of all rows of x, whose 24 KB stay in an L1 cache */
    AHEAD = 4096, /* bytes that are fetched before their turn */
};

/* Sums of a row of x within a block: each waits for its own additions. */
PK_INLINE int parts_of(const int num_rows) { return num_rows > 2 ? 1 : 2; }

PK_INLINE vf sum_of_parts(const vf *sums, const int row, const int num_rows)
{
    if (parts_of(num_rows) > 1) return sums[2 * row] + sums[2 * row + 1];
    return sums[row];
}

PK_INLINE float scale_at(const pk_weight *weight, int64_t row, int64_t block)
{
    const int64_t at = row / weight->block_rows * weight->scales_stride + block;
    if (weight->scales_dtype == PK_F32) return ((const float *)weight->scales)[at];
    const uint16_t half = ((const uint16_t *)weight->scales)[at];
#if VW >= 8
    if (weight->scales_dtype == PK_F16) return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(half)));
#endif
    return weight->scales_dtype == PK_BF16 ? pk_bf16_to_f32(half) : pk_f16_to_f32(half);
}

PK_INLINE const uint8_t *zeros_of_row(const pk_weight *weight, int64_t row)
{
    return weight->zeros ? weight->zeros + row * weight->zeros_stride : NULL;
}

/* Rounds to bf16, as pk_f32_to_bf16 does. */
PK_INLINE void store_bf16(uint16_t *to, vf values)
{
#ifdef __AVX512BF16__
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(values));
#else
    const vu bits = (vu)values, is_nan = (vu)((bits & 0x7fffffffu) > 0x7f800000u);
    const vu halves = ((bits >> 16 | 0x40) & is_nan) | ((bits + 0x7fff + (bits >> 16 & 1)) >> 16 & ~is_nan);
#if VW == 16
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtepi32_epi16((__m512i)halves));
#elif VW == 8
    const __m256i packed = _mm256_permute4x64_epi64(_mm256_packus_epi32((__m256i)halves, (__m256i)halves), 0x08);
    _mm_storeu_si128((__m128i *)to, _mm256_castsi256_si128(packed));
#else
    for (int i = 0; i < VW; i++) to[i] = (uint16_t)halves[i];
#endif
#endif
}

/* A vector, or its first `count` lanes. */
PK_INLINE void store_as(void *to, const pk_dtype dtype, int64_t at, vf values, int64_t count)
{
    if (dtype == PK_F32) {
        float lanes[VW];
        vf_store(count < VW ? lanes : (float *)to + at, values);
        if (count < VW) memcpy((float *)to + at, lanes, (size_t)count * sizeof *lanes);
    } else {
        uint16_t halves[VW];
        store_bf16(count < VW ? halves : (uint16_t *)to + at, values);
        if (count < VW) memcpy((uint16_t *)to + at, halves, (size_t)count * sizeof *halves);
    }
}

#endif
