/* attention_prefill_parts.h - the parts into which long items of prefill are cut where items are too few to fill the
 * machine.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_PARTS_H
#define PK_CUDA_ATTENTION_PREFILL_PARTS_H

#include "cuda/attention_prefill_batch.h"
#include "cuda/thresholds.h"

/* What is known of items when it is decided how to cut them. */
struct prefill_sums {
    float items, keys, squares; /* of the items' keys */
    float seqs;                 /* that have items */
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
    }
    /* Over the lanes, and for all bundles of heads. */
    __device__ void add_up(float num_bundles)
    {
        for (int i = 16; i; i /= 2) {
            items += __shfl_xor_sync(~0u, items, i);
            keys += __shfl_xor_sync(~0u, keys, i);
            squares += __shfl_xor_sync(~0u, squares, i);
            seqs += __shfl_xor_sync(~0u, seqs, i);
        }
        items *= num_bundles, keys *= num_bundles, squares *= num_bundles;
        longest = __reduce_max_sync(~0u, longest);
    }
};

/* Into how many parts items are cut. What they have in common is their level, so all items of a level have as many.
 *
 * Another kernel merges the parts. What a length of parts takes, in us, is estimated from sums alone. The mean length of
 * an item, weighted by its keys, is squares / keys. Where that is nearly the longest length, almost all keys lie in
 * keys * keys / squares items of that length, and their parts run in full waves of one per CTA; where all others are far
 * shorter, the long ones are counted. Otherwise there are about keys / length parts, and half a part more per item
 * (prefill/NOTES.md #34). Long items of one length that are more than a wave may stay whole, but for those that full
 * waves leave over. */
struct prefill_parts {
    float per_key;    /* 1 / keys of a part, rounded down, or 0: items stay whole */
    int num_whole;    /* long items, the first ones of the list, that stay whole all the same; */
    int lowest_level; /* of long items */

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
    /* Of an item; those of the level `whole_from` and higher ones stay whole. */
    __device__ int count(const prefill_batch &batch, int level, int whole_from) const
    {
        return level >= whole_from ? 1 : max((int)ceilf((float)keys_of(batch, level) * per_key), 1);
    }

    /* The lowest level from which on items up to `level` have `parts`, or a higher one. */
    __device__ int lowest_of_same(const prefill_batch &batch, int level, int whole_from, int parts) const
    {
        if (parts == 1) return level >= whole_from ? whole_from : 0;
        int lowest = min(batch.by_positions.divide((int)__fdividef((float)(parts - 1), per_key)), level);
        while (count(batch, lowest, whole_from) < parts) lowest++;
        return lowest;
    }

    /* Brought into its range, so that no sum goes wrong. */
    __device__ static int context_of(const pk_attention_args &args, int seq)
    {
        const int most_keys = (int)min(args.max_blocks_per_seq * args.block_size, (int64_t)1 << 30);
        return min(max(args.context_lens[seq], 0), most_keys);
    }

    /* One warp: of all items of the level `from` and higher ones. */
    __device__ static prefill_sums sums_from(const prefill_batch &batch, int from)
    {
        prefill_sums sums = {};
        const pk_attention_args &args = batch.args;
#pragma unroll 4
        for (int seq = threadIdx.x & 31; seq < args.num_seqs; seq += 32) {
            int context = context_of(args, seq), queries = (int)args.max_seqlen_q;
            if (args.cu_seqlens_q) queries = min(args.cu_seqlens_q[seq + 1] - args.cu_seqlens_q[seq], queries);
            int64_t rows = (int64_t)queries * batch.group.divisor;
            if (rows <= batch.filter.min_rows || rows > batch.filter.max_rows) continue;
            int first = batch.by_positions.divide(max(context - queries, 0)); /* level of the first item */
            int end = first + batch.by_positions.divide_up(queries), most = keys_of(batch, end - 1);
            first = max(first, from);
            if (first >= end) continue;
            sums.add((float)(end - first), (float)first, (float)batch.positions, most);
            sums.longest = max(sums.longest, most), sums.seqs += 1;
        }
        sums.add_up((float)batch.num_bundles);
        return sums;
    }

    /* Whether almost all keys are in the long items, which are as long as each other: what estimates may count on. */
    __device__ static bool are_two_kinds(const prefill_sums &all, const prefill_sums &longs)
    {
        const float longest = (float)all.longest, others = all.items - longs.items;
        return longs.keys > thresholds::EVEN_SHARE * longs.items * longest &&
               all.keys - longs.keys <= thresholds::SHORT_SHARE * longest * others;
    }

    /* In us: the merge of so many parts, of which an item has up to `count`. */
    __device__ static float us_of_merging(const prefill_batch &batch, float count, float parts)
    {
        float merged =
            __fdividef(parts, (float)batch.num_ctas) * (float)batch.args.head_dim; /* parts a CTA, and dims */
        return thresholds::MERGE_US + thresholds::MERGE_PART_US * count + thresholds::MERGE_DIM_US * merged;
    }

    /* In us, with parts of at most `length` keys, of which the longest item has `count`. */
    __device__ static float estimate(const prefill_batch &batch, const prefill_sums &all, const prefill_sums &longs,
                                     float count, float length)
    {
        const float ctas = (float)batch.num_ctas, key_us = us_of_key(batch.args);
        const bool are_counted = are_two_kinds(all, longs);
        const float many = /* of the usual length */
            are_counted ? longs.items : fminf(__fdividef(all.keys * all.keys, all.squares), all.items);
        const bool are_even = are_counted || all.squares > thresholds::EVEN_SHARE * all.keys * (float)all.longest;
        float cut = are_even ? many * count : __fdividef(all.keys, length) + 0.5f * many;
        float units = cut + (are_even ? all.items - many : 0.5f * (all.items - many));
        if (count == 1) cut = 0, units = all.items;
        const float leave_us = count > 1 ? thresholds::LEAVE_US : 0, left = are_even ? cut : units;
        float longest_us = length * key_us + thresholds::PART_US + leave_us;
        float all_us = all.keys * key_us + units * thresholds::PART_US + left * leave_us;
        bool are_exact = are_counted || all.items - many < 0.5f; /* but for rounding */
        float waves =
            ceilf(__fdividef(are_even ? many * count : units, ctas) - (are_exact ? 0.001f : thresholds::WAVE_SLACK));
        float us = fmaxf(waves * (are_even ? longest_us : __fdividef(all_us, units)), __fdividef(all_us, ctas));
        us = fmaxf(us, longest_us);
        return count == 1 ? us : us + us_of_merging(batch, count, cut);
    }

    /* The same, where full waves of long items stay whole and only `left` are cut. */
    __device__ static float estimate_left_over(const prefill_batch &batch, const prefill_sums &all, float full_waves,
                                               float left, float count, float length)
    {
        using namespace thresholds;
        const float ctas = (float)batch.num_ctas, key_us = us_of_key(batch.args);
        const float waves = ceilf(__fdividef(left * count, ctas) - 0.001f);
        float us =
            full_waves * ((float)all.longest * key_us + PART_US) + waves * (length * key_us + PART_US + LEAVE_US);
        float all_us = all.keys * key_us + (all.items + left * (count - 1)) * PART_US + left * count * LEAVE_US;
        return fmaxf(us, __fdividef(all_us, ctas)) + us_of_merging(batch, count, left * count);
    }

    /* Cutting saves less than a wave of the longest item. */
    __device__ static bool may_pay(const prefill_batch &batch, const prefill_sums &all)
    {
        using namespace thresholds;
        if (all.items == 0 || all.items > MOST_WAVES_TO_CUT * (float)batch.num_ctas) return false;
        return (float)all.longest * us_of_key(batch.args) + PART_US > MERGE_US + 2 * MERGE_PART_US;
    }

    /* Whether there is room for the parts of `cut` items in `count` each, and of `others` with so many keys in all. Of those
     * that are cut, surely no fewer than there are: each has more keys than one part. */
    __device__ static bool have_room(const prefill_batch &batch, float cut, float count, float others, float keys,
                                     float length)
    {
        const float of_length = __fdividef(keys, length);
        return cut * count + of_length + fminf(of_length, others) <= (float)batch.parts.most_parts;
    }
    /* The same, where the longest item has `count` and `cut` of the long ones are cut. The others are cut, too, but not if
     * the longest is cut in two. Beyond 2^20 keys floats may count one part less. */
    __device__ static bool have_long_ones_room(const prefill_batch &batch, const prefill_sums &all,
                                               const prefill_sums &longs, float cut, float count, float length)
    {
        const float most = all.longest >> 20 ? count + 1 : count, keys = count > 2 ? all.keys - longs.keys : 0;
        return have_room(batch, cut, most, all.items - longs.items, keys, length);
    }

    /* One warp, with a number of parts a lane. The borders of parts are multiples of `tile`. Both sums are by the same
     * instructions: to fetch others takes 4 us (prefill/NOTES.md #45a). */
    __device__ void choose(const prefill_batch &batch, float tile)
    {
        prefill_sums all, longs;
        per_key = 0, num_whole = 0, lowest_level = 0;
#pragma unroll 1
        for (int pass = 0; pass < 2; pass++) {
            longs = sums_from(batch, lowest_level);
            if (pass > 0) break;
            all = longs;
            lowest_level = batch.by_positions.divide(all.longest / 2); /* long ones see more than half of the longest */
            if (!may_pay(batch, all)) return;
        }
        const float ctas = (float)batch.num_ctas, lane = (float)(threadIdx.x & 31);
        float step = ceilf(__fdividef(ctas, 32 * all.items)); /* 32 numbers are tried, up to what fills the machine */
        float parts = lane * step + 1;                        /* of the longest */
        float length = ceilf(__fdividef((float)all.longest, parts * tile)) * tile;
        float us = estimate(batch, all, longs, parts, length);
        const bool has_room = have_room(batch, 0, 0, all.items, all.keys, length) ||
                              have_long_ones_room(batch, all, longs, longs.items, parts, length);
        if (parts > 1 && !has_room) us = INFINITY;
        const int best = lane_of_least(us);
        if (best > 0) per_key = __frcp_rd(__shfl_sync(~0u, length, best));
        if (longs.items > ctas && are_two_kinds(all, longs))
            cut_left_over(batch, all, longs, tile, __shfl_sync(~0u, us, best));
    }

    /* Full waves of long items stay whole and the others are cut, if that is faster than `us`. What is cut begins with a
     * level of some sequences, so it may be a few items more. */
    __device__ void cut_left_over(const prefill_batch &batch, const prefill_sums &all, const prefill_sums &longs,
                                  float tile, float us)
    {
        const float full_waves = floorf(__fdividef(longs.items, (float)batch.num_ctas) + 0.001f);
        const float whole = full_waves * (float)batch.num_ctas, more = longs.seqs * (float)batch.num_bundles - 1;
        const float left = fminf(longs.items - whole + more, longs.items);
        const float parts = (float)(threadIdx.x & 31) + 2;
        const float length = ceilf(__fdividef((float)all.longest, parts * tile)) * tile;
        float us_of_left = estimate_left_over(batch, all, full_waves, left, parts, length);
        const bool has_room = have_long_ones_room(batch, all, longs, left, parts, length);
        if (longs.items - whole < 0.5f || !has_room) us_of_left = INFINITY;
        const int best = lane_of_least(us_of_left);
        if (__shfl_sync(~0u, us_of_left, best) >= us) return;
        per_key = __frcp_rd(__shfl_sync(~0u, length, best));
        num_whole = (int)(whole + 0.5f);
    }
};

#endif
