/* lengths.h - how many items of prefill there are of each length, counted on the device. */
#ifndef PK_CUDA_ATTENTION_PREFILL_LENGTHS_H
#define PK_CUDA_ATTENTION_PREFILL_LENGTHS_H

#include "cuda/attention/prefill/batch.h"

/* Lengths are divided into classes of so many levels each. Lane i has class i; the first one has the longest items. */
struct prefill_lengths {
    static constexpr int CLASSES = 16;
    int levels;         /* the highest one, plus one */
    int width;          /* of a class, in levels */
    int longest;        /* keys of an item */
    float items;        /* of all sequences */
    float count, mean;  /* items of the lane's class, and the keys of one of them on average */
    int lowest_of_long; /* level: from there on items are long; it is half of the highest one, or a little more */
    int num_long;       /* so many are, */
    int seqs_of_long;   /* of so many sequences */

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
    /* No item of the class has more. */
    __device__ float most_keys(const prefill_batch &batch, int of_class) const
    {
        return (float)keys_of(batch, levels - of_class * width - 1);
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
        width = (levels + CLASSES - 1) / CLASSES;
        const int lane = threadIdx.x & 31, classes_of_long = (levels - levels / 2) / width;
        const int last = (levels - 1) / width, end_of_last = levels - last * width;
        lowest_of_long = levels - classes_of_long * width, seqs_of_long = 0;
        class_sums mine = {}, of_last = {};
#pragma unroll 1
        for (int seq = lane; seq - lane < batch.args.num_seqs; seq += 32) {
            level_range its = {0, 0};
            if (seq < batch.args.num_seqs) its = levels_of(batch, seq);
            seqs_of_long += __popc(__ballot_sync(~0u, its.end > lowest_of_long));
            if (its.end <= end_of_last) of_last.add(its.first, its.end);
            for (unsigned left = __ballot_sync(~0u, its.end > end_of_last); left; left &= left - 1) {
                const int owner = __ffs(left) - 1, end_of_mine = levels - lane * width;
                const int first = max(__shfl_sync(~0u, its.first, owner), end_of_mine - width);
                mine.add(first, max(min(__shfl_sync(~0u, its.end, owner), end_of_mine), first));
            }
        }
        of_last = {pk_sum_over_warp(of_last.count), pk_sum_over_warp(of_last.twice)};
        if (lane == last) mine.count += of_last.count, mine.twice += of_last.twice;
        count = mine.count * (float)batch.num_bundles;
        mean = mine.count > 0 ? __fdividef(0.5f * mine.twice, mine.count) * (float)batch.positions : 0;
        mean = fminf(mean, (float)longest);
        num_long = __reduce_add_sync(~0u, lane < classes_of_long ? (int)count : 0);
    }
};

#endif
