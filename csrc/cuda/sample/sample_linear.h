/* sample_linear.h - what sample_linear.cu does with its products: it finds those that may win.
 *
 * A warp's 16 rows of a product are a block of sampling.h; a patch is such a block by 8 rows of the batch. One word
 * bounds the 16 keys of a block. So a product plus this bound is only compared with a bar: the best key that any CTA
 * has found for the row so far. Next to none reach it. A patch that does is written to where its logits would have
 * been, and is drawn from there while the next tile is multiplied (linear_draw.h). In the first tile everything
 * would reach the bar, because no key is known yet. So before the CTAs look at that tile, they tell each other the
 * greatest key that is sure without a draw.
 */
#ifndef PK_CUDA_SAMPLE_LINEAR_H
#define PK_CUDA_SAMPLE_LINEAR_H

#include "cuda/sample/sample.h"
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
        return (float *)args.linear.epilogue.out + row * args.linear.epilogue.out_stride + token;
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
/* The most that a row's variates add to its keys: of two tiles, by block. */
template <int N>
using pk_sample_bounds = float[2][SL_BLOCKS][N];

#ifdef PK_SM90A

/* A bound's last bits say whether it is nearly reached (SURE), and at which place of its block. */
enum { SL_PLACE = PK_GUMBEL_BLOCK - 1, SL_SURE = PK_GUMBEL_BLOCK, SL_FLAGS = SL_PLACE | SL_SURE };
static constexpr float SL_LEAST = -2.9f;   /* of all variates */
static constexpr float SL_SURELY = 0.985f; /* E(w) < 1.069 w below 1/8, and bounds are 4.8 at least there */

__device__ static inline float pk_sample_bound(float temperature, uint32_t word)
{
    uint32_t bits = __float_as_uint(temperature * pk_gumbel_bound(word));
    uint32_t flags = word < 1u << 29 ? SL_SURE | pk_gumbel_place(word) : 0;
    return __uint_as_float(((bits + SL_FLAGS) & ~SL_FLAGS) | flags);
}

/* *bar = max(*bar, key), while other threads do the same. */
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

// --- the warps that multiply

/* A warp's products of a tile, as wgmma leaves them. Of patch j a lane has two rows, 8 j + column and the next, and two
 * tokens, `first` and first + 8. */
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
    /* Before the first look. The key of the token with its block's greatest variate is nearly known; the others have a
     * lower limit. */
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
    /* Finds the patches that may win and leaves them for the draw. */
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

#endif  // PK_SM90A
#endif
