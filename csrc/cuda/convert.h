/* convert.h - device code: conversions between dtypes, 16-byte vectors, addresses. */
#ifndef PK_CUDA_CONVERT_H
#define PK_CUDA_CONVERT_H

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>
#include <stdint.h>

#include <type_traits>

__device__ static inline float pk_to_float(float x) { return x; }
__device__ static inline float pk_to_float(__half x) { return __half2float(x); }
__device__ static inline float pk_to_float(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ static inline float pk_to_float(__nv_fp8_e4m3 x) { return (float)x; }

template <typename T>
__device__ static inline T pk_from_float(float x)
{
    if constexpr (std::is_same_v<T, float>) return x;
    if constexpr (std::is_same_v<T, __half>) return __float2half_rn(x);
    if constexpr (std::is_same_v<T, __nv_bfloat16>) return __float2bfloat16_rn(x);
    if constexpr (std::is_same_v<T, __nv_fp8_e4m3>) { /* saturates at 448, NaN stays NaN */
        T y;
        y.__x = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3);
        return y;
    }
}

/* N elements that are loaded and stored by one instruction where N * sizeof(T) is 4, 8 or 16. */
template <typename T, int N>
struct alignas(sizeof(T) * N) pk_vec {
    T at[N];
};

__device__ static inline uint32_t smem_address(const void *pointer)
{
    return (uint32_t)__cvta_generic_to_shared(pointer);
}

/* The value that a tensor of type T would hold: where transformers' modules cast, so do ours. */
template <typename T>
__device__ static inline float pk_round(float x)
{
    return pk_to_float(pk_from_float<T>(x));
}

/* silu(gate) = gate / (1 + e^-gate). The fast exponential and division err by a few units in the 23rd bit: nothing
 * beside a half's rounding, but not good enough for float. */
template <typename T>
__device__ static inline float pk_silu(float x)
{
    if constexpr (sizeof(T) == 4) return x / (1.0f + expf(-x));
    return __fdividef(x, 1.0f + __expf(-x));
}

#endif
