/* few_layer_plan.h - what each warp of few_layer.cu multiplies, and where the numbers lie: arithmetic that needs no GPU. */
#ifndef PK_CUDA_EXPERTS_FEW_LAYER_PLAN_H
#define PK_CUDA_EXPERTS_FEW_LAYER_PLAN_H

#include "cuda/divider.h"
#include "cuda/experts/experts.h"
#include "cuda/sm90.h"

enum {
    LAYER_TOKENS = 8, /* at most: columns of an instruction */
    LAYER_EXPERTS = 128,
    LAYER_CHOSEN = 8, /* of a token, at most */
    LAYER_DISTINCT = LAYER_TOKENS * LAYER_CHOSEN,
    LAYER_WARPS = 8,
    LAYER_THREADS = LAYER_WARPS * 32,
    LAYER_LINE = 64, /* inputs of a swizzled row of 128 bytes */
    LAYER_LINES = 4, /* of 16 rows of a weight: what a warp multiplies at once, a piece */
    LAYER_PIECE = LAYER_LINES * LAYER_LINE,
    LAYER_HIDDEN = LAYER_WARPS * LAYER_PIECE, /* inputs of x: a piece is each warp's, always the same one's */
    LAYER_LINE_BYTES = 16 * LAYER_LINE * 2,
    LAYER_PIECE_BYTES = LAYER_LINES * LAYER_LINE_BYTES,
    LAYER_SLOTS = 3, /* of a warp's ring */
    LAYER_AHEAD = 5, /* units that a CTA knows ahead: it claims the others, one while it multiplies the 5th before it */
    LAYER_CLAIMED = 8, /* places for them */
    LAYER_SMEM_BYTES = 1024 + LAYER_WARPS * LAYER_SLOTS * LAYER_PIECE_BYTES,
    LAYER_MOST_WIDTH = 4096, /* of an expert: act has room for it */
};

/* What CTAs tell each other, in words that say themselves that they are new: the tag of the launch above a number, or two. */
struct layer_words {
    uint64_t tag;       /* of the last launch */
    uint32_t claims[2]; /* of units, by launches with an even tag, and with an odd one: zero when one begins */
    uint64_t logits[LAYER_TOKENS][LAYER_EXPERTS];
    uint64_t act[LAYER_DISTINCT * LAYER_MOST_WIDTH / 2]; /* [token, its pair, width / 2] */
};
static_assert(sizeof(layer_words) <= PK_SCRATCH_COUNTERS * sizeof(uint32_t), "there is no more room");

struct layer_params {
    CUtensorMap up_map, down_map; /* inputs of a line, 8 rows, 2 of these, lines, all such sixteens of all experts */
    const void *x, *router;       /* [num_tokens, LAYER_HIDDEN], [num_experts, LAYER_HIDDEN] */
    void *out;
    int64_t x_stride, router_stride, out_stride;
    int32_t *experts; /* [num_tokens, num_chosen], for who looks at them */
    float *weights;   /* the same shape */
    int num_tokens, num_experts, num_chosen, width;
    int units, pieces; /* of an expert: sixteens of its gates and ups; of the inputs of down */
    divider of_units, of_pieces;
    bool normalizes, adds_to_out, is_early; /* the last: the router may be read before the kernel ahead has ended */
    layer_words *words;
};

/* What a warp multiplies at once: its own inputs of a unit, sixteen rows of an expert's gates and ups; or behind all units a
 * piece of the weights of the CTA's 16 outputs of down, every 8th one. */
struct layer_item {
    int rank, sixteen, line; /* of the experts that are used; of its rows; the first of its inputs' */
};
__device__ static inline layer_item layer_unit(const layer_params &params, int unit, int warp)
{
    const int rank = params.of_units.divide(unit);
    return {rank, unit - rank * params.units, warp * LAYER_LINES};
}
__device__ static inline layer_item layer_piece(const layer_params &params, int piece, int cta)
{
    const int rank = params.of_pieces.divide(piece);
    return {rank, cta, (piece - rank * params.pieces) * LAYER_LINES};
}

/* 16 bytes that a lane loads as an instruction's operand, p = 0 or 1 of a line: from which input of it on, and where they lie of
 * row lane / 4 (+ 8) of the 16, as the engine has swizzled them. */
__host__ __device__ static inline int layer_input(int quad, int p) { return quad * 16 + p * 8; }
__host__ __device__ static inline int layer_place(int group, int half, int quad, int p)
{
    return group * 128 + half * 1024 + ((quad * 2 + p) ^ group) * 16;
}
/* Where a warp leaves its sum of a row of the 16 by a token: the i-th of a lane at i * 32 + lane. */
__host__ __device__ static inline int layer_sum_at(int row, int token)
{
    return (row / 8 * 2 + token % 2) * 32 + row % 8 * 4 + token / 2;
}

#endif
