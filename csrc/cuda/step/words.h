/* words.h - words in global memory that say themselves whether they are there: 4 bytes of data, 4 of epoch. */
#ifndef PK_CUDA_STEP_WORDS_H
#define PK_CUDA_STEP_WORDS_H

#include "cuda/step/ptx.h"
#include "cuda/step/step.h"

#ifdef PK_SM90A

/* A warp's patience. Once it has run out, or another CTA's has, nothing is waited for: the kernel goes on to its end with
 * whatever the words hold, so that all barriers inside the CTA are met, and the step counts as failed. */
struct step_waiter {
    const pk_step_params &params;
    bool has_given_up;

    __device__ step_waiter(const pk_step_params &params) : params(params), has_given_up(params.flags & STEP_NEVER_WAIT)
    {
    }
    /* After each look in vain. */
    __device__ __forceinline__ bool goes_on(uint32_t &looks, uint64_t &since, int what)
    {
        if ((++looks & 1023) != 0) return true;
        uint32_t *head = params.words.head;
        const uint64_t now = step_now(), limit_ns = params.flags & STEP_SHORT_WAIT ? 20000000 : 1000000000;
        if (since == 0) since = now;
        const bool is_over = now - since > limit_ns;
        if (is_over && threadIdx.x % 32 == 0 && atomicExch(&head[1], 1u) == 0) head[2] = what << 16 | blockIdx.x;
        has_given_up = __any_sync(~0u, is_over || *(volatile uint32_t *)&head[1] != 0);
        return !has_given_up;
    }
    /* By a whole warp: each lane has COUNT words, of which it wants those that `is_wanted` has a bit for; the others are 0. */
    template <int COUNT, typename Place>
    __device__ __forceinline__ void fetch(uint32_t (&data)[COUNT], uint32_t is_wanted, uint32_t epoch, int what,
                                          Place place)
    {
        uint64_t words[COUNT];
        uint32_t looks = 0;
        uint64_t since = 0;
        for (;;) {
            bool is_there = true;
#pragma unroll
            for (int i = 0; i < COUNT; i++)
                words[i] = is_wanted >> i & 1 ? step_load_word(place(i)) : (uint64_t)epoch << 32;
#pragma unroll
            for (int i = 0; i < COUNT; i++) is_there &= (uint32_t)(words[i] >> 32) == epoch;
            if (__all_sync(~0u, is_there) || has_given_up || !goes_on(looks, since, what)) break;
        }
#pragma unroll
        for (int i = 0; i < COUNT; i++) data[i] = (uint32_t)words[i];
    }
};

#endif  // PK_SM90A
#endif
