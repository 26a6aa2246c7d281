/* simd_avx512.h - the vector of simd.h: 16 floats of AVX-512. simd.h includes it. */
#ifndef PK_CPU_SIMD_AVX512_H
#define PK_CPU_SIMD_AVX512_H

#include <immintrin.h>
#define VW 16
typedef __m512 vf;
PK_INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
PK_INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
PK_INLINE void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
PK_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
PK_INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
PK_INLINE vf vf_abs(vf x) { return _mm512_abs_ps(x); }
PK_INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
PK_INLINE vf vf_round(vf x) { return _mm512_roundscale_ps(x, 8); }
/* x * 2^n for whole n; 0 where `below` < `limit` */
PK_INLINE vf vf_scale_or_zero(vf x, vf n, vf below, float limit)
{
    __mmask16 keep = _mm512_cmp_ps_mask(below, _mm512_set1_ps(limit), _CMP_NLT_UQ);
    return _mm512_maskz_scalef_ps(keep, x, n);
}

PK_INLINE __m256 pk_f8_to_vf8(__m128i bytes); /* below, shared with AVX2 */
PK_INLINE vf vf_load_as(const void *p, pk_dtype dtype)
{
    switch (dtype) {
        case PK_BF16:
            return _mm512_castsi512_ps(
                _mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16));
        case PK_F16:
            return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
        case PK_F8E4M3: {
            /* e4m3 is f16 with a shorter exponent: the bits moved in place are x / 256, subnormals included. */
            __m256i x = _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)p));
            __m256i magnitude = _mm256_and_si256(x, _mm256_set1_epi16(0x7f));
            __mmask16 is_nan = _mm256_cmpeq_epi16_mask(magnitude, _mm256_set1_epi16(0x7f));
            __m256i half =
                _mm256_or_si256(_mm256_slli_epi16(magnitude, 7), _mm256_slli_epi16(_mm256_sub_epi16(x, magnitude), 8));
            half = _mm256_mask_mov_epi16(half, is_nan, _mm256_set1_epi16(0x7e00));
            return _mm512_mul_ps(_mm512_cvtph_ps(half), _mm512_set1_ps(256.0f));
        }
        default:
            return _mm512_loadu_ps(p);
    }
}

/* Of 32 elements of bf16 the even ones (part 0) or the odd ones (part 1). */
PK_INLINE vf vf_load_bf16_part(const void *p, int part)
{
    __m512i pairs = _mm512_loadu_si512(p);
    return _mm512_castsi512_ps(part ? _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000u))
                                    : _mm512_slli_epi32(pairs, 16));
}

/* The first 8 lanes from memory, zero in the others: the end of a head_dim that is 8 more than a multiple of 16. */
PK_INLINE vf vf_load_half_as(const void *p, pk_dtype dtype)
{
    const __m128i *halves = p;
    switch (dtype) {
        case PK_BF16:
            return _mm512_zextps256_ps512(
                _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), 16)));
        case PK_F16:
            return _mm512_zextps256_ps512(_mm256_cvtph_ps(_mm_loadu_si128(halves)));
        case PK_F8E4M3:
            return _mm512_zextps256_ps512(pk_f8_to_vf8(_mm_loadl_epi64(halves)));
        default:
            return _mm512_zextps256_ps512(_mm256_loadu_ps(p));
    }
}

/* rows[i][j] <-> rows[j][i] */
PK_INLINE void vf_transpose(vf rows[16])
{
    vf t[16], u[16];
#pragma GCC unroll 8
    for (int i = 0; i < 16; i += 2) {
        t[i] = _mm512_unpacklo_ps(rows[i], rows[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(rows[i], rows[i + 1]);
    }
#define PAIRS(op, a, b) _mm512_castpd_ps(op(_mm512_castps_pd(a), _mm512_castps_pd(b)))
#pragma GCC unroll 4
    for (int i = 0; i < 16; i += 4) { /* u[i + c], 128-bit lane L: column 4 L + c of the rows i .. i + 3 */
        u[i] = PAIRS(_mm512_unpacklo_pd, t[i], t[i + 2]);
        u[i + 1] = PAIRS(_mm512_unpackhi_pd, t[i], t[i + 2]);
        u[i + 2] = PAIRS(_mm512_unpacklo_pd, t[i + 1], t[i + 3]);
        u[i + 3] = PAIRS(_mm512_unpackhi_pd, t[i + 1], t[i + 3]);
    }
#undef PAIRS
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        vf even_low = _mm512_shuffle_f32x4(u[c], u[c + 4], 0x88),
           even_high = _mm512_shuffle_f32x4(u[c + 8], u[c + 12], 0x88);
        vf odd_low = _mm512_shuffle_f32x4(u[c], u[c + 4], 0xdd),
           odd_high = _mm512_shuffle_f32x4(u[c + 8], u[c + 12], 0xdd);
        rows[c] = _mm512_shuffle_f32x4(even_low, even_high, 0x88);
        rows[c + 8] = _mm512_shuffle_f32x4(even_low, even_high, 0xdd);
        rows[c + 4] = _mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
        rows[c + 12] = _mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
    }
}

/* Lane i of the result is the sum of x[i]: 30 shuffles and 30 additions for 16 sums. */
PK_INLINE vf vf_sums(vf x[16])
{
    vf r[8], t[4], u[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++) /* lower half: x[i], upper half: x[i + 8] */
        r[i] = _mm512_shuffle_f32x4(x[i], x[i + 8], 0x44) + _mm512_shuffle_f32x4(x[i], x[i + 8], 0xee);
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        t[i] = _mm512_unpacklo_ps(r[2 * i], r[2 * i + 1]) + _mm512_unpackhi_ps(r[2 * i], r[2 * i + 1]);
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        u[i] = _mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0x44) + _mm512_shuffle_ps(t[2 * i], t[2 * i + 1], 0xee);
    vf v = _mm512_shuffle_f32x4(u[0], u[1], 0x88) + _mm512_shuffle_f32x4(u[0], u[1], 0xdd);
    return _mm512_shuffle_f32x4(v, v, 0xd8);
}

#endif
