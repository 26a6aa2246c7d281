/* parts.h - the parts into which long items of prefill are cut where items are too few to fill the
 * machine.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_PARTS_H
#define PK_CUDA_ATTENTION_PREFILL_PARTS_H

#include "cuda/attention/plan/makespan.h"
#include "cuda/attention/prefill/lengths.h"
#include "cuda/thresholds.h"

/* Into how many parts items are cut. What they have in common is their level, so all items of a level have as many.
 * Another kernel merges the parts. Lengths of parts are tried, a lane each, and the one with the least makespan is taken.
 * Full waves of long items may also stay whole, so that only what they leave over is cut. */
struct prefill_parts {
    float per_key;    /* 1 / keys of a part, rounded down, or 0: items stay whole */
    int num_whole;    /* long items, the first ones of the list, that stay whole all the same; */
    int lowest_level; /* of long items */

    /* A CTA with 128 rows goes through it. */
    __host__ __device__ static float us_of_key(const pk_attention_args &args)
    {
        return fmaf(thresholds::KEY_DIM_US, (float)args.head_dim, thresholds::KEY_US);
    }

    /* Whether any lengths are long enough, by what the host knows: so many items a CTA, at least, which see half of the
     * longest prompt on average. Kernels that cut are slower for items that stay whole. A plan plays no part: with one the
     * bits are those of a call without. */
    static bool may_pay(const pk_attention_args &args, double items)
    {
        using namespace thresholds;
        int64_t longest = args.max_blocks_per_seq * args.block_size;
        if (args.window_left >= 0 && args.window_left < longest) longest = args.window_left;
        double queries = (double)(args.num_tokens < args.max_seqlen_q ? args.num_tokens : args.max_seqlen_q);
        double key_us = us_of_key(args), us = items * (0.5 * queries * key_us + START_US);
        return items <= MOST_WAVES_TO_CUT &&
               (double)longest * key_us > us + CUTTING_US + CUTTING_DIM_US * (double)args.head_dim;
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
    __device__ static float us_of_whole(float keys, float key_us) { return fmaf(keys, key_us, thresholds::START_US); }
    __device__ static float us_of_unit(float keys, float key_us, bool is_part)
    {
        return us_of_whole(keys, key_us) + (is_part ? thresholds::LEAVE_US : 0);
    }

    /* In us: the merge of so many parts, of which an item has up to `count`. */
    __device__ static float us_of_merging(const prefill_batch &batch, float count, float parts)
    {
        float merged =
            __fdividef(parts, (float)batch.num_ctas) * (float)batch.args.head_dim; /* parts a CTA, and dims */
        return fmaf(thresholds::MERGE_DIM_US, merged, fmaf(thresholds::MERGE_PART_US, count, thresholds::MERGE_KERNEL_US));
    }

    /* In us, with parts of at most `length` keys, of which the longest item has `count`, and if the first `whole` items
     * stay whole; INFINITY if there is no room for so many. */
    __device__ static float estimate(const prefill_batch &batch, const prefill_lengths &lengths, float whole,
                                     float count, float length)
    {
        const float key_us = us_of_key(batch.args), per_key = count > 1 ? __frcp_rd(length) : 0;
        makespan all((float)batch.num_ctas);
        float cut = 0, room = 0; /* parts, and an upper bound of them */
        for (unsigned left = __ballot_sync(~0u, lengths.count > 0); left; left &= left - 1) {
            const int of = __ffs(left) - 1;
            const float items = __shfl_sync(~0u, lengths.count, of), keys = __shfl_sync(~0u, lengths.mean, of);
            const float uncut = fminf(items, whole), parts = fmaxf(ceilf(keys * per_key), 1);
            const float most_parts = fminf(ceilf(lengths.most_keys(batch, of) * per_key), fmaf(keys, per_key, 1));
            whole -= uncut;
            all.put(uncut, us_of_whole(keys, key_us));
            all.put((items - uncut) * parts, us_of_unit(__fdividef(keys, parts), key_us, parts > 1));
            if (parts > 1) cut = fmaf(items - uncut, parts, cut);
            if (most_parts > 1) room = fmaf(items - uncut, most_parts, room);
        }
        if (room > (float)batch.parts.most_parts) return INFINITY;
        return all.end(1) + (cut > 0 ? us_of_merging(batch, count, cut) : 0);
    }

    /* Cutting saves less than a wave of the longest item. */
    __device__ static bool may_pay(const prefill_batch &batch, const prefill_lengths &lengths)
    {
        using namespace thresholds;
        if (lengths.items == 0 || lengths.items > MOST_WAVES_TO_CUT * (float)batch.num_ctas) return false;
        return us_of_whole((float)lengths.longest, us_of_key(batch.args)) > MERGE_KERNEL_US + 2 * MERGE_PART_US;
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
        const float parts = fmaf(lane, step, 1), length = length_of(lengths, parts, tile);
        const float us = estimate(batch, lengths, 0, parts, length);
        const int best = lane_of_least(us);
        if (best > 0) per_key = __frcp_rd(__shfl_sync(~0u, length, best));
        if (lengths.num_long > batch.num_ctas) cut_left_over(batch, lengths, tile, __shfl_sync(~0u, us, best));
    }

    /* Full waves of long items stay whole and the others are cut, if that is faster than `us`. What is cut begins with a
     * level of some sequences, so it may be a few items more. */
    __device__ void cut_left_over(const prefill_batch &batch, const prefill_lengths &lengths, float tile, float us)
    {
        const int whole = lengths.num_long / batch.num_ctas * batch.num_ctas;
        const float surely_whole = (float)max(whole - lengths.seqs_of_long * batch.num_bundles + 1, 0);
        const float parts = (float)(threadIdx.x & 31) + 2, length = length_of(lengths, parts, tile);
        const float us_of_left = estimate(batch, lengths, surely_whole, parts, length);
        const int best = lane_of_least(us_of_left);
        if (lengths.num_long == whole || __shfl_sync(~0u, us_of_left, best) >= us) return;
        per_key = __frcp_rd(__shfl_sync(~0u, length, best));
        num_whole = whole;
    }
};

#endif
