/* parts.h - the parts into which long items of prefill are cut where items are too few to fill the
 * machine.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_PARTS_H
#define PK_CUDA_ATTENTION_PREFILL_PARTS_H

#include "cuda/attention/prefill/lengths.h"
#include "cuda/thresholds.h"

/* Into how many parts items are cut. What they have in common is their level, so all items of a level have as many.
 *
 * Another kernel merges the parts. How long a call takes with parts of some length, in us, is estimated from how many
 * items there are of each length. It is the longest of three times: of all units (parts, and items that stay whole),
 * divided evenly among the CTAs; of the longest unit; and of all that are longer than half of it, in full waves of one per
 * CTA, because a CTA that has two of them takes longer than the longest one (prefill/NOTES.md #48). Where long items are
 * more than a wave they may stay whole, but for those that full waves leave over. */
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
    static bool may_pay(const pk_attention_args &args, double items, bool is_planned)
    {
        using namespace thresholds;
        int64_t longest = args.max_blocks_per_seq * args.block_size;
        if (args.window_left >= 0 && args.window_left < longest) longest = args.window_left;
        double queries = (double)(args.num_tokens < args.max_seqlen_q ? args.num_tokens : args.max_seqlen_q);
        double key_us = us_of_key(args), us = items * (0.5 * queries * key_us + PART_US);
        double least_us = CUTTING_US + CUTTING_DIM_US * (double)args.head_dim + (is_planned ? 0 : CUTTING_US_UNPLANNED);
        return items <= MOST_WAVES_TO_CUT && (double)longest * key_us > us + least_us;
    }

    /* Of an item; those of the level `whole_from` and higher ones stay whole. */
    __device__ int count(const prefill_batch &batch, int level, int whole_from) const
    {
        return level >= whole_from ? 1 : max((int)ceilf((float)prefill_lengths::keys_of(batch, level) * per_key), 1);
    }

    /* The lowest level from which on items up to `level` have `parts`, or a higher one. */
    __device__ int lowest_of_same(const prefill_batch &batch, int level, int whole_from, int parts) const
    {
        if (parts == 1) return level >= whole_from ? whole_from : 0;
        int lowest = min(batch.by_positions.divide((int)__fdividef((float)(parts - 1), per_key)), level);
        while (count(batch, lowest, whole_from) < parts) lowest++;
        return lowest;
    }

    /* In us: an item of so many keys that stays whole, and a unit, which leaves its result behind if it is a part. */
    __device__ static float us_of_whole(float keys, float key_us) { return keys * key_us + thresholds::PART_US; }
    __device__ static float us_of_unit(float keys, float key_us, bool is_part)
    {
        return us_of_whole(keys, key_us) + (is_part ? thresholds::LEAVE_US : 0);
    }

    /* In us: the merge of so many parts, of which an item has up to `count`. */
    __device__ static float us_of_merging(const prefill_batch &batch, float count, float parts)
    {
        float merged =
            __fdividef(parts, (float)batch.num_ctas) * (float)batch.args.head_dim; /* parts a CTA, and dims */
        return thresholds::MERGE_US + thresholds::MERGE_PART_US * count + thresholds::MERGE_DIM_US * merged;
    }

    /* In us, with parts of at most `length` keys, of which the longest item has `count`; INFINITY if there is no room for
     * so many. */
    __device__ static float estimate(const prefill_batch &batch, const prefill_lengths &lengths, float count,
                                     float length)
    {
        const float ctas = (float)batch.num_ctas, key_us = us_of_key(batch.args);
        const float per_key = count > 1 ? __frcp_rd(length) : 0;
        const float longest_us = us_of_unit(length, key_us, count > 1);
        float all_us = 0, long_us = 0, num_long = 0, cut = 0, room = 0;
        for (unsigned left = __ballot_sync(~0u, lengths.count > 0); left; left &= left - 1) {
            const int of = __ffs(left) - 1;
            const float items = __shfl_sync(~0u, lengths.count, of), keys = __shfl_sync(~0u, lengths.mean, of);
            const float parts = fmaxf(ceilf(keys * per_key), 1), units = items * parts;
            const float us = units * us_of_unit(__fdividef(keys, parts), key_us, parts > 1);
            const float most_parts = ceilf(lengths.most_keys(batch, of) * per_key);
            all_us += us;
            if (2 * us >= units * longest_us) long_us += us, num_long += units;
            if (parts > 1) cut += units;
            if (most_parts > 1) room += items * most_parts;
        }
        if (room > (float)batch.parts.most_parts) return INFINITY;
        const float waves = ceilf(__fdividef(num_long, ctas) - 0.001f); /* but for rounding */
        float us = fmaxf(__fdividef(all_us, ctas), longest_us);
        if (num_long > 0) us = fmaxf(us, waves * __fdividef(long_us, num_long));
        return count > 1 ? us + us_of_merging(batch, count, cut) : us;
    }

    /* The same, where full waves of long items stay whole and only `left` are cut. */
    __device__ static float estimate_left_over(const prefill_batch &batch, const prefill_lengths &lengths,
                                               float full_waves, float left, float count, float length)
    {
        using namespace thresholds;
        const float ctas = (float)batch.num_ctas, key_us = us_of_key(batch.args);
        const float waves = ceilf(__fdividef(left * count, ctas) - 0.001f);
        float us = full_waves * us_of_whole((float)lengths.longest, key_us) + waves * us_of_unit(length, key_us, true);
        float all_us = lengths.keys * key_us + (lengths.items + left * (count - 1)) * PART_US + left * count * LEAVE_US;
        return fmaxf(us, __fdividef(all_us, ctas)) + us_of_merging(batch, count, left * count);
    }

    /* Cutting saves less than a wave of the longest item. */
    __device__ static bool may_pay(const prefill_batch &batch, const prefill_lengths &lengths)
    {
        using namespace thresholds;
        if (lengths.items == 0 || lengths.items > MOST_WAVES_TO_CUT * (float)batch.num_ctas) return false;
        return us_of_whole((float)lengths.longest, us_of_key(batch.args)) > MERGE_US + 2 * MERGE_PART_US;
    }

    /* Whether there is room for the parts of `cut` long items in `count` each, and of those that are not long. Of those,
     * surely no more are cut than there are parts: each has more keys than one. Beyond 2^20 keys floats may count one part
     * less. */
    __device__ static bool have_room(const prefill_batch &batch, const prefill_lengths &lengths, float cut, float count,
                                     float length)
    {
        const bool are_others_cut = (float)prefill_lengths::keys_of(batch, lengths.lowest_of_long - 1) > length;
        const float most = lengths.longest >> 20 ? count + 1 : count, others = lengths.items - (float)lengths.num_long;
        const float of_length = are_others_cut ? __fdividef(lengths.keys - lengths.keys_of_long, length) : 0;
        return cut * most + of_length + fminf(of_length, others) <= (float)batch.parts.most_parts;
    }

    /* Keys of a part where the longest item has so many. Borders of parts are multiples of `tile`. */
    __device__ static float length_of(const prefill_lengths &lengths, float parts, float tile)
    {
        return ceilf(__fdividef((float)lengths.longest, parts * tile)) * tile;
    }

    /* One warp, with a number of parts a lane: 32 are tried, up to what fills the machine. */
    __device__ void choose(const prefill_batch &batch, float tile)
    {
        prefill_lengths lengths;
        per_key = 0, num_whole = 0, lowest_level = 0;
        lengths.find_longest(batch);
        if (!may_pay(batch, lengths)) return;
        lengths.divide(batch);
        lowest_level = lengths.lowest_of_long;
        const float ctas = (float)batch.num_ctas, lane = (float)(threadIdx.x & 31);
        const float step = ceilf(__fdividef(ctas, 32 * lengths.items));
        const float parts = lane * step + 1, length = length_of(lengths, parts, tile);
        const float us = estimate(batch, lengths, parts, length);
        const int best = lane_of_least(us);
        if (best > 0) per_key = __frcp_rd(__shfl_sync(~0u, length, best));
        if (lengths.num_long > batch.num_ctas) cut_left_over(batch, lengths, tile, __shfl_sync(~0u, us, best));
    }

    /* Full waves of long items stay whole and the others are cut, if that is faster than `us`. What is cut begins with a
     * level of some sequences, so it may be a few items more. */
    __device__ void cut_left_over(const prefill_batch &batch, const prefill_lengths &lengths, float tile, float us)
    {
        const int full_waves = lengths.num_long / batch.num_ctas, whole = full_waves * batch.num_ctas;
        const int more = lengths.seqs_of_long * batch.num_bundles - 1;
        const float left = (float)min(lengths.num_long - whole + more, lengths.num_long);
        const float parts = (float)(threadIdx.x & 31) + 2;
        const float length = length_of(lengths, parts, tile);
        float us_of_left = estimate_left_over(batch, lengths, (float)full_waves, left, parts, length);
        if (lengths.num_long == whole || !have_room(batch, lengths, left, parts, length)) us_of_left = INFINITY;
        const int best = lane_of_least(us_of_left);
        if (__shfl_sync(~0u, us_of_left, best) >= us) return;
        per_key = __frcp_rd(__shfl_sync(~0u, length, best));
        num_whole = whole;
    }
};

#endif
