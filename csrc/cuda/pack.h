/* pack.h - 16 bytes of a float dtype as four registers, to and from float.
 *
 * An array of 16-bit elements tends to be kept one element a register; rows that wait in registers stay packed instead,
 * and are unpacked where they are used. Two halves convert in one instruction.
 */
#ifndef PK_CUDA_PACK_H
#define PK_CUDA_PACK_H

#include "cuda/cuda.h"

template <typename T>
struct pk_packed {
    static constexpr int COUNT = 16 / sizeof(T);
    uint4 bits;

    __device__ static pk_packed load(const T *from) { return {*(const uint4 *)from}; }
    /* What is read once and not soon again: leaves the L1 to weights and tables. */
    __device__ static pk_packed load_streaming(const T *from) { return {__ldcs((const uint4 *)from)}; }
    __device__ void store(T *to) const { *(uint4 *)to = bits; }

    __device__ void unpack(float x[COUNT]) const
    {
        const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (std::is_same_v<T, float>) {
                x[i] = __uint_as_float(words[i]);
            } else if constexpr (std::is_same_v<T, __half>) {
                float2 pair = __half22float2(*(const __half2 *)&words[i]);
                x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
            } else {
                x[2 * i] = __uint_as_float(words[i] << 16);
                x[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
            }
        }
    }
    __device__ static pk_packed pack(const float x[COUNT])
    {
        uint32_t words[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (std::is_same_v<T, float>) {
                words[i] = __float_as_uint(x[i]);
            } else if constexpr (std::is_same_v<T, __half>) {
                __half2 pair = __floats2half2_rn(x[2 * i], x[2 * i + 1]);
                words[i] = *(const uint32_t *)&pair;
            } else {
                __nv_bfloat162 pair = __floats2bfloat162_rn(x[2 * i], x[2 * i + 1]);
                words[i] = *(const uint32_t *)&pair;
            }
        }
        return {{words[0], words[1], words[2], words[3]}};
    }
    /* The products, rounded to T: of halves one instruction for two, and the same bits as the product in float rounded.
     */
    __device__ pk_packed operator*(const pk_packed &other) const
    {
        pk_packed product;
        const uint32_t a[4] = {bits.x, bits.y, bits.z, bits.w},
                       b[4] = {other.bits.x, other.bits.y, other.bits.z, other.bits.w};
        uint32_t *c[4] = {&product.bits.x, &product.bits.y, &product.bits.z, &product.bits.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            if constexpr (std::is_same_v<T, float>) {
                *c[i] = __float_as_uint(__uint_as_float(a[i]) * __uint_as_float(b[i]));
            } else {
                using pair = std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>;
                pair x = __hmul2(*(const pair *)&a[i], *(const pair *)&b[i]);
                *c[i] = *(const uint32_t *)&x;
            }
        }
        return product;
    }
};

#endif
