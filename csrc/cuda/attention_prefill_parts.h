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
    int group, positions; /* query heads of a KV head; query tokens of an item */
    divider by_positions, by_block_size;
    int window_left, window_right; /* -1: unbounded */
    float chunk_keys;              /* whose K and V, of all heads, stay in the L2 cache while they are in use */
    parts_room parts;

    /* The decode kernel has been launched for the other sequences of the batch, and may still run. */
    __device__ bool is_beside_decode() const { return filter.min_rows > 0; }
    /* Every sequence is one item of a KV head: its keys are read once. */
    __host__ __device__ bool reads_keys_once() const { return args.max_seqlen_q <= positions; }
};

/* num_positions 0: beyond the end of the list. part >= num_parts: the item has fewer keys than parts, and this one is
 * nobody's. */
struct prefill_item {
    int seq, kv_head;
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

/* Into how many parts items are cut. What they have in common is their level, so all items of a level have as many.
 *
 * The lengths are known by their sum and maximum alone: with parts of at most `length` keys there are about sum / length
 * of them, and half a part more per item; or as many of each item where lengths hardly differ. They run in waves of one
 * per CTA, and another kernel merges them. Times are in us. */
struct prefill_parts {
    float per_key; /* 1 / keys of a part, or 0: items stay whole */

    /* A CTA with 128 rows goes through it. */
    __host__ __device__ static float us_of_key(const pk_attention_args &args)
    {
        return thresholds::KEY_DIM_US * (float)args.head_dim;
    }

    /* Whether any lengths are long enough, by what the host knows: so many items a CTA, at least, which see half of
     * their own sequence's queries, at least. */
    static bool may_pay(const pk_attention_args &args, double items)
    {
        if (items > thresholds::MOST_WAVES_TO_CUT) return false;
        int64_t longest = args.max_blocks_per_seq * args.block_size;
        if (args.window_left >= 0 && args.window_left < longest) longest = args.window_left;
        double own_keys = 0.5 * (double)args.num_tokens / (double)args.num_seqs;
        double start_keys = thresholds::PART_US / us_of_key(args);
        return longest >= thresholds::FEWEST_KEYS_TO_CUT && (double)longest > items * (own_keys + start_keys);
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

    /* One warp. Each lane has some of the items: their number, the sum and the maximum of their keys. The borders of
     * parts are multiples of `tile`. */
    __device__ void choose(const prefill_batch &batch, float items, float keys, int longest, float tile)
    {
        for (int i = 16; i; i /= 2) {
            items += __shfl_xor_sync(~0u, items, i);
            keys += __shfl_xor_sync(~0u, keys, i);
        }
        longest = __reduce_max_sync(~0u, longest);
        items *= (float)batch.args.num_kv_heads;
        keys *= (float)batch.args.num_kv_heads;
        per_key = 0;
        const float most = (float)longest, ctas = (float)batch.num_ctas;
        if (items == 0 || items > thresholds::MOST_WAVES_TO_CUT * ctas || longest < thresholds::FEWEST_KEYS_TO_CUT)
            return;
        float step = ceilf(__fdividef(ctas, 32 * items)); /* 32 numbers are tried, up to what fills the machine */
        float parts = (threadIdx.x & 31) * step + 1;      /* of the longest */
        float mine = ceilf(__fdividef(most, parts * tile)) * tile, of_mine = __fdividef(keys, mine);
        bool are_even = keys > 0.9f * items * most;
        float units = parts == 1 ? items : are_even ? items * parts : of_mine + 0.5f * items;
        float waves = ceilf(__fdividef(units, ctas)), key_us = us_of_key(batch.args);
        float us = fmaxf(mine * key_us, waves * (__fdividef(keys, units) * key_us + thresholds::PART_US));
        if (parts > 1)
            us += thresholds::MERGE_US + thresholds::MERGE_PART_US * parts + thresholds::MERGE_WAVE_US * waves;
        /* Of those that are cut, surely no fewer than there are: each has more keys than one part. */
        if (parts > 1 && of_mine + fminf(of_mine, items) > (float)batch.parts.most_parts) us = INFINITY;
        /* Positive floats are in the order of their bits. */
        unsigned int least = __reduce_min_sync(~0u, __float_as_uint(us));
        int best = __ffs(__ballot_sync(~0u, __float_as_uint(us) == least)) - 1;
        if (best > 0) per_key = __fdividef(1.0f, __shfl_sync(~0u, mine, best));
    }
};

#endif
