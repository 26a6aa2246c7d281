/* grouped_shape.h - how large a CTA of grouped.cu is, by the rows of a group and the form of the weight, and what it gets. */
#ifndef PK_CUDA_EXPERTS_GROUPED_SHAPE_H
#define PK_CUDA_EXPERTS_GROUPED_SHAPE_H

#include "cuda/experts/lists.h"
#include "cuda/linear/dequantize.h"
#include "cuda/sm90_ring.h"

enum {
    GROUPED_LINE = 64,       /* inputs of a stage: a swizzled row of 128 bytes */
    GROUPED_BLOCK = 64,      /* rows of the weight: of a warpgroup's instruction */
    GROUPED_MAX_STAGES = 12, /* of the ring */
    GROUPED_MOST_BEHIND = 4, /* stages whose rows of x are under way, before the first of them is waited for */
    GROUPED_AHEAD = 3,       /* stages of a quantised weight that are under way to registers */
    GROUPED_DECLARED = 2560, /* bytes that the kernel declares, at most */
};

/* How groups of up to so many rows of x are multiplied. */
struct grouped_form {
    int warpgroups, copiers; /* of a CTA: those that multiply; warps that copy or decode */
    int ctas;                /* of an SM, at most */
};
static constexpr grouped_form grouped_form_of(int rows, weight_form form)
{
    /* A group of few rows is decoded as slowly as one of many; what it takes are instructions, so warps, and registers. */
    if (form != AS_X) return rows > 64 ? grouped_form{2, 8, 1} : grouped_form{1, 8, 2};
    /* One warp that copies x is too slow for the engine: 5 % of 64 tokens' time. */
    if (rows == 16) return {1, 2, 3};
    /* Each tile reads the rows of x from the L2 cache: tall tiles. */
    return {2, rows > 64 ? 2 : 4, 2};
}
template <int N, weight_form FORM>
struct grouped_shape {
    static constexpr grouped_form IS = grouped_form_of(N, FORM);
    static constexpr int WORKERS = IS.warpgroups * 128, COPIERS = IS.copiers, THREADS = WORKERS + COPIERS * 32;
    static constexpr int TILE = IS.warpgroups * GROUPED_BLOCK; /* rows of the weight */
    static constexpr int X_BYTES = N * GROUPED_LINE * 2, STAGE_BYTES = X_BYTES + TILE * GROUPED_LINE * 2;
    /* A copier's thread has every eighth 16 bytes of them: of x; of a quantised weight, once it is decoded. */
    static constexpr int ROWS_OF_COPIER = N / (COPIERS * 4), PIECES_OF_COPIER = TILE / (COPIERS * 4);
    static constexpr int smem_on(const pk_cuda_card &card)
    {
        return card.smem_per_sm / IS.ctas - 1024 - GROUPED_DECLARED; /* CUDA keeps 1 KB of each CTA */
    }
    /* Beside the lists, and what the swizzle's border takes. */
    static constexpr int stages_on(const pk_cuda_card &card, int64_t list_bytes)
    {
        const int stages = (int)((smem_on(card) - 1024 - list_bytes) / STAGE_BYTES);
        return stages < GROUPED_MAX_STAGES ? stages : GROUPED_MAX_STAGES;
    }
};

/* A map of a weight by sixteens of rows, 8 gates and their 8 ups, or 16 neighbours: in_features, 8 rows, 2 of these, all such
 * sixteens, experts; a copy takes `tile` rows. */
static inline pk_status pk_cuda_map_expert_weight(CUtensorMap *map, const pk_expert_linear_args *args, int tile,
                                                  pk_error *err)
{
    const pk_weight &weight = args->linear.weight;
    const bool is_gated = args->linear.epilogue.is_gated;
    const int64_t sixteens = weight.out_features / 16, apart = is_gated ? weight.out_features / 2 : 8;
    const int64_t sizes[] = {weight.in_features, 8, 2, sixteens, args->num_experts};
    const int64_t strides[] = {1, weight.stride, apart * weight.stride, (is_gated ? 8 : 16) * weight.stride,
                               weight.of_experts.data};
    const int box[] = {GROUPED_LINE, 8, 2, tile / 16, 1};
    return pk_cuda_tensor_map(map, "weight", weight.dtype, weight.data, 5, sizes, strides, box, err);
}

struct grouped_params {
    CUtensorMap weight_map;
    weight_pieces pieces;       /* of a quantised weight, which has no map */
    pk_expert_linear_args args; /* without weights: those are another kernel's */
    pk_expert_groups lists;     /* without groups: each CTA lists the pairs */
    bool is_early;              /* the weight and the experts may be read before the kernel ahead has ended */
    int num_blocks, num_stages; /* tiles of an expert's outputs; of the ring */
    int num_sms;
};

#endif
