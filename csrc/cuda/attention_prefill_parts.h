/* attention_prefill_parts.h - items of prefill, and the parts into which long ones are cut where items are too few to
 * fill the machine.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_PARTS_H
#define PK_CUDA_ATTENTION_PREFILL_PARTS_H

#include "cuda/attention_parts.h"
#include "cuda/divider.h"
#include "cuda/thresholds.h"

constexpr int PREFILL_PART_ROWS = 128; /* of an item that may be cut */

struct prefill_batch {
    pk_attention_args args;
    row_filter filter;
    int num_ctas;
    unsigned int *counters; /* items taken beyond the first of each CTA, CTAs done; zero between calls */
    pk_cuda_bad_id *bad_id;
    int4 *plan; /* the list of items, [num_rows] of 48 bytes, or NULL: each CTA works it out */
    int num_rows, signature;
    divider group;        /* query heads of a KV head */
    int heads, positions; /* query heads of an item, and query tokens */
    int num_bundles;      /* of so many heads */
    divider by_positions, by_block_size;
    int window_left, window_right; /* -1: unbounded */
    float chunk_keys;              /* whose K and V, of all heads, stay in the L2 cache while they are in use */
    parts_room parts;

    /* The decode kernel has been launched for the other sequences of the batch, and may still run. */
    __device__ bool is_beside_decode() const { return filter.min_rows > 0; }
    /* Every sequence is one item of a KV head: its keys are read once. */
    __host__ __device__ bool reads_keys_once() const
    {
        return args.max_seqlen_q <= positions && heads == group.divisor;
    }
    __device__ int kv_head_of(int q_head) const { return group.divide(q_head); }
};

/* num_positions 0: beyond the end of the list. part >= num_parts: the item has fewer keys than parts, and this one is
 * nobody's. */
struct prefill_item {
    int seq, q_head;                /* the first of its bundle */
    int first_token, num_positions; /* rows of q */
    int first_key;                  /* the key that causal position 0 of the item sees last; may be negative */
    int context_len;
    int begin, end; /* the keys that some position sees, of them those of the part */
    int part, num_parts;
    int first_slot; /* of the item's first part among all parts */
};

__device__ static inline prefill_item prefill_end_of_list()
{
    prefill_item none = {};
    none.num_parts = 1;
    return none;
}

/* Keys that a position sees: [begin, end). `diagonal` is the key at its own place, item.first_key + position. */
__device__ static inline int visible_begin(const prefill_batch &batch, int diagonal)
{
    return batch.window_left < 0 ? 0 : max(diagonal - batch.window_left, 0);
}
__device__ static inline int visible_end(const prefill_batch &batch, int diagonal, int context_len)
{
    return batch.window_right < 0 ? context_len : max(min(context_len, diagonal + batch.window_right + 1), 0);
}

/* What is known of items when it is decided how to cut them. */
struct prefill_sums {
    float items, keys, squares; /* of the items' keys */
    int longest;                /* keys of an item */

    /* `count` items of a sequence, of which the first goes through `before` + 1 times `positions` keys, and each after
     * it through `positions` more, but none through more than `most`. */
    __device__ void add(float count, float before, float positions, int most)
    {
        float ends = count * (before + 0.5f * (count + 1));
        float squares_of_ends = count * (before * (before + count + 1) + (count + 1) * (2 * count + 1) / 6);
        items += count;
        keys += fminf(ends * positions, count * (float)most);
        squares += fminf(squares_of_ends * positions * positions, count * (float)most * (float)most);
        longest = max(longest, most);
    }
    /* Over the lanes, and for all bundles of heads. */
    __device__ void add_up(float num_bundles)
    {
        for (int i = 16; i; i /= 2) {
            items += __shfl_xor_sync(~0u, items, i);
            keys += __shfl_xor_sync(~0u, keys, i);
            squares += __shfl_xor_sync(~0u, squares, i);
        }
        items *= num_bundles, keys *= num_bundles, squares *= num_bundles;
        longest = __reduce_max_sync(~0u, longest);
    }
};

/* Into how many parts items are cut. What they have in common is their level, so all items of a level have as many.
 *
 * Another kernel merges the parts. What a length of parts takes, in us, is estimated from sums alone. The mean length of
 * an item, weighted by its keys, is squares / keys. Where that is nearly the longest length, almost all keys lie in
 * keys * keys / squares items of that length, and their parts run in full waves of one per CTA. Otherwise there are about
 * keys / length parts, and half a part more per item (prefill/NOTES.md #34). */
struct prefill_parts {
    float per_key; /* 1 / keys of a part, or 0: items stay whole */

    /* A CTA with 128 rows goes through it. */
    __host__ __device__ static float us_of_key(const pk_attention_args &args)
    {
        return thresholds::KEY_US + thresholds::KEY_DIM_US * (float)args.head_dim;
    }

    /* Whether any lengths are long enough, by what the host knows: so many items a CTA, at least, which see half of the
     * longest prompt on average. Kernels that cut are slower for items that stay whole. */
    static bool may_pay(const pk_attention_args &args, double items)
    {
        int64_t longest = args.max_blocks_per_seq * args.block_size;
        if (args.window_left >= 0 && args.window_left < longest) longest = args.window_left;
        double queries = (double)(args.num_tokens < args.max_seqlen_q ? args.num_tokens : args.max_seqlen_q);
        double key_us = us_of_key(args), us = items * (0.5 * queries * key_us + thresholds::PART_US);
        return items <= thresholds::MOST_WAVES_TO_CUT && (double)longest * key_us > us + thresholds::CUTTING_US;
    }

    /* About as many as an item of the level goes through. */
    __device__ static int keys_of(const prefill_batch &batch, int level)
    {
        int keys = (level + 1) * batch.positions;
        return batch.window_left < 0 ? keys : min(keys, batch.window_left + 2 * batch.positions);
    }
    __device__ int count(const prefill_batch &batch, int level) const
    {
        return max((int)ceilf((float)keys_of(batch, level) * per_key), 1);
    }

    /* The lowest level from which on items up to `level` have `parts`, or a higher one. */
    __device__ int lowest_of_same(const prefill_batch &batch, int level, int parts) const
    {
        if (parts == 1) return 0;
        int lowest = min(batch.by_positions.divide((int)__fdividef((float)(parts - 1), per_key)), level);
        while (count(batch, lowest) < parts) lowest++;
        return lowest;
    }

    /* In us, with parts of at most `length` keys, of which the longest item has `count`. */
    __device__ static float estimate(const prefill_batch &batch, const prefill_sums &sums, float count, float length)
    {
        const float ctas = (float)batch.num_ctas, key_us = us_of_key(batch.args);
        const float longest = (float)sums.longest, long_items = __fdividef(sums.squares, longest * longest);
        const float short_keys = sums.keys - long_items * longest;
        const bool others_are_short = short_keys < thresholds::SHORT_SHARE * longest * (sums.items - long_items);
        float many = fminf(__fdividef(sums.keys * sums.keys, sums.squares), sums.items); /* of the usual length */
        bool are_even = sums.squares > thresholds::EVEN_SHARE * sums.keys * longest;
        if (others_are_short) many = long_items, are_even = true;
        float cut = are_even ? many * count : __fdividef(sums.keys, length) + 0.5f * many;
        float units = cut + (are_even ? sums.items - many : 0.5f * (sums.items - many));
        if (count == 1) cut = 0, units = sums.items;
        float part_us = thresholds::PART_US + (count > 1 ? thresholds::LEAVE_US : 0);
        float longest_us = length * key_us + part_us, all_us = sums.keys * key_us + units * part_us;
        float slack = sums.items - many < 0.5f ? 0.001f : thresholds::WAVE_SLACK; /* exact but for rounding, or not */
        float waves = ceilf(__fdividef(are_even ? many * count : units, ctas) - slack);
        float us = fmaxf(waves * (are_even ? longest_us : __fdividef(all_us, units)), __fdividef(all_us, ctas));
        us = fmaxf(us, longest_us);
        if (count == 1) return us;
        float merged = __fdividef(cut, ctas) * (float)batch.args.head_dim; /* parts a CTA, and dims */
        return us + thresholds::MERGE_US + thresholds::MERGE_PART_US * count + thresholds::MERGE_DIM_US * merged;
    }

    /* One warp, of which each lane has the sums of some of the items. The borders of parts are multiples of `tile`. */
    __device__ void choose(const prefill_batch &batch, prefill_sums sums, float tile)
    {
        sums.add_up((float)batch.num_bundles);
        per_key = 0;
        const float ctas = (float)batch.num_ctas;
        if (sums.items == 0 || sums.items > thresholds::MOST_WAVES_TO_CUT * ctas) return;
        float step = ceilf(__fdividef(ctas, 32 * sums.items)); /* 32 numbers are tried, up to what fills the machine */
        float parts = (threadIdx.x & 31) * step + 1;           /* of the longest */
        float length = ceilf(__fdividef((float)sums.longest, parts * tile)) * tile;
        float us = estimate(batch, sums, parts, length);
        /* Of those that are cut, surely no fewer than there are: each has more keys than one part. */
        float of_length = __fdividef(sums.keys, length);
        if (parts > 1 && of_length + fminf(of_length, sums.items) > (float)batch.parts.most_parts) us = INFINITY;
        int best = lane_of_least(us);
        if (best > 0) per_key = __fdividef(1.0f, __shfl_sync(~0u, length, best));
    }
};

#endif
