/* sample.h - what the two kernels of sampling share: a row's logits, draws, and the best of many candidates. */
#ifndef PK_CUDA_SAMPLE_H
#define PK_CUDA_SAMPLE_H

#include "cuda/cuda.h"
#include "sampling.h"

/* Leaves -1 and a record where a row's numbers are none. */
__device__ static inline bool pk_refuse_row(const pk_sample_args &args, int64_t i, const pk_sample_row &row,
                                            bool is_first, pk_cuda_bad_id *bad_id)
{
    if (row.is_valid) return false;
    if (!is_first) return true;
    bool is_position = args.positions[i] < 0, is_temperature = !(row.temperature >= 0 && row.temperature <= FLT_MAX);
    pk_record_bad_id(bad_id,
                     is_position      ? PK_BAD_POSITION
                     : is_temperature ? PK_BAD_TEMPERATURE
                                      : PK_BAD_SAMPLING_NUMBER,
                     i, is_position ? args.positions[i] : 0, INT32_MAX);
    args.out[i] = -1;
    return true;
}

__device__ static inline void pk_finish_row(const pk_sample_args &args, int64_t i, const pk_sample_row &row,
                                            const pk_candidate &best, pk_cuda_bad_id *bad_id)
{
    bool is_drawn = best.token >= 0 && best.x == best.x;
    args.out[i] = is_drawn ? best.token : -1;
    if (!is_drawn)
        pk_record_bad_id(bad_id, PK_BAD_LOGITS, i, 0, 0);
    else if (row.counts)
        row.counts[best.token] += 2;
}

__device__ static inline float pk_max_or_nan(float a, float b)
{
    float greatest;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(greatest) : "f"(a), "f"(b));
    return greatest;
}

/* Floats as integers of the same order, and back: for maxima of a warp and of a CTA. */
__device__ static inline int pk_to_order(float x)
{
    int bits = __float_as_int(x);
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}
__device__ static inline float pk_of_order(int order) { return __int_as_float(order < 0 ? order ^ 0x7fffffff : order); }

/* The greatest of a warp; NaN where there is one (a positive one, as max.NaN gives). */
__device__ static inline float pk_warp_max(float x) { return pk_of_order(__reduce_max_sync(~0u, pk_to_order(x))); }

/* One word of four, that no array of registers is indexed for. */
__device__ static inline uint32_t pk_word_of(const pk_sample_row &row, uint32_t i, uint32_t stream)
{
    pk_words words = pk_philox(&row, i / 4, stream);
    uint32_t low = i & 1 ? words.word[1] : words.word[0], high = i & 1 ? words.word[3] : words.word[2];
    return i & 2 ? high : low;
}

/* An upper bound of the variates of a block. 1e-4: more than the logarithms here and in pk_gumbel lose. */
__device__ static inline float pk_gumbel_bound(uint32_t block_word)
{
    return fmaf(-0.693147181f, __log2f((float)(block_word >> 5) + 0.5f), 22.1807098f + 1e-4f); /* log(32 * 2^27) */
}

/* The draws of one row by one thread. A key is rounded once, so what has a lower one cannot win. */
struct pk_draw {
    const pk_sample_row &row;
    pk_candidate best = pk_no_candidate();
    float bar = -FLT_MAX; /* no key below it can win */

    __device__ float key(float x, float g) const { return fmaf(row.temperature, g, x); }

    /* A block, by the 32 threads of a warp: each has the x of one token. */
    __device__ void consider(uint32_t token, float x, uint32_t block_word)
    {
        pk_candidate candidate = {x, 0, (int32_t)token};
        if (row.temperature > 0 && x < INFINITY)
            candidate.g = pk_gumbel(token, block_word, pk_word_of(row, token, PK_TOKEN_STREAM));
        if (x > -INFINITY && pk_beats(&candidate, &best, row.temperature)) best = candidate;
        bar = fmaxf(bar, pk_warp_max(x > -INFINITY ? key(x, candidate.g) : -INFINITY));
    }

    __device__ void take(const pk_candidate &other)
    {
        if (pk_beats(&other, &best, row.temperature)) best = other;
    }

    /* The best of the CTA, in all threads of the first warp. `warps` has room for one of each. */
    __device__ void merge_cta(pk_candidate *warps)
    {
        merge_warp();
        if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = best;
        __syncthreads();
        if (threadIdx.x >= 32) return;
        best = threadIdx.x < blockDim.x / 32 ? warps[threadIdx.x] : pk_no_candidate();
        merge_warp();
    }

    __device__ void merge_warp()
    {
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2)
            take({__shfl_xor_sync(~0u, best.x, offset), __shfl_xor_sync(~0u, best.g, offset),
                  __shfl_xor_sync(~0u, best.token, offset)});
    }
};

/* sample_filters.cu: the rows with penalties or filters, which sample_kernel leaves out. */
pk_status pk_cuda_sample_filtered(const pk_sample_args *args, const pk_cuda_device *device, pk_stream stream,
                                  pk_error *err);

#endif
