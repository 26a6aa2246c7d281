/* sample.h - what the kernels of sampling share: a row of logits, and the best of many candidates. */
#ifndef PK_CUDA_SAMPLE_H
#define PK_CUDA_SAMPLE_H

#include "cuda/cuda.h"
#include "sampling.h"

/* A row of logits. With its penalties, where it has any; behind its end and below the threshold is -inf. */
template <typename T, bool HAS_OPTIONS = true>
struct pk_row_of_logits {
    const T *logits;
    uint32_t vocab_size;
    const pk_sample_row *penalties; /* or NULL */
    uint32_t threshold;             /* in pk_ordered's form */

    __device__ float processed(float x, uint32_t token) const
    {
        if (HAS_OPTIONS && penalties) x = pk_penalized(x, penalties->counts[token], penalties);
        return HAS_OPTIONS && pk_ordered(x) < threshold ? -INFINITY : x;
    }
    __device__ float at(uint32_t token) const
    {
        return token < vocab_size ? processed(pk_to_float(logits[token]), token) : -INFINITY;
    }
};

__device__ static inline pk_candidate pk_warp_best(pk_candidate best)
{
    uint32_t key = __reduce_max_sync(~0u, (uint32_t)(best >> 32));
    return (uint64_t)key << 32 | __reduce_max_sync(~0u, best >> 32 == key ? (uint32_t)best : 0);
}

/* The best of a CTA, in all threads of its first warp. `warps` has room for one of each. */
__device__ static inline pk_candidate pk_cta_best(pk_candidate best, pk_candidate *warps)
{
    best = pk_warp_best(best);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
    __syncthreads();
    return threadIdx.x < 32 ? pk_warp_best(threadIdx.x < blockDim.x / 32 ? warps[threadIdx.x] : 0) : best;
}

/* sample_filters.cu: of what the filters keep of row first_row + i, the lowest is thresholds[i], in pk_ordered's form.
 * Nothing is written for rows without filters. */
pk_status pk_cuda_find_thresholds(const pk_sample_args *args, int64_t first_row, int64_t num_rows, uint32_t *thresholds,
                                  const pk_cuda_device *device, pk_stream stream, pk_error *err);

#endif
