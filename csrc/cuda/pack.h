/* pack.h - 16 bytes of a float dtype as four registers, to and from float; sums over a row.
 *
 * An array of 16-bit elements tends to be kept one element a register; rows that wait in registers stay packed instead,
 * and are unpacked where they are used. Two halves are converted, and multiplied, by one instruction.
 */
#ifndef PK_CUDA_PACK_H
#define PK_CUDA_PACK_H

#include "cuda/cuda.h"
#include "ops/dense.h"

/* The line of 128 bytes at `pointer`, which need not be readable. */
__device__ static inline void pk_prefetch_to_l2(const void *pointer)
{
    asm volatile("prefetch.global.L2 [%0];" ::"l"(pointer));
}

__device__ static inline float2 pk_to_floats(__half2 x) { return __half22float2(x); }
__device__ static inline float2 pk_to_floats(__nv_bfloat162 x) /* by fewer instructions than __bfloat1622float2 */
{
    uint32_t bits = *(uint32_t *)&x;
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

/* Four e4m3 as four fp16: the lower two in x, the upper two in y. */
__device__ static inline uint2 fp8_to_f16(uint32_t four)
{
    uint2 to;
#if __CUDA_ARCH__ >= 890 /* where a register's halves are operands, and no shift is needed */
    asm("{\n.reg .b16 low, high;\nmov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high;\n}"
        : "=r"(to.x), "=r"(to.y)
        : "r"(four));
#else
    __half2_raw low = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)four, __NV_E4M3);
    __half2_raw high = __nv_cvt_fp8x2_to_halfraw2((__nv_fp8x2_storage_t)(four >> 16), __NV_E4M3);
    to = {(uint32_t)low.x | (uint32_t)low.y << 16, (uint32_t)high.x | (uint32_t)high.y << 16};
#endif
    return to;
}

/* 16 bytes from global to shared memory, all of them or the first few and zeros. */
__device__ static inline void copy_async_16(uint32_t to, const void *from, int bytes)
{
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
/* The same of what is read only once: `policy` is evict_first_policy(), and L2 keeps what others left in it. */
__device__ static inline void copy_async_16(uint32_t to, const void *from, int bytes, uint64_t policy)
{
    asm volatile("cp.async.cg.shared.global.L2::cache_hint.L2::128B [%0], [%1], 16, %2, %3;" ::"r"(to), "l"(from),
                 "r"(bytes), "l"(policy)
                 : "memory");
}
__device__ static inline uint64_t evict_first_policy()
{
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0;" : "=l"(policy));
    return policy;
}
__device__ static inline void copy_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int PENDING>
__device__ static inline void copy_async_wait()
{
    asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

/* Two floats as two neighbours of 16 bits, by one instruction. */
template <typename T>
__device__ static inline uint32_t pk_pack_pair(float low, float high)
{
    std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162> pair;
    if constexpr (std::is_same_v<T, __half>)
        pair = __floats2half2_rn(low, high);
    else
        pair = __floats2bfloat162_rn(low, high);
    return *(uint32_t *)&pair;
}

/* The same for a number that is known at run time, up to 5. */
__device__ static inline void copy_async_wait(int pending)
{
    switch (pending) {
        case 1:
            return copy_async_wait<1>();
        case 2:
            return copy_async_wait<2>();
        case 3:
            return copy_async_wait<3>();
        case 4:
            return copy_async_wait<4>();
        case 5:
            return copy_async_wait<5>();
        default:
            return copy_async_wait<0>();
    }
}

template <typename T>
struct pk_packed {
    static constexpr int COUNT = 16 / sizeof(T);
    using word = std::conditional_t<std::is_same_v<T, float>, float,
                                    std::conditional_t<std::is_same_v<T, __half>, __half2, __nv_bfloat162>>;
    uint4 bits;

    __device__ word &operator[](int i) { return ((word *)&bits)[i]; }
    __device__ const word &operator[](int i) const { return ((const word *)&bits)[i]; }

    /* Where it may not be aligned: the first `count` elements one by one, the others are 0. */
    template <bool IS_ALIGNED = true>
    __device__ static pk_packed load(const T *from, int64_t count = COUNT)
    {
        if constexpr (IS_ALIGNED) {
            return {*(const uint4 *)from};
        } else {
            pk_packed x = {};
            for (int i = 0; i < COUNT; i++)
                if (i < count) ((T *)&x)[i] = from[i];
            return x;
        }
    }
    template <bool IS_ALIGNED = true>
    __device__ void store(T *to, int64_t count = COUNT) const
    {
        if constexpr (IS_ALIGNED) {
            *(uint4 *)to = bits;
        } else {
            for (int i = 0; i < COUNT; i++)
                if (i < count) to[i] = ((const T *)this)[i];
        }
    }

    __device__ void unpack(float x[COUNT]) const
    {
        for (int i = 0; i < 4; i++) {
            if constexpr (std::is_same_v<T, float>) {
                x[i] = (*this)[i];
            } else {
                float2 pair = pk_to_floats((*this)[i]);
                x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
            }
        }
    }
    __device__ static pk_packed pack(const float x[COUNT])
    {
        pk_packed packed;
        for (int i = 0; i < 4; i++) {
            if constexpr (std::is_same_v<T, float>)
                packed[i] = x[i];
            else
                ((uint32_t *)&packed)[i] = pk_pack_pair<T>(x[2 * i], x[2 * i + 1]);
        }
        return packed;
    }
    /* The products, rounded to T: the same bits as the product in float rounded. */
    __device__ pk_packed operator*(const pk_packed &other) const
    {
        pk_packed product;
        for (int i = 0; i < 4; i++) product[i] = (*this)[i] * other[i];
        return product;
    }
};

/* The number of which it is pk_ordered. */
__device__ static inline float pk_from_ordered(uint32_t key)
{
    return __uint_as_float(key >> 31 ? key & 0x7fffffff : ~key);
}

__device__ static inline float exp2_fast(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The sum of the values of a warp's threads, the same bits in all of them. */
__device__ static inline float pk_sum_over_warp(float value)
{
    for (int offset = 16; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}
/* The sum of the values of a row's threads, the same bits in all of them: a warp's, or those of a CTA of up to 16
 * warps.
 */
__device__ static inline float pk_sum_over(int num_threads, int thread, float value)
{
    __shared__ float warp_sums[16];
    value = pk_sum_over_warp(value);
    if (num_threads == 32) return value;
    if (thread % 32 == 0) warp_sums[thread / 32] = value;
    __syncthreads();
    value = thread % 16 < num_threads / 32 ? warp_sums[thread % 16] : 0;
    for (int offset = 8; offset > 0; offset /= 2) value += __shfl_xor_sync(~0u, value, offset);
    return value;
}

/* The squares of rms.x's row, and what the rows beside it are multiplied by. They are read where the product that made x
 * left them, and else taken from x. A CTA's threads leave their sums in shared memory, and all of them add those up after
 * a barrier; in between there is time for other loads. The sum is always formed in the order of 128 threads, whatever the
 * CTA has, so a row's factor has the same bits everywhere. */
enum { PK_SQUARE_WARPS = 4 };

template <typename T, bool IS_ALIGNED>
__device__ static inline void pk_leave_squares(float *sums, const pk_rms_arg &rms, int64_t row, int num_threads,
                                               int thread)
{
    constexpr int VEC = pk_packed<T>::COUNT, THREADS = PK_SQUARE_WARPS * 32;
    const T *x = (const T *)rms.x + row * rms.stride;
    if (!rms.x) return;
    for (int stand_in = thread; stand_in < THREADS; stand_in += num_threads) { /* by whole warps */
        float sum = 0, values[VEC];
        if (rms.squares) {
            for (int64_t at = stand_in; at < rms.num_squares; at += THREADS)
                sum += rms.squares[row * rms.num_squares + at];
        }
#pragma unroll 4
        for (int64_t at = stand_in * VEC; at < rms.row_size && !rms.squares; at += THREADS * VEC) {
            pk_packed<T>::template load<IS_ALIGNED>(x + at, rms.row_size - at).unpack(values);
            for (int i = 0; i < VEC; i++) sum += values[i] * values[i];
        }
        sum = pk_sum_over(32, thread, sum);
        if (thread % 32 == 0) sums[stand_in / 32] = sum;
    }
}
__device__ static inline float pk_rms_scale(const float *sums, const pk_rms_arg &rms)
{
    if (!rms.x) return 1;
    __syncthreads();
    return rsqrtf((sums[0] + sums[1] + (sums[2] + sums[3])) / (float)rms.row_size + rms.eps);
}

#endif
