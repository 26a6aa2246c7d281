/* formats.h - what a lane does with 64 bytes of values and the tail of a unit (layout.h): fragments and scales; and x. */
#ifndef LAB_FORMATS_H
#define LAB_FORMATS_H

#include "layout.h"
#include "ptx.h"

/* What a lane has of a unit's tail: a scale word for each of its groups (one where a lane has sums of one only), and a
 * word of zeros. */
template <int WORDS>
struct tail {
    uint32_t scales[WORDS], zeros;
};

/* int4. Numbers in float16 are the integer times 2^-24 (or 16 times that: then x is a 16th), so one instruction makes two
 * of them and there is one shift a word; in bfloat16 they are 128 and more, a shift each but the first. The zero is taken
 * off every pair of numbers (SUBTRACTS: exact, half an instruction more a number pair and no sums of x), or off the sums. */
template <bool IS_F16_, bool HAS_ZEROS_, bool SUBTRACTS_>
struct w4 : int4_layout {
    static constexpr bool IS_F16 = IS_F16_, HAS_ZEROS = HAS_ZEROS_, SUBTRACTS = SUBTRACTS_, IS_INT4 = true,
                          IS_DIGITS = false;
    using number = std::conditional_t<IS_F16, __half2, __nv_bfloat162>;
    static constexpr int UNIT = unit_bytes(HAS_ZEROS), OFFSET = IS_F16 ? 0 : 128;
    static constexpr float UNIT_VALUE = IS_F16 ? 0x1p24f : 1;
    static constexpr int SIXTEENTH = IS_F16 ? 4 : 0; /* less of the exponent of every second piece */
    template <int GPC>
    static constexpr int WORDS = GPC == 1 ? 2 : 1;
    template <int GPC>
    __device__ static __forceinline__ int scales_at(int g, int q) /* in the tail, bytes */
    {
        return scale_at(g, GPC == 1 ? 0 : columns<GPC>::group_of_sums(q) % 2) * 2;
    }
    __device__ static __forceinline__ int zeros_at(int g) { return TAIL_ZEROS + g * 4; }

    /* Zeros as pairs of numbers, of rows g and g + 8, as they lie in a[0], a[1] and in a[2], a[3]. */
    struct zeros {
        uint32_t pairs[4];
    };
    __device__ static __forceinline__ zeros zeros_of(uint32_t bytes, int group)
    {
        zeros to = {};
        for (int h = 0; h < 2; h++) {
            const uint32_t two = HAS_ZEROS ? __byte_perm(bytes, 0, 0x4040 + (group * 2 + h) * 0x0101) : 0x00080008;
            to.pairs[h] = IS_F16 ? two : two | 0x43004300, to.pairs[h + 2] = IS_F16 ? two << 4 : to.pairs[h];
        }
        return to;
    }
    __device__ static __forceinline__ void fragment(uint32_t (&a)[4], const uint4 (&w)[4], int group, int step,
                                                    const zeros &zeros)
    {
        const uint32_t *both = (const uint32_t *)&w[group * 2 + step / 4] + step / 2 % 2 * 2; /* rows g, g + 8 */
        for (int h = 0; h < 2; h++) {
            const uint32_t word = step % 2 ? both[h] >> 8 : both[h];
            a[h] = IS_F16 ? word & 0x000f000f : and_or(word, 0x000f000f, 0x43004300);
            a[h + 2] = IS_F16 ? word & 0x00f000f0 : and_or(both[h] >> (step % 2 * 8 + 4), 0x000f000f, 0x43004300);
        }
        for (int i = 0; SUBTRACTS && i < 4; i++) {
            const number less = __hsub2(*(const number *)&a[i], *(const number *)&zeros.pairs[i]);
            a[i] = *(const uint32_t *)&less;
        }
    }
    __device__ static __forceinline__ uint32_t one(int i)
    {
        return !IS_F16 ? 0x3f803f80 : i < 2 ? 0x00010001 : 0x00100010;
    }
    template <int GPC>
    __device__ static __forceinline__ float2 scale_of(const tail<WORDS<GPC>> &its, int group)
    {
        return __half22float2(*(const __half2 *)&its.scales[GPC == 1 ? group : 0]);
    }
    __device__ static __forceinline__ float2 zero_of(uint32_t zeros, int group)
    {
        const uint32_t two = zeros >> 16 * group;
        return {(float)(two & 255), (float)(two >> 8 & 255)};
    }
};

/* e4m3: one instruction converts two. */
struct w8 : fp8_layout {
    static constexpr bool IS_F16 = true, HAS_ZEROS = false, SUBTRACTS = false, IS_INT4 = false, IS_DIGITS = false;
    static constexpr int UNIT = unit_bytes(false), SIXTEENTH = 0;
    static constexpr float UNIT_VALUE = 1;
    template <int GPC>
    static constexpr int WORDS = 1;
    template <int GPC>
    __device__ static __forceinline__ int scales_at(int, int)
    {
        return 0;
    }
    __device__ static __forceinline__ int zeros_at(int) { return 0; }
    struct zeros {
    };
    __device__ static __forceinline__ zeros zeros_of(uint32_t, int) { return {}; }
    __device__ static __forceinline__ void fragment(uint32_t (&a)[4], const uint4 (&w)[4], int, int step, zeros)
    {
        const uint32_t *words = (const uint32_t *)&w[step / 2] + step % 2 * 2;
        for (int h = 0; h < 2; h++) fp8_to_f16(words[h], a[h], a[h + 2]);
    }
    template <int GPC>
    __device__ static __forceinline__ float2 scale_of(const tail<1> &its, int)
    {
        const float scale = __uint_as_float(its.scales[0]);
        return {scale, scale};
    }
};

/* A line of x as the second operand: [set of GPC groups][eight rows][step][2], of one lane; what sums of the lane's columns
 * are to be multiplied by; and for int4 the sums of the inputs of its columns, in units of the values, times -8 where there
 * are no zeros. */
template <class F, int LG, int GPC, int EIGHTS>
struct line_of_x {
    static constexpr int SETS = LG / GPC, SCRATCH = 0;
    uint32_t x[SETS][EIGHTS][16];
    float unscale[EIGHTS][2], sums[SETS][EIGHTS][2]; /* the last only where they are needed */

    /* Of a lane's columns in line 0. Columns of rows that x does not have are those of the last one: nobody reads their sums. */
    __device__ __forceinline__ static const __nv_bfloat16 *place(const __nv_bfloat16 *from, int stride, int num_rows,
                                                                 int g, int q)
    {
        return from + min(columns<GPC>::row_of_x(g), num_rows - 1) * stride + columns<GPC>::group_of_x(g) * GROUP +
               q * 8;
    }
    __device__ __forceinline__ void load(const __nv_bfloat16 *at, int stride, int num_rows, int line, int g)
    {
        for (int e = 0; e < EIGHTS; e++) {
            const int further = e == 0 ? 0 : min(g + e * 8, num_rows - 1) - min(g, num_rows - 1);
            const __nv_bfloat16 *from = at + (uint32_t)(line * LG * GROUP + further * stride);
            for (int i = 0; i < SETS * 4; i++) {
                const uint4 bits = load_16(from + i / 4 * GPC * GROUP + i % 4 * 32);
                for (int k = 0; k < 4; k++) x[i / 4][e][i % 4 * 4 + k] = ((const uint32_t *)&bits)[k];
            }
        }
    }
    __device__ __forceinline__ void take(const line_of_x &other)
    {
        for (int i = 0; i < SETS * EIGHTS * 16; i++)
            x[i / 16 / EIGHTS][i / 16 % EIGHTS][i % 16] = other.x[i / 16 / EIGHTS][i / 16 % EIGHTS][i % 16];
    }
    /* To float16, times a power of two of each column. */
    __device__ __forceinline__ void convert(int e, int q)
    {
        __nv_bfloat162 most = {};
        for (int i = 0; i < SETS * 16; i++)
            most = __hmax2(most, __habs2(*(const __nv_bfloat162 *)&x[i / 16][e][i % 16]));
        float largest = fmaxf(__low2float(most), __high2float(most));
        for (int distance = 1; distance < 4; distance *= 2)
            largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
        const int exponent = min(max((int)(__float_as_uint(largest) >> 23), 30), 254);
        const uint32_t scale = (uint32_t)(268 - exponent) << 7, less = scale - (F::SIXTEENTH << 7);
        const uint32_t scales[2] = {scale | scale << 16, less | less << 16};
        for (int s = 0; s < SETS; s++)
            for (int i = 0; i < 16; i++) {
                const __nv_bfloat162 scaled =
                    __hmul2(*(const __nv_bfloat162 *)&x[s][e][i], *(const __nv_bfloat162 *)&scales[i / 4 % 2]);
                const uint32_t bits = *(const uint32_t *)&scaled;
                const __half2 two = __floats2half2_rn(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
                x[s][e][i] = *(const uint32_t *)&two;
            }
        const float its = __uint_as_float((uint32_t)(exponent - 14) << 23);
        for (int i = 0; i < 2; i++) unscale[e][i] = __shfl_sync(~0u, its, (q * 2 + i) * 4) * F::UNIT_VALUE;
    }
    __device__ __forceinline__ void add_up(int s, int e)
    {
        constexpr int CHAINS = SETS * EIGHTS == 1 ? 4 : 2;
        const uint32_t ones[4] = {F::one(0), F::one(1), F::one(2), F::one(3)};
        float c[CHAINS][4] = {};
        for (int step = 0; step < STEPS; step++) {
            float(&its)[4] = c[step % CHAINS];
            mma<F::IS_F16>(its, ones, x[s][e][F::pair_at(step, false)], x[s][e][F::pair_at(step, true)], its);
        }
        for (int i = 0; i < 2; i++) {
            sums[s][e][i] = 0;
            for (int k = 0; k < CHAINS; k++) sums[s][e][i] += c[k][i];
            sums[s][e][i] *= F::HAS_ZEROS ? -1.f : -8.f - F::OFFSET;
        }
    }
    __device__ __forceinline__ void make_ready(int q, void *)
    {
        for (int e = 0; e < EIGHTS; e++) {
            if constexpr (F::IS_F16)
                convert(e, q);
            else
                unscale[e][0] = unscale[e][1] = 1;
        }
        if constexpr (F::IS_INT4 && !F::SUBTRACTS)
            for (int i = 0; i < SETS * EIGHTS; i++) add_up(i / EIGHTS, i % EIGHTS);
    }
};

#endif
