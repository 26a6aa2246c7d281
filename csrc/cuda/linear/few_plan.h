/* few_plan.h - the shapes of few.cu: tiles, CTAs, and the ring of copies, by the weight and the card. */
#ifndef PK_CUDA_LINEAR_FEW_PLAN_H
#define PK_CUDA_LINEAR_FEW_PLAN_H

#include "cuda/linear/linear.h"

enum {
    LINE = 64 /* inputs */,
    BLOCK = 16 /* outputs of an instruction */,
    MAX_TILE = 48 /* outputs */,
    MAX_ROWS = 16, /* of a weight that is not small: half as many */
    SMALL = 100 << 10 /* bytes of a weight per SM */,
    /* A small weight has two CTAs per SM, of this product and the next, a larger one has one. */
    FEW_WARPS = 8,
    MANY_WARPS = 16,
};

struct linear_few_params {
    pk_linear_args args;
    int tile, num_tiles;     /* outputs (of a gated product: gates and ups) */
    int num_slots, sums_at;  /* of the ring; where the sums lie in shared memory, in 16 bytes */
    int num_ctas, num_warps; /* of the grid, of a CTA */
    bool is_shallow;         /* the ring has fewer slots than depth_of(), and copies for more */
    size_t smem_bytes;       /* of a CTA */
};

/* How many lines of 16 outputs each warp has in flight where there is room: 96 or 160 KB a CTA. */
static constexpr int depth_of(int warps) { return warps == FEW_WARPS ? 6 : 5; }
static constexpr int slot_bytes(int warps) { return warps * 32 * 4 * 16; }
/* Of all warps, for a tile of so many blocks: they lie behind the ring, or in its place. */
static constexpr int sums_bytes(int warps, int64_t num_rows, int64_t blocks)
{
    return warps * (int)(num_rows * (blocks * BLOCK + 4)) * 4;
}

/* Shared memory that a CTA may ask for beside the squares, which the kernel declares. */
static constexpr int most_smem(const pk_cuda_card &card)
{
    return card.smem_per_cta - MANY_WARPS * MAX_ROWS / 2 * (int)sizeof(float);
}

/* Takes the size of a tile that deals the weight most evenly to the SMs, and a ring as deep as the card has room for. */
static inline linear_few_params plan_linear_few(const pk_linear_args *args, const pk_cuda_device *device)
{
    linear_few_params params = {*args};
    const bool is_small = args->weight.in_features * args->weight.out_features * 2 <= (int64_t)SMALL * device->num_sms;
    const int warps = params.num_warps = is_small ? FEW_WARPS : MANY_WARPS, depth = depth_of(warps);
    int64_t best = INT64_MAX;
    int step = args->epilogue.is_gated ? 16 : 8;
    for (int tile = step; tile <= MAX_TILE; tile += step) {
        int64_t tiles = pk_ceil_div(args->weight.out_features, tile), rounds = pk_ceil_div(tiles, device->num_sms);
        if (rounds * tile > best) continue;
        best = rounds * tile;
        params.tile = tile, params.num_tiles = (int)tiles, params.num_ctas = (int)pk_ceil_div(tiles, rounds);
    }
    int64_t blocks = pk_ceil_div(params.tile, BLOCK),
            slots = blocks * pk_ceil_div(args->weight.in_features, LINE * warps);
    bool is_one_round = params.num_tiles <= params.num_ctas;
    int sums = sums_bytes(warps, args->x.num_rows, blocks); /* of a last tile lie where its copies were */
    int room = (most_smem(device->card) - (is_one_round ? 0 : sums)) / slot_bytes(warps);
    int needed = is_one_round && slots < depth ? (int)slots : depth;
    params.is_shallow = room < needed;
    params.num_slots = params.is_shallow ? room : needed;
    int copies = params.num_slots * slot_bytes(warps), behind = is_one_round ? 0 : copies;
    params.sums_at = behind / 16;
    params.smem_bytes = behind + sums > copies ? behind + sums : copies;
    return params;
}

#endif
