/* sample_linear.h - what sample_linear.cu does with its products: says which of them may win, and draws those.
 *
 * A warp's 16 rows of a product are a block of sampling.h, a patch is such a block by 8 rows of the batch. One word
 * bounds the 16 keys, so a product is nothing but compared: with the best key that any CTA has found for the row so
 * far, less the bound. Next to none reach it. The patches that do reach it go to where their logits would have been,
 * and are drawn from there while the next tile is multiplied. Everything in the first tile would reach it, because no
 * key is known yet; so before they look at that tile, the CTAs tell each other the greatest key that is sure without a
 * draw.
 */
#ifndef PK_CUDA_SAMPLE_LINEAR_H
#define PK_CUDA_SAMPLE_LINEAR_H

#include "cuda/sample.h"
#include "ops/sample_linear.h"

enum {
    SL_GROUPS = 2 /* warpgroups that multiply */,
    SL_LOOKERS = SL_GROUPS * 128 /* their threads */,
    SL_TOKENS = SL_GROUPS * 64 /* of a tile */,
    SL_BLOCKS = SL_TOKENS / PK_GUMBEL_BLOCK,
    SL_AT_ONCE = 2 /* patches that a warp loads */,
    SL_ROW_PITCH = 4 /* of the rows' candidates in global memory: they lie in sectors of their own */,
};

struct pk_sample_linear_params {
    CUtensorMap weight_map, x_map; /* [tokens or rows, in_features] */
    pk_sample_linear_args args;
    int num_tiles, num_steps, num_stages, x_bytes; /* of a stage's rows that are copied */
    pk_candidate *best;                            /* [num_rows * SL_ROW_PITCH], zeros before and after */
    unsigned int *arrivals;                        /* of CTAs, the same */
    pk_cuda_bad_id *bad_id;

    __device__ unsigned long long *best_of(int row) const { return (unsigned long long *)best + row * SL_ROW_PITCH; }
    __device__ float *logit(int row, int token) const
    {
        return (float *)args.linear.out + row * args.linear.out_stride + token;
    }
};

/* Of a CTA, for N rows. Registers limit how many warps draw beside those that multiply. */
template <int N>
struct pk_drawing {
    static constexpr int DRAWERS = N > 192 ? 96 : 224, PATCHES = N / 8 /* of a block */;
    struct drawn_row {
        float temperature;
        uint32_t position, seed_low, seed_high;
    };
    uint64_t bounds_full[2], patches_full, patches_empty; /* mbarriers, at which all threads arrive */
    int num_patches;
    bool is_last; /* CTA of the grid */
    alignas(16) drawn_row rows[N];
    alignas(8) float bars[N]; /* what is below cannot win */
    uint16_t patches[SL_BLOCKS * PATCHES];

    __device__ bool is_valid(int row) const { return (int32_t)rows[row].position >= 0; }
};
/* What a row's variates add to its keys at most: of two tiles, by block. */
template <int N>
using pk_sample_bounds = float[2][SL_BLOCKS][N];

#ifdef PK_SM90A

/* A bound's last bits say where it is nearly reached, if it is (SURE): the place in its block. */
enum { SL_PLACE = PK_GUMBEL_BLOCK - 1, SL_SURE = PK_GUMBEL_BLOCK, SL_FLAGS = SL_PLACE | SL_SURE };
static constexpr float SL_LEAST = -2.9f;   /* of all variates */
static constexpr float SL_SURELY = 0.985f; /* E(w) < 1.069 w below 1/8, and bounds are 4.8 at least there */

__device__ static inline float pk_sample_bound(float temperature, uint32_t word)
{
    uint32_t bits = __float_as_uint(temperature * pk_gumbel_bound(word));
    uint32_t flags = word < 1u << 29 ? SL_SURE | pk_gumbel_place(word) : 0;
    return __uint_as_float(((bits + SL_FLAGS) & ~SL_FLAGS) | flags);
}

/* *bar = max(*bar, key), which others do, too. */
__device__ static inline void pk_raise(float *bar, float key)
{
    if (!(key > *(volatile float *)bar)) return;
    if (key >= 0)
        atomicMax((int *)bar, __float_as_int(key));
    else
        atomicMin((unsigned int *)bar, __float_as_uint(key));
}
__device__ static inline void pk_raise_to(float *bar, pk_candidate best)
{
    if (best > 0) pk_raise(bar, pk_is_drawn(best) ? pk_from_ordered(best >> 32) : INFINITY);
}

__device__ static inline float2 pk_read_pair(const float *from)
{
    float2 pair;
    asm volatile("ld.volatile.shared.v2.f32 {%0, %1}, [%2];" : "=f"(pair.x), "=f"(pair.y) : "r"(smem_address(from)));
    return pair;
}

// --- those who multiply

/* A warp's products of a tile, as wgmma leaves them: of patch j a lane has the rows 8 j + column and the next, of the
 * token `first` and that 8 further. */
template <int N>
struct pk_sample_look {
    const pk_sample_linear_params &params;
    pk_drawing<N> &shared;
    const float (&acc)[N / 2];
    const float *bounds;
    int block, column, first;

    __device__ pk_sample_look(const pk_sample_linear_params &params, pk_drawing<N> &shared,
                              const pk_sample_bounds<N> &bounds, int tile, int turn, const float (&acc)[N / 2])
        : params(params), shared(shared), acc(acc)
    {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        block = warp, column = lane % 4 * 2;
        first = tile * SL_TOKENS + block * PK_GUMBEL_BLOCK + lane / 4;
        this->bounds = &bounds[turn][block][column];
    }
    /* Before the first look: of a token with the greatest variate of its block the key is nearly known; of all others,
     * that it is no less than so. */
    __device__ __forceinline__ void raise_bars() const
    {
        const int lane = threadIdx.x % 32;
#pragma unroll
        for (int j = 0; j < N / 8; j++)
            for (int e = 0; e < 2; e++) {
                const float bound = bounds[j * 8 + e], temperature = shared.rows[j * 8 + column + e].temperature;
                const uint32_t flags = __float_as_uint(bound);
                float sure = -FLT_MAX;
                for (int k = 0; k < 2; k++) {
                    if (first + k * 8 >= params.args.sample.vocab_size) continue;
                    const bool is_place = flags & SL_SURE && (flags & SL_PLACE) == (uint32_t)(k * 8 + lane / 4);
                    sure = fmaxf(sure,
                                 PK_ADD(acc[j * 4 + k * 2 + e], is_place ? bound * SL_SURELY : temperature * SL_LEAST));
                }
                pk_raise(&shared.bars[j * 8 + column + e], sure);
            }
        sm90::named_sync(1, SL_LOOKERS);
        const int row = threadIdx.x;
        if (row < N && shared.is_valid(row)) {
            const float bar = *(volatile float *)&shared.bars[row];
            pk_candidate sure = bar > -FLT_MAX ? pk_candidate_of(bar, ~0u) : 0; /* of no token */
            pk_candidate known = atomicMax(params.best_of(row), (unsigned long long)sure);
            if (N > 64) { /* where what the others know saves more than waiting for it costs */
                __nanosleep(500);
                known = max(known, *(volatile pk_candidate *)params.best_of(row));
            }
            pk_raise_to(&shared.bars[row], known);
        }
        sm90::named_sync(1, SL_LOOKERS);
    }
    /* The patches that may win. */
    __device__ __forceinline__ void look() const
    {
        const int lane = threadIdx.x % 32;
        uint32_t hits = 0; /* a bit a patch */
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            const float2 bound = *(const float2 *)&bounds[j * 8], bar = pk_read_pair(&shared.bars[j * 8 + column]);
            const float *const x = &acc[j * 4];
            const bool may_win = !(PK_ADD(pk_max_or_nan(x[0], x[2]), bound.x) < bar.x) ||
                                 !(PK_ADD(pk_max_or_nan(x[1], x[3]), bound.y) < bar.y);
            hits |= (uint32_t)may_win << j;
        }
        hits = __reduce_or_sync(~0u, hits);
        if (hits == 0) return;
#pragma unroll
        for (int j = 0; j < N / 8; j++) {
            if (!(hits >> j & 1)) continue;
            for (int e = 0; e < 4; e++) {
                const int row = j * 8 + column + e % 2, token = first + e / 2 * 8;
                if (row < params.args.sample.num_rows && token < params.args.sample.vocab_size)
                    __stcg(params.logit(row, token), acc[j * 4 + e]);
            }
        }
        int at = 0;
        if (lane == 0) at = atomicAdd(&shared.num_patches, __popc(hits));
        at = __shfl_sync(~0u, at, 0) + __popc(hits & ((1u << lane) - 1));
        if (hits >> lane & 1) shared.patches[at] = (uint16_t)(block * pk_drawing<N>::PATCHES + lane);
    }
};

// --- those who draw

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
    /* What other CTAs have found. */
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

    /* A lane has 4 tokens of a row of a patch, which share a call of Philox. */
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
    /* The last CTA writes the tokens, and clears what is in scratch memory. */
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
};

#endif  // PK_SM90A
#endif
