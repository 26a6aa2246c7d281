/* cta.h - a CTA as all of its warps see it. */
#ifndef PK_CUDA_STEP_CTA_H
#define PK_CUDA_STEP_CTA_H

#include "cuda/step/step.h"

#ifdef PK_SM90A

enum { STEP_CONSUMING = STEP_CONSUMERS * 32, STEP_SENDING = STEP_SENDERS * 32 };
enum {
    STEP_FULL = 1,
    STEP_EMPTY = 3,
    STEP_ATTENDING = 5,
    STEP_ENDING = 6
}; /* named barriers; the first two are pairs */

/* Of two sets of sums, in turns: who waits for whom is the same for both sides. */
struct step_turns {
    int turn = 0;
    uint32_t uses = 0;
    __device__ void next() { turn ^= 1, uses++; }
    /* consumers */
    __device__ void wait_empty() const
    {
        __syncwarp();
        if (uses >= 2) sm90::named_sync(STEP_EMPTY + turn, STEP_CONSUMING + STEP_SENDING);
    }
    __device__ void give_full() const
    {
        __syncwarp();
        sm90::named_arrive(STEP_FULL + turn, STEP_CONSUMING + STEP_SENDING);
    }
    /* senders */
    __device__ void wait_full() const
    {
        __syncwarp();
        sm90::named_sync(STEP_FULL + turn, STEP_CONSUMING + STEP_SENDING);
    }
    __device__ void give_empty() const
    {
        __syncwarp();
        sm90::named_arrive(STEP_EMPTY + turn, STEP_CONSUMING + STEP_SENDING);
    }
};

/* What of attention is this CTA's, the same in all layers: keys of a row, for the query heads of a KV head. */
struct step_item {
    int is_here, row, kv_head, split;
    int begin, past_count, count; /* keys; of all of them the new one is the last */
    int has_new;

    __device__ step_item(const pk_step_params &params)
    {
        const pk_step_args &args = params.args;
        const int index = blockIdx.x / params.num_splits;
        is_here = index < args.num_rows * args.kv_heads, split = blockIdx.x % params.num_splits;
        row = is_here ? index / args.kv_heads : 0, kv_head = index % args.kv_heads;
        const uint32_t len = max(args.context_lens[row], 0), past = min(max(len, 1u) - 1, args.max_positions - 1u);
        has_new = len > 0 && split == params.num_splits - 1;
        begin = past * split / params.num_splits, past_count = past * (split + 1) / params.num_splits - begin;
        count = past_count + has_new;
    }
};

/* A CTA as all of its warps see it. */
struct step_cta {
    const pk_step_params &params;
    const pk_step_args &args;
    uint8_t *smem;
    const step_smem &at;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, cta = blockIdx.x;
    uint32_t epoch = 0; /* of the layer, which is never 0 in memory that was zeros */
    int layer = 0;

    __device__ step_cta(const pk_step_params &params, uint8_t *smem)
        : params(params), args(params.args), smem(smem), at(params.at)
    {
    }
    __device__ const pk_step_layer *table() const { return (const pk_step_layer *)(smem + at.table); }
    __device__ step_item &item() const { return *(step_item *)(smem + at.item); }
    __device__ float *sums(int turn) const
    {
        return (float *)(smem + at.sums) + turn * args.num_rows * STEP_CONSUMERS * STEP_SUMS;
    }
    __device__ float *squares(int turn) const
    {
        return (float *)(smem + at.squares) + turn * args.num_rows * STEP_CONSUMERS;
    }
    __device__ uint32_t *stash(int row, int line) const
    {
        return (uint32_t *)(smem + at.stash) +
               (row * ((args.hidden + STEP_COLUMNS - 1) / STEP_COLUMNS) + line) * (STEP_COLUMNS / 2) +
               warp * (STEP_OWN / 2) + lane;
    }
    /* Where x comes from: words of this warp's lines. */
    __device__ const uint64_t *source(int phase) const
    {
        const pk_step_words &words = params.words;
        if (phase == STEP_O) return words.attention;
        if (phase == STEP_DOWN) return words.gated;
        return words.x[phase != STEP_GATE_UP];
    }
};

__device__ __forceinline__ float2 step_pair(uint32_t bits)
{
    return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}

#endif  // PK_SM90A
#endif
