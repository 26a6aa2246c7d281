/* few_decode.h - the arithmetic by which kernels for few rows multiply a weight in float8 or int4 as it lies, of one
 * weight and of experts: fragments of mma_16816, 16 rows of the weight by EIGHTS times 8 rows of x. */
#ifndef PK_CUDA_LINEAR_FEW_DECODE_H
#define PK_CUDA_LINEAR_FEW_DECODE_H

#include "cuda/mma.h"
#include "cuda/pack.h"
#include "ops/linear.h"

/* e4m3 becomes float16 by an instruction for two, and so do the inputs: each line of a row of bfloat16 is first multiplied
 * by a power of two, so that its largest number lies below 2^15, and its sums are divided by it. Bits are lost of what is
 * 2^-31 of the largest, and less. A line is 32 inputs of each of four threads. */

/* The exponent of the largest number of a thread's four pieces, of those of the threads beside it, too. */
__device__ static __forceinline__ int few_exponent_of(const uint4 (&bits)[4])
{
    __nv_bfloat162 most = {};
    for (int i = 0; i < 16; i++) most = __hmax2(most, __habs2(((const __nv_bfloat162 *)bits)[i]));
    const float2 two = pk_to_floats(most);
    float largest = fmaxf(two.x, two.y);
    for (int distance = 1; distance < 4; distance *= 2)
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
    return min(max((int)(__float_as_uint(largest) >> 23), 15), 254);
}

/* A row's line, in place; unscale: what the sums of rows 2 * quad (+ 1) are to be multiplied by. */
template <typename T>
__device__ static __forceinline__ void few_line_to_f16(uint4 (&bits)[4], float (&unscale)[2], int quad)
{
    unscale[0] = unscale[1] = 1;
    if constexpr (std::is_same_v<T, __nv_bfloat16>) {
        const int exponent = few_exponent_of(bits);
        const float scale = __uint_as_float((uint32_t)(268 - exponent) << 23); /* 2^14 over the power below it */
        for (int i = 0; i < 16; i++) {
            const float2 two = pk_to_floats(((const __nv_bfloat162 *)bits)[i]);
            ((uint32_t *)bits)[i] = pk_pack_pair<__half>(two.x * scale, two.y * scale);
        }
        const float its_unscale = __uint_as_float((uint32_t)(exponent - 14) << 23);
        for (int i = 0; i < 2; i++) unscale[i] = __shfl_sync(~0u, its_unscale, (quad * 2 + i) * 4);
    }
}

/* A piece of 16 inputs of two rows of the weight, by the same ones of x, `x_of(i, e)` the i-th half of them. */
template <int EIGHTS, typename X>
__device__ static __forceinline__ void few_multiply_fp8(float (&sums)[EIGHTS][4], const uint4 &low, const uint4 &high,
                                                        X x_of)
{
    for (int i = 0; i < 4; i++) {
        const uint2 a = fp8_to_f16(((const uint32_t *)&low)[i]), b = fp8_to_f16(((const uint32_t *)&high)[i]);
        for (int e = 0; e < EIGHTS; e++)
            mma_16816<__half>(sums[e], {a.x, b.x, a.y, b.y}, ((const uint2 *)&x_of(i / 2, e))[i % 2]);
    }
}

/* A value of int4 becomes the last bits of a number, by one instruction for two. In bfloat16 that number is 128, which is
 * taken off the sums with the zero, times the sum of the inputs. In float16 it is 1,024, or 64 for bits that lie higher, and
 * is taken off at once: sums with it, or with denormals (the last bits of 0), lose the places of it. */
template <typename T>
struct few_int4_numbers {
    static constexpr bool IS_F16 = std::is_same_v<T, __half>;
    static constexpr int OFFSET = IS_F16 ? 0 : 128;
    static constexpr uint32_t LOW = IS_F16 ? 0x64006400 : 0x43004300, HIGH = 0x54005400,
                              ONES = IS_F16 ? 0x3c003c00 : 0x3f803f80;

    /* In a register, for pair_of. */
    __device__ static __forceinline__ uint32_t low_bits()
    {
#ifdef __CUDA_ARCH__
        uint32_t bits;
        asm("mov.b32 %0, %1;" : "=r"(bits) : "n"(LOW));
        return bits;
#else
        return LOW;
#endif
    }
    __device__ static __forceinline__ uint32_t and_or(uint32_t word, uint32_t mask, uint32_t more)
    {
#ifdef __CUDA_ARCH__
        uint32_t pair;
        asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(pair) : "r"(word), "r"(mask), "r"(more)); /* (a & b) | c */
        return pair;
#else
        return (word & mask) | more;
#endif
    }
    /* The i-th pair of a word's eight values, more by the offset. */
    __device__ static __forceinline__ uint32_t pair_of(uint32_t word, int i, uint32_t low)
    {
        if constexpr (IS_F16) {
            const uint32_t more = i % 2 ? HIGH : low, its = i < 2 ? word : word >> 8,
                           pair = i % 2 ? and_or(its, 0x00f000f0, more) : and_or(its, 0x000f000f, more);
            const __half2 values = __hsub2(*(const __half2 *)&pair, *(const __half2 *)&more);
            return *(const uint32_t *)&values;
        } else {
            return and_or(word >> 4 * i, 0x000f000f, low);
        }
    }
    /* The scale of a row's block, and its zero with the offset. */
    __device__ static __forceinline__ float2 scale_of(pk_dtype dtype, uint16_t bits, int zero)
    {
        const float of_f16 = __half2float(__ushort_as_half(bits)), of_bf16 = __uint_as_float((uint32_t)bits << 16);
        return {dtype == PK_F16 ? of_f16 : of_bf16, (float)(zero + OFFSET)};
    }
    __device__ static __forceinline__ float2 load_scale(const pk_weight &weight, int64_t scale_at, int64_t zero_at)
    {
        return scale_of(weight.scales_dtype, ((const uint16_t *)weight.scales)[scale_at],
                        weight.zeros ? weight.zeros[zero_at] : PK_INT4_ZERO);
    }
    /* The sums of 8 inputs of each row, in all columns. */
    __device__ static __forceinline__ void add_inputs(float (&sums)[4], const uint4 &x)
    {
        mma_16816<T>(sums, {ONES, ONES, ONES, ONES}, {x.x, x.y});
        mma_16816<T>(sums, {ONES, ONES, ONES, ONES}, {x.z, x.w});
    }
    /* A word of two rows of the weight, by the same 8 inputs of x: one or two chains of instructions. */
    template <int EIGHTS, int CHAINS>
    __device__ static __forceinline__ void multiply(float (&sums)[CHAINS][EIGHTS][4], uint32_t low, uint32_t high,
                                                    uint32_t low_bits, const uint4 (&x)[EIGHTS])
    {
        for (int k = 0; k < 2; k++) {
            const uint32_t a[4] = {pair_of(low, k * 2, low_bits), pair_of(high, k * 2, low_bits),
                                   pair_of(low, k * 2 + 1, low_bits), pair_of(high, k * 2 + 1, low_bits)};
            for (int e = 0; e < EIGHTS; e++) mma_16816<T>(sums[k % CHAINS][e], a, ((const uint2 *)&x[e])[k]);
        }
    }
};

#endif
