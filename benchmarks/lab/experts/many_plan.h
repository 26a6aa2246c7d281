/* many_plan.h - the arithmetic of many.h that needs no GPU: shapes, groups of rows, tiles, the ring's order, places in shared
 * memory. many_check.cpp compiles it as plain C++ and emulates a grid. */
#ifndef MANY_PLAN_H
#define MANY_PLAN_H

#include <stdint.h>

#ifdef __CUDACC__
#define MANY_BOTH __host__ __device__ __forceinline__ static
#else
#define MANY_BOTH static inline
#endif

enum {
    MANY_LINE = 64,         /* inputs of a stage: a swizzled row of 128 bytes */
    MANY_BLOCK = 64,        /* rows of the weight: of one instruction */
    MANY_STEP = 16,         /* rows of x are multiplied in multiples of it */
    MANY_SIZES = 16,        /* such multiples: 256 rows are the most of an instruction */
    MANY_STAGED = 64,       /* rows that a warpgroup writes at once */
    MANY_SMEM = 227 << 10,  /* of a Hopper's CTA */
    MANY_DECLARED = 4 << 10 /* of it that the kernel declares, at most */
};

/* How a CTA multiplies: two warpgroups, each BLOCKS * 64 rows of the weight by up to ROWS rows of x.
 *     PINGPONG    each has tiles of its own, in turn, so that one writes while the other multiplies; else they share a tile
 *     GATHERS     four warps copy the rows of x from wherever they lie; else the engine does, from rows in the experts' order
 *     ROW_WARPS   of those four, that have the engine copy each row by itself, where they are not 0
 *     CLUSTER     CTAs that share what the engine copies, each a part to all of them: the rows of x, which they multiply by
 *                 neighbouring blocks of the weight, or where it GATHERS the weight, for neighbouring groups of its expert */
template <int BLOCKS_, int ROWS_, int STAGES_, bool PINGPONG_, bool GATHERS_, int CLUSTER_ = 1, int ROW_WARPS_ = 0>
struct many_shape {
    static constexpr int WARPGROUPS = 2, BLOCKS = BLOCKS_, ROWS = ROWS_, STAGES = STAGES_, CLUSTER = CLUSTER_;
    static constexpr bool PINGPONG = PINGPONG_, GATHERS = GATHERS_;
    static constexpr int ROW_WARPS = ROW_WARPS_;
    static constexpr int GROUPS_TOGETHER = GATHERS ? CLUSTER : 1, BLOCKS_TOGETHER = GATHERS ? 1 : CLUSTER;
    static constexpr int WORKERS = WARPGROUPS * 128, COPIERS = 128, THREADS = WORKERS + COPIERS;
    static constexpr int ACCUMULATORS = BLOCKS * ROWS / 2; /* of a thread */
    static constexpr int OF_WARPGROUP = BLOCKS * MANY_BLOCK, TILE = (PINGPONG ? 1 : WARPGROUPS) * OF_WARPGROUP;
    static constexpr int X_BYTES = ROWS * MANY_LINE * 2, WEIGHT_BYTES = TILE * MANY_LINE * 2;
    static constexpr int STAGE_BYTES = X_BYTES + WEIGHT_BYTES, RING_BYTES = STAGES * STAGE_BYTES;
    static constexpr int STAGED_BYTES = MANY_STAGED * 128; /* of a warpgroup */
    static constexpr int SMEM_BYTES = 1024 + RING_BYTES + WARPGROUPS * STAGED_BYTES;
    static constexpr int READERS = (PINGPONG ? 1 : WARPGROUPS) * 4; /* warps of a CTA that multiply a stage */
    /* Registers: what the copiers give away those that multiply take. */
    static constexpr int LAUNCHED_WITH = 65536 / THREADS / 8 * 8;
    static constexpr int COPIER_REGISTERS = GATHERS || CLUSTER > 1 ? 40 : 24;
    static constexpr int WORKER_REGISTERS = (THREADS * LAUNCHED_WITH - COPIERS * COPIER_REGISTERS) / WORKERS / 8 * 8;
    static_assert(SMEM_BYTES + MANY_DECLARED <= MANY_SMEM, "more than a CTA may have");
    static_assert(ROWS % 32 == 0 && ROWS <= MANY_STEP * MANY_SIZES && (BLOCKS == 1 || BLOCKS == 2), "see above");
};

// --- groups: the rows of an expert, divided evenly

MANY_BOTH int many_round_up(int count, int of) { return (count + of - 1) / of * of; }

/* Of each group but the last ones, which may have fewer: so many that no group has more than `most`, and that the groups of an
 * expert are a multiple of `together`. */
MANY_BOTH int many_rows_of_group(int count, int most, int together)
{
    const int groups = many_round_up((count + most - 1) / most, together);
    return groups == 0 ? MANY_STEP : many_round_up((count + groups - 1) / groups, MANY_STEP);
}
MANY_BOTH int many_groups(int count, int most, int together)
{
    const int rows = many_rows_of_group(count, most, together);
    return many_round_up((count + rows - 1) / rows, together);
}
MANY_BOTH int many_rows_of(int count, int rows, int group) /* of the group-th; 0: it is there for its neighbour alone */
{
    const int left = count - group * rows;
    return left < 0 ? 0 : left < rows ? left : rows;
}
/* Of all experts, at most. */
MANY_BOTH int64_t many_most_groups(int64_t num_pairs, int num_experts, int most, int together)
{
    return num_pairs / most + (int64_t)together * (num_experts + 1);
}
/* As which a group's rows are multiplied. */
MANY_BOTH int many_size(int count) { return count == 0 ? MANY_STEP : many_round_up(count, MANY_STEP); }

// --- tiles: a CTA, or a cluster of them, takes every num_walkers-th; all of a group are neighbours

struct many_place {
    int group, block; /* of TILE rows of the weight */
};
template <typename shape>
MANY_BOTH many_place many_place_of(int tile, int blocks, int rank)
{
    const int each = (blocks + shape::BLOCKS_TOGETHER - 1) / shape::BLOCKS_TOGETHER, group = tile / each;
    const int block = tile - group * each;
    if (shape::GATHERS) return {group * shape::CLUSTER + rank, block};
    return {group, block * shape::CLUSTER + rank};
}
template <typename shape>
MANY_BOTH int many_tiles(int groups, int blocks)
{
    return groups / shape::GROUPS_TOGETHER * ((blocks + shape::BLOCKS_TOGETHER - 1) / shape::BLOCKS_TOGETHER);
}

// --- the ring: a CTA's steps one after the other, num_steps a tile

struct many_ring {
    int stage, parity; /* for those that wait for a full stage; the other one waits for an empty stage */
};
MANY_BOTH many_ring many_ring_at(int step, int stages) { return {step % stages, step / stages & 1}; }
MANY_BOTH void many_advance(many_ring &at, int stages)
{
    if (++at.stage == stages) at.stage = 0, at.parity ^= 1;
}

// --- outputs: a thread's accumulators i * 4 + r * 2 + e of a block are of row i * 8 + lane % 4 * 2 + e of x, and of row r * 8
//     + lane / 4 of a warp's 16 rows of the weight. Those 16 are 8 gates and their ups, or 16 neighbours.

/* 16 bytes of a row as it is written: which of a warpgroup's, for its block b and warp, of ups with r = 0. */
MANY_BOTH int many_chunk(bool is_gated, int block, int warp, int r)
{
    return is_gated ? block * 4 + warp : warp * 2 + r; /* not gated: each block is written by itself */
}
MANY_BOTH int many_chunks(bool is_gated, int blocks) { return is_gated ? blocks * 4 : 8; }
/* The first output of a warpgroup's rows as they are written. `first`: of its first row of the weight. */
MANY_BOTH int many_first_output(bool is_gated, int first, int block)
{
    return is_gated ? first / 2 : first + block * MANY_BLOCK;
}
/* Where they lie in the meantime: no two of 8 neighbouring rows, nor of 8 neighbouring chunks, in one bank. */
MANY_BOTH int many_staged_at(int row, int chunk, int chunks)
{
    const int at = (row * chunks + chunk) * 16;
    return at ^ (at >> 3 & 0x70);
}

#endif
