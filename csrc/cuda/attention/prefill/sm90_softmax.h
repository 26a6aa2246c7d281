/* sm90_softmax.h - the 64 rows of a warpgroup of sm90.cu: their place in the item,
 * masks and softmax.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_SM90_SOFTMAX_H
#define PK_CUDA_ATTENTION_PREFILL_SM90_SOFTMAX_H

#include "cuda/attention/prefill/sm90.h"

#ifdef PK_SM90A
/* A warpgroup's rows of an item, a tile of their scores, and what is summed of them. */
template <int head_dim, typename Kind, int WARPGROUPS>
struct prefill_rows {
    using shape = tiling<head_dim, Kind::IS_FP8, WARPGROUPS>;
    using T = typename Kind::Element;
    using V = std::conditional_t<Kind::IS_FP8, __half, T>; /* P, too */
    static constexpr int tile = shape::tile;
    static constexpr float most_of_a_tile = 8192, all_that_fits = 1e38f; /* see softmax() */

    const prefill_params &params;
    prefill_shared<shape> *shared;
    uint32_t q_smem;
    const prefill_batch &batch = params.batch;
    const pk_attention_args &args = batch.args;
    uint32_t k_smem = q_smem + shape::q_stages * shape::q_bytes;
    uint32_t v_smem = k_smem + shape::k_stages * shape::kv_bytes;
    int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1, lane = threadIdx.x & 31;
    /* This thread has two rows of the item, 8 apart. */
    int first_row = warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4;
    int position[2] = {first_row / batch.heads, (first_row + 8) / batch.heads};
    int head[2] = {first_row % batch.heads, (first_row + 8) % batch.heads};
    int first_position = warpgroup * 64 / batch.heads, last_position = (warpgroup * 64 + 63) / batch.heads;
    float scale = (args.softcap > 0 ? args.softcap : args.softmax_scale) * PK_LOG2E; /* of the scores to log2 */
    float k_scale = 1;                                                               /* of the item, with fp8 */

    ring_position<ITEM_SLOTS> slot;
    ring_position<shape::q_stages> q;
    ring_position<shape::k_stages> k;
    ring_position<shape::v_stages> v;
    int n, tile_begin;                /* the tile whose scores are next, and the item's last one */
    int unmasked_begin, unmasked_end; /* tiles that all rows of the warpgroup see wholly */
    int tail_tile;                    /* the tile that the sequence's last key does not fill, or -1 */
    float shrink[2];                  /* what raised offsets leave of what was summed before */
    float offset[2], sum[2];          /* of the softmax, in base 2; the sum is of this thread's columns */
    unsigned bad_boxes;               /* of the tile: see tile_ring */
    float s[tile / 2], o[head_dim / 2];
    uint32_t p[tile / 4];

    /* What the scores in hand are. Most are plain, and take few branches: at each the softmax would wait for
     * instructions (prefill/NOTES.md #30). */
    enum tile_kind {
        PLAIN,      /* only exponentials are to be taken */
        MODIFIED,   /* there are masks, a softcap, or rows that have seen nothing yet */
        SHRUNK,     /* either of them after its softmax, where o is to be multiplied by `shrink` */
        FIRST,      /* of an item, and treated as MODIFIED; o belongs to the item before */
        VERY_FIRST, /* of the first item; there is no o yet */
        NO_TILE,    /* there are no scores; o belongs to the last item */
    };
    /* Of tile n, which is not the first one of its item. */
    __device__ tile_kind kind_of_tile() const
    {
        bool is_plain = sees_whole_tile() && args.softcap <= 0 && k_scale > 0 &&
                        !__any_sync(~0u, offset[0] == PK_NO_SCORE || offset[1] == PK_NO_SCORE);
        return is_plain ? PLAIN : MODIFIED;
    }
    __device__ bool sees_whole_tile() const { return n >= unmasked_begin && n < unmasked_end && !bad_boxes; }

    /* Bits of this thread's keys of a tile, those that are ahead of `end`. Key i is i / 2 * 8 + i % 2 from the first. */
    static_assert(tile / 4 <= 32, "a bit for each of a row's");
    __device__ static uint32_t keys_ahead(int end)
    {
        int count = end <= 0 ? 0 : end / 8 * 2 + min(end % 8, 2);
        return count < 32 ? (1u << count) - 1 : ~0u;
    }

    /* Softcap, and -inf where a row does not see a key. */
    __device__ __forceinline__ void cap_and_mask(float (&s)[tile / 2])
    {
        if (args.softcap > 0) {
            for (int i = 0; i < tile / 2; i++) /* tanh */
                s[i] = 1.0f - __fdividef(2.0f, exp2_fast(s[i] * (params.cap_scale * k_scale)) + 1.0f);
        } else if (!(k_scale > 0)) { /* offsets and masks want `scale` to be positive */
            for (int i = 0; i < tile / 2; i++) s[i] *= k_scale;
        }
        if (sees_whole_tile()) return;
        const prefill_item &item = shared->item[slot.at];
        uint32_t bad_keys = 0;
#pragma unroll 1
        for (unsigned bad = bad_boxes; bad; bad &= bad - 1) {
            int first = (__ffs(bad) - 1) << params.box_shift;
            bad_keys |= keys_ahead(first + params.box_rows) & ~keys_ahead(first);
        }
        for (int r = 0; r < 2; r++) {
            int diagonal = item.first_key + position[r], first = n * tile + 2 * (lane % 4);
            uint32_t seen = keys_ahead(visible_end(batch, diagonal, item.context_len) - first) &
                            ~keys_ahead(visible_begin(batch, diagonal) - first) & ~bad_keys;
            for (int i = 0; i < tile / 4; i++)
                if (!(seen >> i & 1)) s[i / 2 * 4 + 2 * r + i % 2] = -INFINITY;
        }
    }

    /* Scores of the rows of this warp once more, into s where wanted[r]: a rare path that needs no other warp. */
    __device__ __forceinline__ void score_again(const bool (&wanted)[2])
    {
        uint32_t q_row = q_smem + q.at * shape::q_bytes + (first_row - lane / 4 + lane % 16) * shape::row_bytes;
        uint32_t k_row = k_smem + k.at * shape::kv_bytes + lane % 8 * shape::row_bytes +
                         lane / 16 * shape::columns * shape::group_bytes;
        float scores[tile / 2]; /* in local memory, so that the loop need not be unrolled */
#pragma unroll 1
        for (int j = 0; j < tile / 8; j += 2, k_row += 2 * shape::columns * shape::group_bytes) {
            float d[2][4] = {};
#pragma unroll 1
            for (int i = 0; i < head_dim; i += 16) {
                uint32_t a[4], b[4];
                int column = i / shape::column, at = i % shape::column * 2;
                ldmatrix_x4(a, swizzled(q_row + column * shape::rows * shape::row_bytes + at + lane / 16 * 16));
                ldmatrix_x4(b, swizzled(k_row + column * shape::group_bytes + at + lane / 8 % 2 * 16));
                Kind::mma(d[0], a, {b[0], b[1]});
                Kind::mma(d[1], a, {b[2], b[3]});
            }
            for (int i = 0; i < 8; i++) scores[4 * j + i] = d[i / 4][i % 4];
        }
        fence_async_proxy(); /* the engine may write where ordinary loads have read */
        cap_and_mask(scores);
        for (int i = 0; i < tile / 2; i++)
            if (wanted[i / 2 % 2]) s[i] = scores[i];
    }

    /* Of row r, when its offset rises. */
    __device__ __forceinline__ void shrink_sums(int r, float factor)
    {
        shrink[r] *= factor;
        sum[r] *= factor;
    }

    /* Moves the offsets of some rows up to the greatest score of the tile in s. */
    __device__ __forceinline__ void raise_offsets(const bool (&wanted)[2])
    {
        for (int r = 0; r < 2; r++) {
            float top = s[2 * r];
            for (int i = 2 * r; i < tile / 2; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
            top = fmaxf(quad_max(top) * scale, offset[r]);
            if (!wanted[r]) continue;
            shrink_sums(r, exp2_fast(offset[r] - top));
            offset[r] = top;
        }
    }

    /* Turns the scores of row r into exp2(scale * score - offset) and returns their sum. */
    __device__ __forceinline__ float exponentials(int r)
    {
        float sum = 0;
        for (int i = 2 * r; i < tile / 2; i += 4) {
            s[i] = exp2_fast(s[i] * scale - offset[r]);
            s[i + 1] = exp2_fast(s[i + 1] * scale - offset[r]);
            sum += s[i] + s[i + 1];
        }
        return sum;
    }

    /* The exponentials in s are too large for the offsets of some rows. Mostly a power of two brings them down; where a
     * sum left the range of fp32 the scores are computed again. */
    __device__ __forceinline__ void lower(float (&tile_sum)[2])
    {
        bool is_lost[2];
        for (int r = 0; r < 2; r++) is_lost[r] = quad_any(!(tile_sum[r] < all_that_fits));
        if (__any_sync(~0u, is_lost[0] || is_lost[1])) {
            score_again(is_lost);
            raise_offsets(is_lost);
            for (int r = 0; r < 2; r++)
                if (is_lost[r]) tile_sum[r] = exponentials(r);
        }
        for (int r = 0; r < 2; r++) {
            float top = quad_max(tile_sum[r]), factor = 1.0f;
            if (top > most_of_a_tile && !is_lost[r]) {
                int exponent = (__float_as_int(top) >> 23) - 127;
                factor = __int_as_float((127 - exponent) << 23);
                offset[r] += (float)exponent;
            }
            tile_sum[r] *= factor;
            shrink_sums(r, factor);
            for (int i = 2 * r; i < tile / 2; i += 4) {
                s[i] *= factor;
                s[i + 1] *= factor;
            }
        }
    }

    /* Softcap and masks, and offsets for rows that have none. Returns whether there were any. */
    __device__ __forceinline__ bool prepare_scores(bool is_first)
    {
        cap_and_mask(s);
        bool is_new[2];
        for (int r = 0; r < 2; r++) {
            is_new[r] = is_first || offset[r] == PK_NO_SCORE;
            shrink[r] = 1;
        }
        bool any_new = __any_sync(~0u, is_new[0] || is_new[1]);
        if (any_new) raise_offsets(is_new);
        return any_new;
    }

    /* Exponentials of the tile in s, and their sums. A row's offset is the greatest score of its first tile and stays:
     * finding every tile's maximum first costs a third of the softmax, and any offset gives the same quotient as long as
     * nothing overflows or vanishes. Where exponentials sum to more than 2^13 (which fp16 still holds) the offset is
     * raised. A row decides for itself: its bits do not depend on the rows beside it. Returns whether a row did. */
    __device__ __forceinline__ bool softmax(bool is_prepared)
    {
        float tile_sum[2];
        for (int r = 0; r < 2; r++) tile_sum[r] = exponentials(r);
        bool any_over = __any_sync(~0u, !(tile_sum[0] + tile_sum[1] <= most_of_a_tile)); /* NaN too */
        if (any_over) {
            if (!is_prepared) shrink[0] = shrink[1] = 1;
            lower(tile_sum);
        }
        for (int r = 0; r < 2; r++) sum[r] += tile_sum[r];
        return any_over;
    }

    __device__ __forceinline__ void pack_p()
    {
        for (int i = 0; i < tile / 4; i++) p[i] = pk_pack_pair<V>(s[2 * i], s[2 * i + 1]);
    }

    __device__ __forceinline__ void shrink_o()
    {
        for (int i = 0; i < head_dim / 2; i++) o[i] *= shrink[i / 2 % 2];
    }
};
#endif  // PK_SM90A
#endif
