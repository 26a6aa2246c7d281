/* linear_draw.h - the warps of sample_linear.cu that draw.
 *
 * While a tile is multiplied, they bound the variates of the next one and draw the patches of the last one. At the end
 * one CTA writes the tokens.
 */
#ifndef PK_CUDA_SAMPLE_LINEAR_DRAW_H
#define PK_CUDA_SAMPLE_LINEAR_DRAW_H

#include "cuda/sample/sample_linear.h"

#ifdef PK_SM90A

template <int N>
struct pk_drawer {
    static constexpr int DRAWERS = pk_drawing<N>::DRAWERS, PATCHES = pk_drawing<N>::PATCHES;
    const pk_sample_linear_params &params;
    pk_drawing<N> &shared;
    pk_sample_bounds<N> &bounds;
    const int thread, lane = threadIdx.x % 32, num_rows = (int)params.args.sample.num_rows,
                      vocab_size = (int)params.args.sample.vocab_size;

    __device__ static void sync() { sm90::named_sync(2, DRAWERS); }
    __device__ pk_sample_row asked(int row) const
    {
        const auto &drawn = shared.rows[row];
        pk_sample_row asked = {};
        asked.temperature = drawn.temperature, asked.position = drawn.position;
        asked.seed_low = drawn.seed_low, asked.seed_high = drawn.seed_high;
        asked.first_token = (uint32_t)params.args.sample.first_token;
        return asked;
    }
    __device__ void read_rows() const
    {
        for (int row = thread; row < N; row += DRAWERS) {
            pk_sample_row asked = {};
            if (row < num_rows) asked = pk_sample_row_of(&params.args.sample, row);
            shared.rows[row] = {0, 0x80000000u, 0, 0};
            shared.bars[row] = asked.is_valid ? -FLT_MAX : INFINITY;
            if (asked.is_valid) shared.rows[row] = {asked.temperature, asked.position, asked.seed_low, asked.seed_high};
        }
        sync();
    }
    /* The bounds of a tile's variates. */
    __device__ void bound(int tile, int turn) const
    {
#pragma unroll 1
        for (int i = thread; i < SL_BLOCKS / 4 * N; i += DRAWERS) { /* a call of Philox has 4 words */
            const int row = i % N, call = i / N;
            const pk_sample_row asked = this->asked(row);
            pk_words words = {};
            if (asked.temperature > 0) words = pk_philox(&asked, tile * (SL_BLOCKS / 4) + call, 0);
            for (int j = 0; j < 4; j++)
                bounds[turn][call * 4 + j][row] =
                    asked.temperature > 0 ? pk_sample_bound(asked.temperature, words.word[j]) : 0;
        }
        sm90::barrier_arrive(smem_address(&shared.bounds_full[turn]));
    }
    /* Raises the bars to the best keys that other CTAs have found. */
    __device__ void learn() const
    {
        constexpr int count = (N + DRAWERS - 1) / DRAWERS;
        pk_candidate best[count];
#pragma unroll
        for (int i = 0; i < count; i++) {
            const int row = thread + i * DRAWERS;
            best[i] = row < num_rows ? *(volatile pk_candidate *)params.best_of(row) : 0;
        }
#pragma unroll
        for (int i = 0; i < count; i++)
            if (thread + i * DRAWERS < num_rows) pk_raise_to(&shared.bars[thread + i * DRAWERS], best[i]);
    }

    /* Each lane has 4 tokens of one row of a patch; the four share a call of Philox. */
    __device__ int row_of(int patch) const { return patch % PATCHES * 8 + lane / 4; }
    __device__ int token_of(int tile, int patch) const
    {
        return (tile * SL_BLOCKS + patch / PATCHES) * PK_GUMBEL_BLOCK + lane % 4 * 4;
    }
    __device__ __forceinline__ void load(float (&x)[4], int tile, int patch) const
    {
        const int row = row_of(patch), token = token_of(tile, patch);
        for (int i = 0; i < 4; i++) {
            x[i] = -INFINITY;
            if (row < num_rows && token + i < vocab_size) x[i] = __ldcg(params.logit(row, token + i));
        }
    }
    __device__ __forceinline__ void draw(const float (&x)[4], int tile, int turn, int patch) const
    {
        const int row = row_of(patch), token = token_of(tile, patch);
        const float bound = bounds[turn][patch / PATCHES][row], bar = *(volatile float *)&shared.bars[row];
        bool may_win[4];
        for (int i = 0; i < 4; i++) may_win[i] = token + i < vocab_size && !(PK_ADD(x[i], bound) < bar);
        if (!__any_sync(~0u, may_win[0] || may_win[1] || may_win[2] || may_win[3])) return;
        const pk_sample_row asked = this->asked(row);
        const uint32_t block_word = pk_random_word(&asked, token / PK_GUMBEL_BLOCK, 0);
        const pk_words words = pk_philox(&asked, token / 4, 1);
        pk_candidate best = 0;
        for (int i = 0; i < 4; i++)
            if (may_win[i]) best = max(best, pk_draw(asked, x[i], token + i, block_word, words.word[i]));
        for (int offset = 1; offset < 4; offset *= 2) best = max(best, __shfl_xor_sync(~0u, best, offset));
        if (lane % 4 > 0 || !shared.is_valid(row) || best >> 32 < pk_ordered(bar)) return;
        atomicMax(params.best_of(row), (unsigned long long)best);
        pk_raise_to(&shared.bars[row], best);
    }
    __device__ void draw_patches(int tile, int turn) const
    {
        const int num_patches = shared.num_patches;
#pragma unroll 1
        for (int i = thread / 32 * SL_AT_ONCE; i < num_patches; i += DRAWERS / 32 * SL_AT_ONCE) {
            float x[SL_AT_ONCE][4];
#pragma unroll
            for (int j = 0; j < SL_AT_ONCE; j++) load(x[j], tile, shared.patches[min(i + j, num_patches - 1)]);
#pragma unroll
            for (int j = 0; j < SL_AT_ONCE; j++)
                if (i + j < num_patches) draw(x[j], tile, turn, shared.patches[i + j]);
        }
        sync(); /* before the bounds and the patches are written over */
        if (thread == 0) shared.num_patches = 0;
        sm90::barrier_arrive(smem_address(&shared.patches_empty));
    }
    /* The last CTA to arrive writes the tokens and clears the scratch memory. */
    __device__ void finish() const
    {
        __threadfence();
        sync();
        if (thread == 0) shared.is_last = atomicAdd(params.arrivals, 1u) == gridDim.x - 1;
        sync();
        if (!shared.is_last) return;
        __threadfence();
#pragma unroll 4
        for (int row = thread; row < num_rows; row += DRAWERS) {
            const pk_candidate best = __ldcg(params.best_of(row));
            *params.best_of(row) = 0;
            if (shared.is_valid(row))
                pk_take(params.args.sample, row, best, params.bad_id);
            else
                pk_refuse(params.args.sample, row, params.bad_id);
        }
        if (thread == 0) *params.arrivals = 0;
    }
    /* All the work of the warps that draw. */
    __device__ __forceinline__ void draw_all(int first_tile, int tile_stride) const
    {
        int turn = 0, round = 0; /* which of the two bounds is the tile's; how many tiles were before */
        read_rows();
        bound(first_tile, 0);
#pragma unroll 1
        for (int tile = first_tile; tile < params.num_tiles; tile += tile_stride, turn ^= 1, round++) {
            if (tile + tile_stride < params.num_tiles) bound(tile + tile_stride, turn ^ 1);
            sm90::barrier_wait(smem_address(&shared.patches_full), round & 1);
            learn();
            draw_patches(tile, turn);
        }
        finish();
    }
};

#endif  // PK_SM90A
#endif
