/* few_plan.h - the shapes of few_kernel.h: tiles, CTAs, and the ring of copies, by the weight and the card. */
#ifndef PK_CUDA_LINEAR_FEW_PLAN_H
#define PK_CUDA_LINEAR_FEW_PLAN_H

#include "cuda/linear/linear.h"

enum {
    BLOCK = 16 /* outputs of an instruction */,
    MAX_TILE = 48 /* outputs */,
    MAX_ROWS = 16, /* of a weight of 16 bits that is not small: half as many */
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
    bool is_shallow;         /* the ring has fewer slots than its depth, and copies for more */
    size_t smem_bytes;       /* of a CTA */
};

/* How a weight is copied: in pieces of 16 bytes. A line of a row is four threads' pieces. */
struct few_form {
    int bits;   /* of a value */
    int pieces; /* of a thread in a row; a line has those of four threads */

    constexpr int piece() const { return 128 / bits; } /* inputs */
    constexpr int line() const { return 4 * pieces * piece(); }
    /* Of 16 outputs by a line, for each warp. */
    constexpr int slot_bytes(int warps) const { return warps * 32 * 2 * pieces * 16; }
    /* Slots that each warp has in flight where there is room: 96 or 160 KB a CTA. */
    constexpr int depth(int warps) const { return (warps == FEW_WARPS ? 6 : 5) * 2 / pieces; }
};
static constexpr few_form FEW_16_BIT = {16, 2}, FEW_FP8 = {8, 2}, FEW_INT4 = {4, 1};
static constexpr few_form few_form_of(pk_dtype weight)
{
    return weight == PK_F8E4M3 ? FEW_FP8 : weight == PK_U8 ? FEW_INT4 : FEW_16_BIT;
}
/* Bytes of all warps' sums of a tile of so many blocks. They lie behind the ring, or in its place. */
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
    constexpr few_form form = FEW_16_BIT;
    const bool is_small =
        args->weight.in_features * args->weight.out_features * form.bits / 8 <= (int64_t)SMALL * device->num_sms;
    const int warps = params.num_warps = is_small ? FEW_WARPS : MANY_WARPS, depth = form.depth(warps);
    int64_t best = INT64_MAX;
    int step = args->epilogue.is_gated ? 16 : 8;
    for (int tile = step; tile <= MAX_TILE; tile += step) {
        int64_t tiles = pk_ceil_div(args->weight.out_features, tile), rounds = pk_ceil_div(tiles, device->num_sms);
        if (rounds * tile > best) continue;
        best = rounds * tile;
        params.tile = tile, params.num_tiles = (int)tiles, params.num_ctas = (int)pk_ceil_div(tiles, rounds);
    }
    int64_t blocks = pk_ceil_div(params.tile, BLOCK),
            slots = blocks * pk_ceil_div(args->weight.in_features, form.line() * warps);
    bool is_one_round = params.num_tiles <= params.num_ctas;
    int sums = sums_bytes(warps, args->x.num_rows, blocks); /* of a last tile lie where its copies were */
    int room = (most_smem(device->card) - (is_one_round ? 0 : sums)) / form.slot_bytes(warps);
    int needed = is_one_round && slots < depth ? (int)slots : depth;
    params.is_shallow = room < needed;
    params.num_slots = params.is_shallow ? room : needed;
    int copies = params.num_slots * form.slot_bytes(warps), behind = is_one_round ? 0 : copies;
    params.sums_at = behind / 16;
    params.smem_bytes = behind + sums > copies ? behind + sums : copies;
    return params;
}

#endif
