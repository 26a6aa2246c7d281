/* few_plan.h - the shapes of few.cu: tiles, warps, and the ring of copies, by the weight and the card. */
#ifndef PK_CUDA_EXPERTS_FEW_PLAN_H
#define PK_CUDA_EXPERTS_FEW_PLAN_H

#include "cuda/divider.h"
#include "cuda/experts/experts.h"
#include "cuda/linear/few_plan.h"

enum {
    EXPERT_ROWS = 8,   /* of x: the columns of an instruction */
    EXPERT_BLOCK = 16, /* rows of the weight: those of an instruction */
    EXPERT_FEW_PAIRS = 112,
    EXPERT_FEWEST_WARPS = 8,
    EXPERT_WARPS = 12,               /* of a CTA, where there are as many lines; two CTAs have room on an SM */
    EXPERT_SLOTS = 6,                /* of the ring, at most: copy_async_wait counts up to them */
    EXPERT_RING_BYTES = 96 << 10,    /* this product's, and as much for the next one's on the SM */
    EXPERT_PITCH = EXPERT_BLOCK + 2, /* floats per row of sums */
    EXPERT_LIST_BYTES = 3152,        /* that the kernel declares, at most */
};

struct expert_few_params {
    pk_expert_linear_args args;
    int tile, num_blocks; /* rows of the weight, 16 or 8, and how many such tiles an expert has */
    int num_warps, num_ctas, num_slots, sums_at; /* the last: of the sums in shared memory, in 16 bytes */
    size_t smem_bytes;
    divider block_rows, block_columns; /* of a quantised weight */
};

/* Two tiles' sums of all warps, so that one is written while the other is read. */
static constexpr int expert_sums_bytes(int warps) { return 2 * warps * EXPERT_ROWS * EXPERT_PITCH * 4; }

/* `form`: how the weight comes, as for the kernel for few rows. */
static constexpr int expert_slots(const pk_cuda_card &card, few_form form, int warps)
{
    const int most = card.smem_per_cta - EXPERT_LIST_BYTES - expert_sums_bytes(warps);
    const int slots = (most < EXPERT_RING_BYTES ? most : EXPERT_RING_BYTES) / form.slot_bytes(warps);
    return slots < EXPERT_SLOTS ? slots : EXPERT_SLOTS;
}
static constexpr int expert_smem(const pk_cuda_card &card, few_form form, int warps)
{
    return expert_slots(card, form, warps) * form.slot_bytes(warps) + expert_sums_bytes(warps);
}
static constexpr int most_expert_smem(const pk_cuda_card &card, few_form form)
{
    int most = 0;
    for (int warps = 1; warps <= EXPERT_WARPS; warps++)
        if (expert_smem(card, form, warps) > most) most = expert_smem(card, form, warps);
    return most;
}

/* Each line of inputs is one warp's, always the same one's: so a token's bits do not depend on the others. */
static inline expert_few_params plan_experts_few(const pk_expert_linear_args *args, const pk_cuda_device *device)
{
    expert_few_params params = {*args};
    const pk_weight &weight = args->linear.weight;
    const few_form form = few_form_of(weight.dtype);
    const int lines = (int)pk_ceil_div(weight.in_features, form.line());
    int64_t fewest = INT64_MAX;
    for (int warps = 1; warps <= EXPERT_WARPS && warps <= lines; warps++) { /* who waits for whom least */
        const int64_t waits = pk_ceil_div(lines, warps) * warps;
        if (waits > fewest && warps > EXPERT_FEWEST_WARPS) continue;
        fewest = waits, params.num_warps = warps;
    }
    int64_t best = INT64_MAX;
    for (int tile = 8; tile <= EXPERT_BLOCK; tile += 8) {
        /* Of sums over experts a CTA has whole tiles; of products there are many times more. */
        const int64_t tiles = pk_ceil_div(weight.out_features, tile), rounds = pk_ceil_div(tiles, device->num_sms);
        if (args->weights && rounds * tile > best) continue;
        best = rounds * tile;
        params.tile = tile, params.num_blocks = (int)tiles;
    }
    const int64_t most_tiles = params.num_blocks * (args->weights ? 1 : pk_num_pairs(args));
    params.num_ctas = (int)(most_tiles < device->num_sms ? most_tiles : device->num_sms);
    params.num_slots = expert_slots(device->card, form, params.num_warps);
    params.sums_at = params.num_slots * form.slot_bytes(params.num_warps) / 16;
    params.smem_bytes = (size_t)expert_smem(device->card, form, params.num_warps);
    if (weight.scales) params.block_rows = make_divider(weight.block_rows);
    if (weight.scales) params.block_columns = make_divider(weight.block_columns);
    return params;
}

#endif
