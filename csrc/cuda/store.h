/* store.h - where a token's keys and values go in the cache, and how they are written there: shared by store_kvcache
 * and by what fuses the store into another kernel. */
#ifndef PK_CUDA_STORE_H
#define PK_CUDA_STORE_H

#include "cuda/pack.h"
#include "ops/store.h"

__device__ static inline int64_t pk_load_slot(const pk_store_args &args, int64_t token)
{
    return pk_id_at(args.slot_mapping, args.slots_are_int64, token);
}

/* Whether anything is stored there: a negative slot is padding, one out of range pk_check_slot records. */
__device__ static inline bool pk_is_slot(const pk_store_args &args, int64_t slot)
{
    return slot >= 0 && slot < args.num_blocks * args.block_size;
}

/* Elements from the start of a cache to a slot. Where a block's size is a power of two a shift
 * replaces the division, which costs 100 instructions. */
__device__ static inline int64_t pk_cache_offset(const pk_store_args &args, int64_t slot, int64_t block_stride,
                                                 int64_t slot_stride)
{
    int64_t size = args.block_size, block = (size & (size - 1)) == 0 ? slot >> (__ffsll(size) - 1) : slot / size;
    return block * block_stride + (slot - block * size) * slot_stride;
}

/* Apart from the rest, for the end of a kernel: a call in the middle costs the registers of what waits there. */
__device__ static inline void pk_check_slot(const pk_store_args &args, int64_t token, int64_t slot,
                                            pk_cuda_bad_id *bad_id)
{
    int64_t num_slots = args.num_blocks * args.block_size;
    if (slot >= num_slots) pk_record_bad_id(bad_id, PK_BAD_SLOT, token, slot, num_slots);
}

/* Divides by a head's scale: the quotient by the reciprocal, and one step that makes its rounding right (Markstein).
 * Three instructions where a division takes nine and a branch, and a store is nothing but divisions. */
struct pk_cache_divisor {
    float scale, inverse;

    __device__ pk_cache_divisor(const pk_scale_arg &arg, bool is_used, int head)
    {
        scale = is_used ? pk_scale_of(arg, 0, head) : 1;
        inverse = __frcp_rn(scale);
        if (inverse > 3.4e38f) inverse = 3.4e38f; /* of a denormal: 0 must stay 0 */
    }
    __device__ float divide(float x) const
    {
        float quotient = x * inverse, exact = fmaf(fmaf(-quotient, scale, x), inverse, quotient);
        return fabsf(quotient) < 1024 ? exact : quotient; /* far beyond fp8, and an infinity has no remainder */
    }
};

/* One piece of one head, `count` elements where it is not aligned: copied, or x / scale rounded to fp8. */
template <bool IS_ALIGNED, typename T, typename Cache>
__device__ static inline void pk_write_cache(Cache *to, const pk_packed<T> &x, int count,
                                             const pk_cache_divisor &divisor)
{
    if constexpr (sizeof(T) == sizeof(Cache)) {
        x.template store<IS_ALIGNED>(to, count);
    } else {
        constexpr int VEC = pk_packed<T>::COUNT;
        float values[VEC];
        x.unpack(values);
        pk_vec<__nv_fp8x2_storage_t, VEC / 2> stored; /* two in one instruction; saturates at 448, NaN stays NaN */
        for (int i = 0; i < VEC; i += 2)
            stored.at[i / 2] = __nv_cvt_float2_to_fp8x2(
                make_float2(divisor.divide(values[i]), divisor.divide(values[i + 1])), __NV_SATFINITE, __NV_E4M3);
        if constexpr (IS_ALIGNED) {
            *(decltype(stored) *)to = stored;
        } else {
            for (int i = 0; i < VEC; i++)
                if (i < count) to[i] = ((const Cache *)&stored)[i];
        }
    }
}

/* Whether pieces of `vec` elements are whole and aligned in both caches. */
static inline bool pk_caches_take(const pk_store_args *args, int64_t vec)
{
    return pk_are_multiples((size_t)vec, args->k_strides.block, args->k_strides.slot, args->k_strides.head,
                            args->v_strides.block, args->v_strides.slot, args->v_strides.head) &&
           pk_are_multiples((size_t)vec * pk_dtype_bytes(args->cache_dtype), args->k_cache, args->v_cache);
}

#endif
