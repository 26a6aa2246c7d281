/* layer_plan.h - what each warp of layer.h multiplies, and where the numbers lie: plain functions, which layer_check.cpp checks. */
#ifndef LAYER_PLAN_H
#define LAYER_PLAN_H

#include <stdint.h>

#ifdef __CUDACC__
#define LAYER_BOTH __host__ __device__ __forceinline__ static
#else
#define LAYER_BOTH static inline
#endif

enum {
    LAYER_TOKENS = 8, /* at most: columns of an instruction */
    LAYER_WARPS = 8,
    LAYER_EXPERTS = 128,
    LAYER_CHOSEN = 8,
    LAYER_DISTINCT = LAYER_TOKENS * LAYER_CHOSEN,
    LAYER_LINE = 64,   /* inputs of a swizzled row of 128 bytes */
    LAYER_PIECE = 256, /* inputs of 16 rows of a weight: what a warp multiplies at once */
    LAYER_LINE_BYTES = 16 * LAYER_LINE * 2,
    LAYER_PIECE_BYTES = 16 * LAYER_PIECE * 2,
    LAYER_SLOTS = 3, /* of a warp's ring */
    LAYER_RING_BYTES = LAYER_WARPS * LAYER_SLOTS * LAYER_PIECE_BYTES,
    LAYER_MOST_CTAS = LAYER_WARPS * 32,
};

/* A CTA's share: units (sixteens of rows) of the gates and ups of all experts that are used, and 16 outputs of down, or none. */
struct layer_share {
    int units, pieces; /* of an expert: sixteens; 256 inputs of down */
    int first, end;    /* units */
    int down_pieces;   /* of all experts */
};
LAYER_BOTH layer_share layer_share_of(int cta, int ctas, int num_distinct, int hidden, int width)
{
    const int units = width / 8, pieces = width / LAYER_PIECE, all = num_distinct * units;
    return {units, pieces, all * cta / ctas, all * (cta + 1) / ctas, cta * 16 < hidden ? num_distinct * pieces : 0};
}
LAYER_BOTH int layer_items(const layer_share &share, int warp)
{
    return share.end - share.first + (share.down_pieces - warp + LAYER_WARPS - 1) / LAYER_WARPS;
}

/* The item-th that a warp multiplies: its own 256 inputs of a unit; behind those every 8th piece of down. */
struct layer_item {
    bool is_down;
    int rank, sixteen, column; /* of the experts that are used; of its rows; the first input */
};
LAYER_BOTH layer_item layer_item_of(const layer_share &share, int item, int warp, int cta)
{
    const int unit = share.first + item, piece = (unit - share.end) * LAYER_WARPS + warp;
    if (unit < share.end) return {false, unit / share.units, unit % share.units, warp * LAYER_PIECE};
    return {true, piece / share.pieces, cta, piece % share.pieces * LAYER_PIECE};
}

/* 16 bytes that a lane loads as an instruction's operand, p = 0 or 1 of a line: from which input of it on, and where they lie of
 * row lane / 4 (+ 8) of the 16. */
LAYER_BOTH int layer_input(int quad, int p) { return quad * 16 + p * 8; }
LAYER_BOTH int layer_place(int group, int half, int quad, int p)
{
    return group * 128 + half * 1024 + ((quad * 2 + p) ^ group) * 16;
}
/* Where a warp leaves its sum of a row of the 16 by a token: the i-th of a lane at i * 32 + lane. */
LAYER_BOTH int layer_sum_at(int row, int token) { return (row / 8 * 2 + token % 2) * 32 + row % 8 * 4 + token / 2; }

#endif
