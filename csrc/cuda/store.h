/* store.h - where a token's keys and values go in the cache, and how they are written there: shared by store_kvcache
 * and by what fuses the store into another kernel. */
#ifndef PK_CUDA_STORE_H
#define PK_CUDA_STORE_H

#include "cuda/cuda.h"

/* Elements from the start of the caches to the token's slot. */
struct pk_cache_row {
    int64_t k_at, v_at;
};

__device__ static inline int64_t pk_divide(int64_t a, int64_t b) /* both >= 0; in 64 bits it costs 100 instructions */
{
    return ((a | b) >> 31) == 0 ? (int64_t)((uint32_t)a / (uint32_t)b) : a / b;
}

__device__ static inline int64_t pk_load_slot(const pk_store_args &args, int64_t token)
{
    return args.slots_are_int64 ? ((const int64_t *)args.slot_mapping)[token]
                                : ((const int32_t *)args.slot_mapping)[token];
}

/* False where the token is not to be stored: its slot is negative, or out of range (pk_check_slot records that). */
__device__ static inline bool pk_find_cache_row(const pk_store_args &args, int64_t slot, pk_cache_row *row)
{
    if (slot < 0 || slot >= args.num_blocks * args.block_size) return false;
    int64_t block = pk_divide(slot, args.block_size), offset = slot - block * args.block_size;
    row->k_at = block * args.k_block_stride + offset * args.k_slot_stride;
    row->v_at = block * args.v_block_stride + offset * args.v_slot_stride;
    return true;
}

/* Apart from the rest, for the end of a kernel: a call in the middle costs the registers of what waits there. */
__device__ static inline void pk_check_slot(const pk_store_args &args, int64_t token, int64_t slot,
                                            pk_cuda_bad_id *bad_id)
{
    int64_t num_slots = args.num_blocks * args.block_size;
    if (slot >= num_slots) pk_record_bad_id(bad_id, PK_BAD_SLOT, token, slot, num_slots);
}

/* One vector of one head: copied, or x / scale rounded to fp8. */
template <typename T, typename Cache, int VEC>
__device__ static inline void pk_write_cache(Cache *to, const pk_vec<T, VEC> &x, const pk_scale_arg &scale, int head)
{
    if constexpr (sizeof(T) == sizeof(Cache)) {
        *(pk_vec<T, VEC> *)to = x;
    } else {
        float divisor = pk_scale_of(scale, 0, head);
        pk_vec<Cache, VEC> stored;
#pragma unroll
        for (int i = 0; i < VEC; i++) stored.at[i] = pk_from_float<Cache>(pk_to_float(x.at[i]) / divisor);
        *(pk_vec<Cache, VEC> *)to = stored;
    }
}

#endif
