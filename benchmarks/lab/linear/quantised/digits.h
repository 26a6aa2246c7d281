/* digits.h - int4 by the matrix unit's integers: one or two rows of x as three signed digits of 8 bits each, in columns of
 * their own. Two instructions make the four operands of 16 values (a mask for the lower nibbles, one for the upper ones,
 * whose sums are 16 times as much), so 1,024 weights take half the instructions of float16. Sums are exact; x is rounded to
 * 2^-23 of the largest of a row's 128.
 */
#ifndef LAB_DIGITS_H
#define LAB_DIGITS_H

#include "formats.h"

struct w4_digits : w4<true, false, false> {
    static constexpr bool IS_DIGITS = true;
};

/* Columns are (a group of GPC, a row, one of 4 digits, the last of which is 0). Of a group and row the lanes of 4 digits make
 * all digits of a piece of 8 inputs each, and get those of their own digit through shared memory. */
template <int LG, int GPC>
struct digits_of_x {
    static constexpr int SETS = LG / GPC, ROWS = 2 / GPC, SCRATCH = 2 * 3 * 4 * 32; /* of a warp, bytes */
    uint32_t x[SETS][8];                                                            /* [piece][half]: 4 inputs */
    uint4 raw[SETS];
    float factor[SETS]; /* of the lower one of the lane's two digits, for sums of 16 times the values */
    int sums[SETS][2];  /* -8 times those of the inputs' digits, of the lane's columns */

    __device__ __forceinline__ static const __nv_bfloat16 *place(const __nv_bfloat16 *from, int stride, int num_rows,
                                                                 int g, int q)
    {
        return from + min(g / 4 % ROWS, num_rows - 1) * stride + g / 4 / ROWS * GROUP + g % 4 * 32 + q * 8;
    }
    __device__ __forceinline__ void load(const __nv_bfloat16 *at, int, int, int line, int)
    {
        for (int s = 0; s < SETS; s++) raw[s] = load_16(at + (uint32_t)(line * LG * GROUP) + s * GPC * GROUP);
    }
    __device__ __forceinline__ void take(const digits_of_x &other)
    {
        for (int s = 0; s < SETS; s++) raw[s] = other.raw[s];
    }
    /* A digit of four inputs, in the order of int4's bytes. */
    __device__ __forceinline__ static uint32_t digit(const uint32_t *fixed, int digit)
    {
        const int of_two = digit | (digit + 4) << 4;
        const uint32_t low = __byte_perm(fixed[0], fixed[1], of_two), high = __byte_perm(fixed[2], fixed[3], of_two);
        return __byte_perm(low, high, 0x5140) ^ 0x80808080;
    }
    __device__ __forceinline__ void make_ready(int q, void *scratch)
    {
        const int g = threadIdx.x % 32 / 4;
        float largest[SETS];
        for (int s = 0; s < SETS; s++) {
            const __nv_bfloat162 *two = (const __nv_bfloat162 *)&raw[s];
            __nv_bfloat162 most = __habs2(two[0]);
            for (int i = 1; i < 4; i++) most = __hmax2(most, __habs2(two[i]));
            largest[s] = fmaxf(__low2float(most), __high2float(most));
        }
        for (int distance = 1; distance < 16; distance *= 2) /* sets side by side: their ways take long */
            for (int s = 0; s < SETS; s++) largest[s] = fmaxf(largest[s], __shfl_xor_sync(~0u, largest[s], distance));
        uint32_t fixed[SETS][8]; /* from 1.5 2^23 on the last bits are the integer; digits of it and 128 */
        for (int s = 0; s < SETS; s++) {
            const uint32_t *two = (const uint32_t *)&raw[s];
            const int exponent = min(max((int)(__float_as_uint(largest[s]) >> 23), 30), 254);
            const float scale = __uint_as_float((uint32_t)(275 - exponent) << 23); /* below 2^22 */
            const float its = __uint_as_float((uint32_t)(exponent - 25) << 23);    /* a 16th of 1 / scale */
            factor[s] = __shfl_sync(~0u, its, q * 2 * 4) * (q % 2 ? 65536 : 1);
            for (int i = 0; i < 8; i++) {
                const float value = __uint_as_float(i % 2 ? two[i / 2] & 0xffff0000u : two[i / 2] << 16);
                fixed[s][i] = __float_as_uint(fmaf(value, scale, 12582912.f)) + 0x00408080;
            }
        }
        uint32_t *to = (uint32_t *)scratch + g / 4 * 96 + q * 8 + g % 4 * 2;
        const uint32_t *from = (const uint32_t *)scratch + g / 4 * 96 + g % 4 % 3 * 32 + q * 8;
        const uint32_t mask = g % 4 == 3 ? 0 : 0xffffffff;
        for (int s = 0; s < SETS; s++) {
            for (int i = 0; i < 3; i++) *(uint2 *)(to + i * 32) = {digit(fixed[s], i), digit(fixed[s] + 4, i)};
            __syncwarp();
            const uint4 all[2] = {*(const uint4 *)from, *(const uint4 *)(from + 4)};
            __syncwarp(); /* before the next set's */
            for (int i = 0; i < 8; i++) x[s][i] = ((const uint32_t *)all)[i] & mask;
        }
        for (int s = 0; s < SETS; s++) {
            int c[2][4] = {};
            const uint32_t ones[4] = {0x01010101, 0x01010101, 0x01010101, 0x01010101};
            for (int i = 0; i < 4; i++) mma_digits(c[i % 2], ones, x[s][i * 2], x[s][i * 2 + 1], c[i % 2]);
            for (int i = 0; i < 2; i++) sums[s][i] = -8 * (c[0][i] + c[1][i]);
        }
    }
};

/* A unit, by its part of x's line: total[0] of row g, total[1] of row g + 8. */
template <int LG, int GPC, int U>
__device__ __forceinline__ void multiply_digits(float (&total)[4], const uint4 (&w)[4],
                                                const tail<w4_digits::WORDS<GPC>> &its, const digits_of_x<LG, GPC> &x,
                                                int q)
{
    int of_group[2][4];
    for (int group = 0; group < 2; group++) {
        const int set = (U * 2 + group) / GPC;
        int low[4], high[4];
        for (int b = 0; b < 2; b++) { /* 64 inputs: two pieces */
            const uint4 &words = w[group * 2 + b];
            const uint32_t *all = (const uint32_t *)&words;
            uint32_t a[4], upper[4];
            for (int i = 0; i < 4; i++) a[i] = all[i] & 0x0f0f0f0f, upper[i] = all[i] & 0xf0f0f0f0;
            const uint32_t *of_x = x.x[set] + b * 4;
            if (b == 0) {
                const int first = x.sums[set][0], second = x.sums[set][1];
                mma_digits(low, a, of_x[0], of_x[1], {first, second, first, second});
                mma_digits(high, upper, of_x[2], of_x[3], {0, 0, 0, 0});
            } else {
                mma_digits(low, a, of_x[0], of_x[1], low);
                mma_digits(high, upper, of_x[2], of_x[3], high);
            }
        }
        for (int i = 0; i < 4; i++) of_group[group][i] = low[i] * 16 + high[i];
    }
    for (int n = 0; n < 2 / GPC; n++) { /* a lane has columns of one group of a set */
        const int group = GPC == 2 ? q / 2 : n, set = (U * 2 + n) / GPC;
        const float2 scale = w4_digits::scale_of<GPC>(its, n);
        for (int h = 0; h < 2; h++) {
            const int first = group ? of_group[1][h * 2] : of_group[0][h * 2];
            const int second = group ? of_group[1][h * 2 + 1] : of_group[0][h * 2 + 1];
            total[h] += (h ? scale.y : scale.x) * (x.factor[set] * fmaf((float)second, 256, (float)first));
        }
    }
}

/* Sums over the lanes of a row of x. */
template <int GPC, int ROW_FLOATS>
__device__ __forceinline__ void leave_digits(const float (&total)[4], float *to, int g, int q, bool is_first)
{
    constexpr int FIRST = GPC == 2 ? 2 : 1;
    const bool upper = q & FIRST;
    float sum = (upper ? total[1] : total[0]) + __shfl_xor_sync(~0u, upper ? total[0] : total[1], FIRST);
    if (GPC == 2) sum += __shfl_xor_sync(~0u, sum, 1);
    float *at = to + (GPC == 2 ? 0 : q / 2) * ROW_FLOATS + (upper ? 8 : 0) + g;
    if (GPC == 1 || q % 2 == 0) *at = is_first ? sum : *at + sum;
}

#endif
