/* many_shape.h - the arithmetic of many.h that needs no GPU: sizes of a CTA, and where outputs lie in shared memory. */
#ifndef PK_CUDA_EXPERTS_MANY_SHAPE_H
#define PK_CUDA_EXPERTS_MANY_SHAPE_H

#include "cuda/experts/grouped_shape.h"
#include "cuda/experts/groups.h"

enum {
    MANY_LINE = 64,                      /* inputs of a stage: a swizzled row of 128 bytes */
    MANY_ROWS = 192,                     /* of x: the most that a tile has */
    MANY_SIZES = MANY_ROWS / GROUP_STEP, /* as many as which they are multiplied */
    MANY_BLOCK = 64,                     /* rows of the weight: of an instruction */
    MANY_BLOCKS = 2,                     /* of a warpgroup */
    MANY_STAGED = 64,                    /* rows that a warpgroup writes at once, 128 bytes each */
    MANY_WORKERS = 256,
    MANY_COPIERS = 128,
    MANY_THREADS = MANY_WORKERS + MANY_COPIERS,
    MANY_ACCUMULATORS = MANY_BLOCKS * MANY_ROWS / 2, /* of a thread */
    /* What the copiers give away, those that multiply take; 65,536 / MANY_THREADS are there. */
    MANY_COPIER_REGISTERS = 40,
    MANY_WORKER_REGISTERS = 232,
};
static_assert(MANY_COPIERS * MANY_COPIER_REGISTERS + MANY_WORKERS * MANY_WORKER_REGISTERS <= 65536, "of an SM");

/* GATHERS: four warps copy the rows of x from wherever they lie, and the two warpgroups share a tile, so that each row is
 * copied for 256 rows of the weight. Else the engine copies them, from rows in the order of the lists, and each warpgroup has
 * tiles of its own, in turn: one writes while the other multiplies. */
template <bool GATHERS>
struct many_shape {
    static constexpr bool TAKES_TURNS = !GATHERS;
    static constexpr int STAGES = GATHERS ? 3 : 5;
    static constexpr int OF_WARPGROUP = MANY_BLOCKS * MANY_BLOCK, TILE = (GATHERS ? 2 : 1) * OF_WARPGROUP;
    static constexpr int READERS = (GATHERS ? 2 : 1) * 4; /* warps that multiply a stage */
    static constexpr int X_BYTES = MANY_ROWS * MANY_LINE * 2, WEIGHT_BYTES = TILE * MANY_LINE * 2;
    static constexpr int STAGE_BYTES = X_BYTES + WEIGHT_BYTES, RING_BYTES = STAGES * STAGE_BYTES;
    static constexpr int STAGED_BYTES = MANY_STAGED * 128; /* of a warpgroup */
    static constexpr int SMEM_BYTES = 1024 + RING_BYTES + 2 * STAGED_BYTES;
};

struct many_params {
    CUtensorMap weight_map;         /* see pk_cuda_map_expert_weight */
    CUtensorMap x_maps[MANY_SIZES]; /* [pairs, in_features] by boxes of 16, 32, ... rows; not where it GATHERS */
    pk_expert_linear_args args;     /* without weights: those are another kernel's */
    pk_expert_groups lists;
    int num_blocks;      /* tiles of an expert's outputs */
    bool out_is_ordered; /* the rows of out are in the order of the lists; else where their pairs are */
    bool is_aligned;     /* 16 bytes of out can be written at once */
};

/* As which a group's rows are multiplied. */
__host__ __device__ static inline int many_size(int count) { return rounded_up(count, GROUP_STEP); }

/* Outputs: a thread's accumulators i * 4 + r * 2 + e of a block are of row i * 8 + lane % 4 * 2 + e of x, and of row r * 8 +
 * lane / 4 of a warp's 16 rows of the weight. Those 16 are 8 gates and their ups, or 16 neighbours.
 *
 * 16 bytes of a row as it is written: which of a warpgroup's, for its block and warp, of ups with r = 0. */
__host__ __device__ static inline int many_chunk(bool is_gated, int block, int warp, int r)
{
    return is_gated ? block * 4 + warp : warp * 2 + r; /* not gated: each block is written by itself */
}
/* Where it lies in the meantime: no two of 8 neighbouring rows, nor of 8 neighbouring chunks, in one bank. */
__host__ __device__ static inline int many_staged_at(int row, int chunk)
{
    const int at = row * 128 + chunk * 16;
    return at ^ (at >> 3 & 0x70);
}

#endif
