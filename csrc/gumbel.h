/* gumbel.h - what `sample` draws, defined once for every backend (C and CUDA include it).
 *
 * A row with temperature T > 0 takes the token v with the greatest
 *
 *     key(v) = (logits[v] - max(logits)) / T + g(v)          the lowest v where keys are equal
 *
 * which is distributed as softmax(logits / T) when the g(v) are independent Gumbel variates. They come from
 * Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011):
 *
 *     counter = (v / 4, position, 0, 0)     key = (low, high) 32 bits of the row's seed     x = word v % 4
 *     w = min(((x >> 1) + 0.5) * 2^-31, 1 - 2^-24)           uniform in (0, 1), fine-grained towards 0
 *     g = -log(-log(1 - w))                                  between -2.82 and 22.19
 *
 * so a token depends on its logits, temperature, seed and position only: not on the batch, on how the prompt was
 * chunked, on threads or on the backend. For that to hold to the last bit, everything here is a single IEEE operation
 * after another, with no fused multiply-add (C: -ffp-contract=off, which ISO C mode implies; CUDA: the _rn intrinsics).
 */
#ifndef PK_GUMBEL_H
#define PK_GUMBEL_H

#include <stdint.h>
#include <string.h>

#ifdef __CUDACC__
#define PK_GUMBEL_FN static __device__ __forceinline__
#define PK_MUL(a, b) __fmul_rn((a), (b))
#define PK_ADD(a, b) __fadd_rn((a), (b))
#define PK_DIV(a, b) __fdiv_rn((a), (b))
#define PK_FLOAT_OF(bits) __uint_as_float(bits)
#define PK_BITS_OF(value) __float_as_uint(value)
/* By name: of the multiplication of two widened numbers nvcc makes this and an addition of zero. */
static __device__ __forceinline__ uint64_t PK_MUL_WIDE(uint32_t a, uint32_t b)
{
    uint64_t product;
    asm("mul.wide.u32 %0, %1, %2;" : "=l"(product) : "r"(a), "r"(b));
    return product;
}
#else
#define PK_MUL_WIDE(a, b) ((uint64_t)(a) * (b))
#define PK_GUMBEL_FN static inline
#define PK_MUL(a, b) ((a) * (b))
#define PK_ADD(a, b) ((a) + (b))
#define PK_DIV(a, b) ((a) / (b))
static inline float PK_FLOAT_OF(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}
static inline uint32_t PK_BITS_OF(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}
#endif

/* No key exceeds its scaled logit by more than this, and the row's greatest logit loses no more than the other. */
#define PK_GUMBEL_MAX 22.2f
#define PK_GUMBEL_MIN (-2.9f)

#define PK_PHILOX_ROUNDS 10
#define PK_PHILOX_KEY0_STEP 0x9E3779B9u /* what each round adds to the key's words */
#define PK_PHILOX_KEY1_STEP 0xBB67AE85u

/* One round on the counter's four words; the words after the last round are the result. */
PK_GUMBEL_FN void pk_philox_round(uint32_t *c0, uint32_t *c1, uint32_t *c2, uint32_t *c3, uint32_t k0, uint32_t k1)
{
    uint64_t product0 = PK_MUL_WIDE(0xD2511F53u, *c0), product1 = PK_MUL_WIDE(0xCD9E8D57u, *c2);
    *c0 = (uint32_t)(product1 >> 32) ^ *c1 ^ k0;
    *c1 = (uint32_t)product1;
    *c2 = (uint32_t)(product0 >> 32) ^ *c3 ^ k1;
    *c3 = (uint32_t)product0;
}

/* Natural logarithm of a normal positive float to about 1 ulp. x = 2^e * m with m in [sqrt(1/2), sqrt(2)); the
 * polynomial and the split of log(2) are those of Cephes' logf (Moshier). */
PK_GUMBEL_FN float pk_log(float x)
{
    uint32_t bits = PK_BITS_OF(x) - 0x3f3504f3u;
    float e = (float)((int32_t)bits >> 23);
    float f = PK_ADD(PK_FLOAT_OF((bits & 0x007fffffu) + 0x3f3504f3u), -1.0f);
    float z = PK_MUL(f, f);
    float p = 7.0376836292e-2f;
    p = PK_ADD(PK_MUL(p, f), -1.1514610310e-1f);
    p = PK_ADD(PK_MUL(p, f), 1.1676998740e-1f);
    p = PK_ADD(PK_MUL(p, f), -1.2420140846e-1f);
    p = PK_ADD(PK_MUL(p, f), 1.4249322787e-1f);
    p = PK_ADD(PK_MUL(p, f), -1.6668057665e-1f);
    p = PK_ADD(PK_MUL(p, f), 2.0000714765e-1f);
    p = PK_ADD(PK_MUL(p, f), -2.4999993993e-1f);
    p = PK_ADD(PK_MUL(p, f), 3.3333331174e-1f);
    p = PK_MUL(PK_MUL(p, f), z);
    p = PK_ADD(p, PK_MUL(e, -2.12194440e-4f));
    p = PK_ADD(p, PK_MUL(z, -0.5f));
    return PK_ADD(PK_ADD(f, p), PK_MUL(e, 0.693359375f));
}

PK_GUMBEL_FN float pk_gumbel(uint32_t x)
{
    float w = PK_MUL(PK_ADD((float)(int32_t)(x >> 1), 0.5f), 0x1p-31f);
    w = w < 0x1.fffffep-1f ? w : 0x1.fffffep-1f;
    /* -log(1 - w) without the loss of 1 - w for small w: log(t) * w / (1 - t) with the rounded t. */
    float t = PK_ADD(1.0f, -w);
    float divisor = t < 1.0f ? PK_ADD(t, -1.0f) : 1.0f;
    float exponential = PK_DIV(PK_MUL(pk_log(t), w), divisor); /* no branch around it: C compilers vectorise this */
    return -pk_log(t < 1.0f ? exponential : w);
}

#endif
