/* bits.h - one number of every float dtype to and from fp32. All fp32 arithmetic of the CPU backend enters and
 * leaves through these. Bits only, so that the loops around them vectorise on any machine and every instruction set
 * gives the same result. Rounding is to nearest, ties to even; NaN stays NaN. */
#ifndef PK_BITS_H
#define PK_BITS_H

#include <stdint.h>
#include <string.h>

static inline float pk_bits_to_f32(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

static inline uint32_t pk_f32_to_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

static inline float pk_bf16_to_f32(uint16_t half) { return pk_bits_to_f32((uint32_t)half << 16); }

static inline uint16_t pk_f32_to_bf16(float value)
{
    uint32_t bits = pk_f32_to_bits(value);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
    uint32_t quiet = (bits >> 16) | 0x40; /* a NaN whose payload lies in the dropped bits must not become inf */
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? quiet : rounded);
}

static inline float pk_f16_to_f32(uint16_t half)
{
    uint32_t magnitude = (uint32_t)(half & 0x7fff) << 13;
    /* Shifting the exponent's bias by a multiplication makes subnormals exact too. */
    uint32_t finite = pk_f32_to_bits(pk_bits_to_f32(magnitude) * 0x1p112f);
    uint32_t bits = magnitude >= 0x0f800000 ? magnitude | 0x7f800000 : finite;
    return pk_bits_to_f32(bits | (uint32_t)(half & 0x8000) << 16);
}

static inline uint16_t pk_f32_to_f16(float value)
{
    uint32_t bits = pk_f32_to_bits(value), sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
    /* Subnormals (below 2^-14): adding 0.5 leaves the value in the low bits, rounded by the addition itself. */
    uint32_t subnormal = pk_f32_to_bits(pk_bits_to_f32(magnitude) + 0.5f) - 0x3f000000;
    uint32_t normal = (magnitude - 0x38000000 + 0xfff + ((magnitude >> 13) & 1)) >> 13;
    uint32_t half = magnitude < 0x38800000 ? subnormal : normal;
    half = magnitude >= 0x477ff000 ? 0x7c00 : half; /* 65520 and above round to infinity */
    half = magnitude > 0x7f800000 ? 0x7e00 : half;
    return (uint16_t)(half | sign);
}

/* float8_e4m3fn: 4 exponent bits (bias 7), 3 mantissa bits, no infinity, 0x7f is NaN, largest 448. */
static inline float pk_f8e4m3_to_f32(uint8_t byte)
{
    uint32_t magnitude = (uint32_t)(byte & 0x7f) << 20;
    uint32_t finite = pk_f32_to_bits(pk_bits_to_f32(magnitude) * 0x1p120f);
    uint32_t bits = magnitude == 0x07f00000 ? 0x7fc00000 : finite;
    return pk_bits_to_f32(bits | (uint32_t)(byte & 0x80) << 24);
}

/* Saturates: what is beyond 448 (infinity too) becomes 448, as the GPU's conversion does. */
static inline uint8_t pk_f32_to_f8e4m3(float value)
{
    uint32_t bits = pk_f32_to_bits(value), sign = (bits >> 24) & 0x80, magnitude = bits & 0x7fffffff;
    /* Subnormals (below 2^-6) are multiples of 2^-9 = the last bit of a float near 2^14. */
    uint32_t subnormal = pk_f32_to_bits(pk_bits_to_f32(magnitude) + 0x1p14f) - 0x46800000;
    uint32_t normal = (magnitude - 0x3c000000 + 0x7ffff + ((magnitude >> 20) & 1)) >> 20;
    uint32_t byte = magnitude < 0x3c800000 ? subnormal : normal;
    byte = magnitude > 0x43e00000 ? 0x7e : byte;
    byte = magnitude > 0x7f800000 ? 0x7f : byte;
    return (uint8_t)(byte | sign);
}

#endif
