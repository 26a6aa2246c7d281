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

#elif defined(__AVX2__) && defined(__FMA__) && defined(__F16C__)
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

#else /* generic: the compiler makes of it what the machine has (SSE2, NEON) */
#define VW 4
typedef float vf __attribute__((vector_size(16)));
PK_INLINE vf vf_set1(float x) { return (vf){x, x, x, x}; }
PK_INLINE vf vf_load(const float *p)
{
    vf x;
    memcpy(&x, p, sizeof x);
    return x;
}
PK_INLINE void vf_store(float *p, vf x) { memcpy(p, &x, sizeof x); }
PK_INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
PK_INLINE vf vf_max(vf a, vf b) /* b where one is NaN, as on x86 */
{
    for (int i = 0; i < VW; i++) b[i] = a[i] > b[i] ? a[i] : b[i];
    return b;
}
PK_INLINE vf vf_abs(vf x)
{
    for (int i = 0; i < VW; i++) x[i] = fabsf(x[i]);
    return x;
}
PK_INLINE vf vf_div(vf a, vf b) { return a / b; }
PK_INLINE vf vf_round(vf x) /* |x| < 2^22 */
{
    const vf magic = vf_set1(0x1.8p23f);
    return (x + magic) - magic;
}
PK_INLINE vf vf_scale_or_zero(vf x, vf n, vf below, float limit)
{
    for (int i = 0; i < VW; i++)
        x[i] = below[i] < limit ? 0.0f : x[i] * pk_bits_to_f32((uint32_t)((int32_t)n[i] + 127) << 23);
    return x;
}
PK_INLINE vf vf_load_as(const void *p, pk_dtype dtype)
{
    const uint16_t *halves = p;
    const uint8_t *bytes = p;
    switch (dtype) {
        case PK_BF16:
            return (vf){pk_bf16_to_f32(halves[0]), pk_bf16_to_f32(halves[1]), pk_bf16_to_f32(halves[2]),
                        pk_bf16_to_f32(halves[3])};
        case PK_F16:
            return (vf){pk_f16_to_f32(halves[0]), pk_f16_to_f32(halves[1]), pk_f16_to_f32(halves[2]),
                        pk_f16_to_f32(halves[3])};
        case PK_F8E4M3:
            return (vf){pk_f8e4m3_to_f32(bytes[0]), pk_f8e4m3_to_f32(bytes[1]), pk_f8e4m3_to_f32(bytes[2]),
                        pk_f8e4m3_to_f32(bytes[3])};
        default:
            return vf_load(p);
    }
}
PK_INLINE void vf_transpose(vf rows[4])
{
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < i; j++) {
            float swapped = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = swapped;
        }
}
PK_INLINE vf vf_sums(vf x[4])
{
    vf_transpose(x);
    return (x[0] + x[1]) + (x[2] + x[3]);
}
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
