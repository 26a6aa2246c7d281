/* decode_sizes.h - how large the decode kernels are: rows of a tile, keys of a warp, shared memory of a CTA, and how many
 * CTAs an SM has places for.
 */
#ifndef PK_CUDA_ATTENTION_DECODE_SIZES_H
#define PK_CUDA_ATTENTION_DECODE_SIZES_H

#include "cuda/cards.h"
#include "cuda/pack.h"

/* Keys that a warp takes at a time, and how many warps fill a Hopper's SM with three such stages: more have no registers
 * anywhere. */
constexpr int decode_chunk(int head_dim, int cache_bytes) { return head_dim * cache_bytes <= 128 ? 32 : 16; }
constexpr int decode_warps_per_sm(int head_dim, int cache_bytes) { return head_dim * cache_bytes <= 256 ? 8 : 4; }
constexpr int DECODE_FEWEST_WARPS = 2;   /* of a CTA */
constexpr int DECODE_STAGES = 3;         /* chunks that a warp has room for in shared memory */
constexpr int DECODE_CROWDED_STAGES = 2; /* the same on a crowded SM, */
constexpr int decode_crowded(int number) { return number * 3 / 2; } /* which has so many warps, not `number` */
constexpr int decode_stages(bool is_crowded) { return is_crowded ? DECODE_CROWDED_STAGES : DECODE_STAGES; }
/* A chunk of an fp8 cache costs more arithmetic, and more warps hide that. Each has fewer registers then, so this is for
 * tiles of few sums (decode/NOTES.md #98). */
constexpr bool may_be_crowded(int head_dim, int rows, int cache_bytes)
{
    return cache_bytes == 1 && head_dim <= 128 && rows == 8;
}
constexpr int decode_head_dim(int64_t head_dim) { return head_dim <= 64 ? 64 : head_dim <= 128 ? 128 : 256; }
/* Whether a CTA may have fewer warps than keys are dealt among: then registers hold what the rounds before gave. */
constexpr bool takes_rounds(int head_dim, int rows) { return head_dim <= 128 && rows == 8; }
/* Query rows of a tile, where a sequence has so many for a KV head: registers bound them. */
constexpr int decode_rows(int64_t most_rows) { return most_rows <= 8 ? 8 : 16; }
/* Whether there are kernels that take a tile's heads from the projection. */
constexpr bool makes_heads(int64_t head_dim, int rows) { return head_dim <= 128 || rows == 8; }

/* Bytes of a CTA: a warp's stage, K and V with the padding of cache_tile; and behind the rings of one that takes its
 * heads from the projection the queries, the new key and value as the cache has them, and the squares of the row of x. */
constexpr int decode_stage_bytes(int head_dim, int cache_bytes)
{
    int pieces = head_dim * cache_bytes / 16;
    return 2 * decode_chunk(head_dim, cache_bytes) * (pieces % 8 ? pieces | 1 : pieces) * 16;
}
constexpr int decode_query_bytes(int head_dim, int rows) { return rows * (head_dim + 8) * 2; }
constexpr int decode_head_bytes(int head_dim, int rows, int cache_bytes)
{
    return decode_query_bytes(head_dim, rows) + 2 * head_dim * cache_bytes + PK_SQUARE_WARPS * (int)sizeof(float);
}
constexpr int decode_ring_bytes(int head_dim, int cache_bytes, bool is_crowded)
{
    return decode_stages(is_crowded) * decode_stage_bytes(head_dim, cache_bytes);
}
/* How many CTAs of so many warps run on an SM at once. */
constexpr int decode_places(const pk_cuda_card &card, int head_dim, int cache_bytes, int warps, bool is_crowded)
{
    int most_warps = decode_warps_per_sm(head_dim, cache_bytes);
    int by_registers = (is_crowded ? decode_crowded(most_warps) : most_warps) / warps;
    int rings = warps * decode_ring_bytes(head_dim, cache_bytes, is_crowded);
    int by_memory = pk_cuda_ctas_at_once(card, 32 * warps, rings);
    return by_memory < by_registers ? by_memory : by_registers;
}
/* Whether heads have room beside the rings of as many CTAs as run without them, whatever their size: a plan that counts
 * places does not know who makes the heads. */
constexpr bool have_heads_room(const pk_cuda_card &card, int head_dim, int cache_bytes, int rows)
{
    const int heads = decode_head_bytes(head_dim, rows, cache_bytes);
    for (bool is_crowded = false;; is_crowded = true) {
        const int ring = decode_ring_bytes(head_dim, cache_bytes, is_crowded);
        for (int warps = decode_warps_per_sm(head_dim, cache_bytes); warps >= DECODE_FEWEST_WARPS; warps /= 2) {
            int ctas = decode_places(card, head_dim, cache_bytes, warps, is_crowded), bytes = warps * ring + heads;
            if (ctas > 0 && (bytes > card.smem_per_cta || ctas * pk_cuda_smem_of_cta(bytes) > card.smem_per_sm))
                return false;
        }
        if (is_crowded || !may_be_crowded(head_dim, rows, cache_bytes)) return true;
    }
}

#endif
