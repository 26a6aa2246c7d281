/* simd_avx2.h - the vector of simd.h: 8 floats of AVX2. simd.h includes it. */
#ifndef PK_CPU_SIMD_AVX2_H
#define PK_CPU_SIMD_AVX2_H

#include <immintrin.h>
#define VW 8
typedef __m256 vf;
PK_INLINE vf vf_set1(float x) { return _mm256_set1_ps(x); }
PK_INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
PK_INLINE void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
PK_INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
PK_INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
PK_INLINE vf vf_abs(vf x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), x); }
PK_INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
PK_INLINE vf vf_round(vf x) { return _mm256_round_ps(x, 8); }
PK_INLINE vf vf_scale_or_zero(vf x, vf n, vf below, float limit)
{
    vf keep = _mm256_cmp_ps(below, _mm256_set1_ps(limit), _CMP_NLT_UQ);
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_and_ps(keep, x * _mm256_castsi256_ps(power));
}

PK_INLINE __m256 pk_f8_to_vf8(__m128i bytes);
PK_INLINE vf vf_load_as(const void *p, pk_dtype dtype)
{
    const __m128i *halves = p;
    switch (dtype) {
        case PK_BF16:
            return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128(halves)), 16));
        case PK_F16:
            return _mm256_cvtph_ps(_mm_loadu_si128(halves));
        case PK_F8E4M3:
            return pk_f8_to_vf8(_mm_loadl_epi64(halves));
        default:
            return _mm256_loadu_ps(p);
    }
}

/* Of 16 elements of bf16 the even ones (part 0) or the odd ones (part 1). */
PK_INLINE vf vf_load_bf16_part(const void *p, int part)
{
    __m256i pairs = _mm256_loadu_si256((const __m256i *)p);
    return _mm256_castsi256_ps(part ? _mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000u))
                                    : _mm256_slli_epi32(pairs, 16));
}

PK_INLINE void vf_transpose(vf rows[8])
{
    vf t[8], u[8];
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        t[i] = _mm256_unpacklo_ps(rows[i], rows[i + 1]);
        t[i + 1] = _mm256_unpackhi_ps(rows[i], rows[i + 1]);
    }
#define PAIRS(op, a, b) _mm256_castpd_ps(op(_mm256_castps_pd(a), _mm256_castps_pd(b)))
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        u[i] = PAIRS(_mm256_unpacklo_pd, t[i], t[i + 2]);
        u[i + 1] = PAIRS(_mm256_unpackhi_pd, t[i], t[i + 2]);
        u[i + 2] = PAIRS(_mm256_unpacklo_pd, t[i + 1], t[i + 3]);
        u[i + 3] = PAIRS(_mm256_unpackhi_pd, t[i + 1], t[i + 3]);
    }
#undef PAIRS
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
        rows[c] = _mm256_permute2f128_ps(u[c], u[c + 4], 0x20);
        rows[c + 4] = _mm256_permute2f128_ps(u[c], u[c + 4], 0x31);
    }
}

PK_INLINE vf vf_sums(vf x[8])
{
    vf low = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
    vf high = _mm256_hadd_ps(_mm256_hadd_ps(x[4], x[5]), _mm256_hadd_ps(x[6], x[7]));
    return _mm256_permute2f128_ps(low, high, 0x20) + _mm256_permute2f128_ps(low, high, 0x31);
}

#endif
