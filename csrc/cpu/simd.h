/* simd.h - one vector of floats, `vf` with VW lanes, three ways: AVX-512, AVX2, or the compiler's generic vectors.
 *
 * A kernel is written once over these few operations and compiled once per instruction set (setup.py gives *_avx2.c and
 * *_avx512.c their flags). `+ - *` work on vf as they are. Everything here is static: two files that include this
 * share no symbol, so no code for a newer machine can end up in a path that an older one runs.
 */
#ifndef PK_CPU_SIMD_H
#define PK_CPU_SIMD_H

#include "pk.h"
#include "bits.h"

#include <math.h>

#define PK_INLINE static inline __attribute__((always_inline))

/* CALL(dtype) with the dtype as a constant: the compiler makes a loop of its own for each. */
#define PK_WITH_DTYPE(dtype, CALL) \
    switch (dtype) {               \
        case PK_BF16:              \
            CALL(PK_BF16);         \
            break;                 \
        case PK_F16:               \
            CALL(PK_F16);          \
            break;                 \
        case PK_F8E4M3:            \
            CALL(PK_F8E4M3);       \
            break;                 \
        default:                   \
            CALL(PK_F32);          \
    }

#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__)
#include "cpu/simd_avx512.h"
#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
#include "cpu/simd_avx2.h"
#else
#include "cpu/simd_generic.h"
#endif

#if VW >= 8
PK_INLINE __m256 pk_f8_to_vf8(__m128i bytes) /* the low 8 bytes; see vf_load_as of AVX-512 for the bits */
{
    __m128i x = _mm_cvtepu8_epi16(bytes);
    __m128i magnitude = _mm_and_si128(x, _mm_set1_epi16(0x7f));
    __m128i is_nan = _mm_cmpeq_epi16(magnitude, _mm_set1_epi16(0x7f));
    __m128i half = _mm_or_si128(_mm_slli_epi16(magnitude, 7), _mm_slli_epi16(_mm_sub_epi16(x, magnitude), 8));
    half = _mm_or_si128(half, _mm_and_si128(is_nan, _mm_set1_epi16(0x7e00)));
    return _mm256_mul_ps(_mm256_cvtph_ps(half), _mm256_set1_ps(256.0f));
}
#endif

PK_INLINE float vf_sum(vf x)
{
    float lanes[VW], sum = 0;
    vf_store(lanes, x);
    for (int i = 0; i < VW; i++) sum += lanes[i];
    return sum;
}

PK_INLINE float vf_max_lane(vf x)
{
    float lanes[VW], max = -INFINITY;
    vf_store(lanes, x);
    for (int i = 0; i < VW; i++) max = lanes[i] > max ? lanes[i] : max;
    return max;
}

/* e^x for x <= 88, to 2 units in the last place (the polynomial is that of the Cephes library's expf); 0 below -87,
 * where the result would be subnormal. NaN stays NaN. */
PK_INLINE vf vf_exp(vf x)
{
    const float lowest = -87.0f;
    vf clamped = vf_max(vf_set1(lowest), x);
    vf n = vf_round(clamped * vf_set1(0x1.715476p0f)); /* log2(e) */
    vf r = vf_fma(n, vf_set1(-0x1.63p-1f), clamped);   /* ln(2), high part: exact products */
    r = vf_fma(n, vf_set1(0x1.bd0106p-13f), r);        /* and the rest of it */
    vf p = vf_set1(1.9875691500e-4f);
    p = vf_fma(p, r, vf_set1(1.3981999507e-3f));
    p = vf_fma(p, r, vf_set1(8.3334519073e-3f));
    p = vf_fma(p, r, vf_set1(4.1665795894e-2f));
    p = vf_fma(p, r, vf_set1(1.6666665459e-1f));
    p = vf_fma(p, r, vf_set1(5.0000001201e-1f));
    p = vf_fma(p * r, r, r + vf_set1(1.0f));
    return vf_scale_or_zero(p, n, x, lowest);
}

/* tanh(x) = 1 - 2 / (e^2x + 1) has an absolute error below 2e-7. Near 0 it is the series, to a few units in the last
 * place: a large soft cap multiplies whatever it is wrong by. */
PK_INLINE vf vf_tanh(vf x)
{
    const float near = 0.25f, beyond = 0x1.000002p-2f;                       /* neighbours */
    vf limited = vf_set1(0.0f) - vf_max(vf_set1(-20.0f), vf_set1(0.0f) - x); /* e^40 is far from overflow */
    vf far = vf_set1(1.0f) - vf_div(vf_set1(2.0f), vf_exp(limited + limited) + vf_set1(1.0f));
    vf z = x * x, series = vf_set1(2.1869488e-2f);
    series = vf_fma(series, z, vf_set1(-5.3968254e-2f));
    series = vf_fma(series, z, vf_set1(1.3333333e-1f));
    series = vf_fma(series, z, vf_set1(-3.3333333e-1f));
    series = vf_fma(series * z, x, x);
    vf size = vf_abs(x), zero = vf_set1(0.0f);
    return vf_scale_or_zero(series, zero, zero - size, -near) + vf_scale_or_zero(far, zero, size, beyond);
}

#endif
