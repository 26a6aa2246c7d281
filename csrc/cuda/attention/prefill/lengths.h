/* lengths.h - how many items of prefill there are of each length, counted on the device, and into how many parts those are
 * cut that are too few to fill the machine.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_LENGTHS_H
#define PK_CUDA_ATTENTION_PREFILL_LENGTHS_H

#include "cuda/attention/prefill/batch.h"

/* Lengths are divided into classes of so many levels each. Lane i has class i; the first one has the longest items. */
struct prefill_lengths {
    static constexpr int CLASSES = 16;
    int levels;        /* the highest one, plus one */
    int longest;       /* keys of an item */
    float items;       /* of all sequences */
    length_class mine; /* in keys */

    struct level_range {
        int first, end;
    };
    struct class_sums {
        float count, twice; /* so many items, and twice the sum of their levels, each plus one */
        __device__ void add(int first, int end)
        {
            const float number = (float)(end - first);
            count += number, twice = fmaf(number, (float)(first + end + 1), twice);
        }
    };

    /* About as many as an item of the level goes through. */
    __device__ static int keys_of(const prefill_batch &batch, int level)
    {
        int keys = (level + 1) * batch.positions;
        return batch.window_left < 0 ? keys : min(keys, batch.window_left + 2 * batch.positions);
    }

    /* Of a sequence's items. Its context is brought into its range, so that no sum goes wrong. */
    __device__ static level_range levels_of(const prefill_batch &batch, int seq)
    {
        const pk_attention_args &args = batch.args;
        const int most_keys = (int)min(args.max_blocks_per_seq * args.block_size, (int64_t)1 << 30);
        int context = min(max(args.context_lens[seq], 0), most_keys), queries = (int)args.max_seqlen_q;
        if (args.cu_seqlens_q) queries = min(args.cu_seqlens_q[seq + 1] - args.cu_seqlens_q[seq], queries);
        const int64_t rows = (int64_t)queries * batch.group.divisor;
        if (rows <= batch.filter.min_rows || rows > batch.filter.max_rows) return {0, 0};
        const int first = batch.by_positions.divide(max(context - queries, 0));
        return {first, first + batch.by_positions.divide_up(queries)};
    }

    /* One warp: of all items together. */
    __device__ void find_longest(const prefill_batch &batch)
    {
        int most = 0, number = 0;
#pragma unroll 4
        for (int seq = threadIdx.x & 31; seq < batch.args.num_seqs; seq += 32) {
            const level_range its = levels_of(batch, seq);
            most = max(most, its.end), number += its.end - its.first;
        }
        levels = __reduce_max_sync(~0u, most);
        items = (float)__reduce_add_sync(~0u, number) * (float)batch.num_bundles;
        longest = levels ? keys_of(batch, levels - 1) : 0;
    }
    /* Then, where there are some: of each class. Sequences that are wholly in the last class are summed by their lanes;
     * the others are looked at one by one, and each lane adds what is of its class. */
    __device__ void divide(const prefill_batch &batch)
    {
        const int lane = threadIdx.x & 31, width = (levels + CLASSES - 1) / CLASSES;
        const int last = (levels - 1) / width, end_of_last = levels - last * width, end_of_mine = levels - lane * width;
        class_sums sums = {}, of_last = {};
#pragma unroll 1
        for (int seq = lane; seq - lane < batch.args.num_seqs; seq += 32) {
            level_range its = {0, 0};
            if (seq < batch.args.num_seqs) its = levels_of(batch, seq);
            if (its.end <= end_of_last) of_last.add(its.first, its.end);
            for (unsigned left = __ballot_sync(~0u, its.end > end_of_last); left; left &= left - 1) {
                const int owner = __ffs(left) - 1;
                const int first = max(__shfl_sync(~0u, its.first, owner), end_of_mine - width);
                sums.add(first, max(min(__shfl_sync(~0u, its.end, owner), end_of_mine), first));
            }
        }
        of_last = {pk_sum_over_warp(of_last.count), pk_sum_over_warp(of_last.twice)};
        if (lane == last) sums.count += of_last.count, sums.twice += of_last.twice;
        const float mean = sums.count > 0 ? __fdividef(0.5f * sums.twice, sums.count) * (float)batch.positions : 0;
        mine = {sums.count * (float)batch.num_bundles, fminf(mean, (float)longest),
                (float)keys_of(batch, end_of_mine - 1)};
    }
};

/* Into how many parts items are cut. What they have in common is their level, so all items of a level have as many.
 * Another kernel merges the parts. Lengths of parts are tried, a lane each, and the one with the least makespan is taken. */
struct prefill_parts {
    float per_key; /* 1 / keys of a part, rounded down, or 0: items stay whole */

    __device__ int count(const prefill_batch &batch, int level) const
    {
        return max((int)ceilf((float)prefill_lengths::keys_of(batch, level) * per_key), 1);
    }
    /* The lowest level from which on items up to `level` have `parts`, or a higher one. */
    __device__ int lowest_of_same(const prefill_batch &batch, int level, int parts) const
    {
        if (parts == 1) return 0;
        int lowest = min(batch.by_positions.divide((int)__fdividef((float)(parts - 1), per_key)), level);
        while (count(batch, lowest) < parts) lowest++;
        return lowest;
    }

    /* One warp, with a number of parts of the longest item a lane: up to what fills the machine, if not more than 32.
     * Borders of parts are multiples of `tile`. */
    __device__ void choose(const prefill_batch &batch, float tile)
    {
        prefill_lengths lengths;
        per_key = 0;
        lengths.find_longest(batch);
        if (lengths.items == 0) return;
        lengths.divide(batch);
        const float step = ceilf(__fdividef((float)batch.num_ctas, PLAN_TRIALS * lengths.items));
        const float parts = fmaf((float)(threadIdx.x & 31), step, 1);
        const float length = ceilf(__fdividef((float)lengths.longest, parts * tile)) * tile;
        const int best = lane_of_least(cutting_trial{batch.costs, lengths.mine, length, 0, __frcp_rd(length)}.end());
        if (best > 0) per_key = __frcp_rd(__shfl_sync(~0u, length, best));
    }
};

#endif
