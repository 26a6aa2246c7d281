/* lengths.h - how long the parts are into which sequences of decode are cut (attention/plan/units.h).
 *
 * One length serves all sequences of a step: what is longer has parts of that length and a rest. 32 lengths are tried, from
 * that of the longest sequence, which cuts nothing, to a place's share of all steps, and the one with the least makespan
 * is taken. Where sequences of one length fill the places more than once, full waves of them may also stay whole, so that
 * only those are cut that are left over; their parts go to the front of the list or to its end.
 *
 * The hardware hands out the CTAs, longest first, and those that still run at the end draw more of the bandwidth. What a
 * CTA has under way at once is never cut: where the table has no room for more keys, a sequence is one unit. With
 * num_splits every sequence has up to that many parts, whose number and borders depend on its own length alone.
 */
#ifndef PK_CUDA_ATTENTION_PLAN_LENGTHS_H
#define PK_CUDA_ATTENTION_PLAN_LENGTHS_H

#include "cuda/attention/plan/makespan.h"
#include "cuda/attention/plan/plan.h"

constexpr int FEWEST_KEYS = 1024; /* of a part, with num_splits; a power of two, as a step */

/* Which sequences are cut, and how. */
struct decode_cut {
    int length;          /* of a part, in steps; what is not longer stays whole, */
    int first;           /* and so do the sequences before this one */
    bool are_behind_all; /* parts that are not their sequence's last go to the list's end; else to its front */
    int longest_last;    /* no whole sequence, and no last part, is longer */

    /* Of the parts of a sequence. */
    __device__ int length_of(const decode_shape &shape, int seq, int num_steps) const
    {
        if (shape.num_splits) {
            int parts = max(1, min(shape.num_splits, num_steps >> (__clz(shape.step) - __clz(FEWEST_KEYS))));
            return (num_steps + parts - 1) / parts;
        }
        return seq < first || num_steps <= DECODE_STAGES ? num_steps : min(length, num_steps);
    }
};

/* A lane has one class of the sequences: their tiles, of `steps` on average. Class i ends i * width below the longest. */
struct length_classes {
    int longest, width;
    float tiles, steps;

    __device__ static int width_of(int longest) { return longest / PLAN_CLASSES + 1; }
    __device__ static int class_of(int longest, int num_steps)
    {
        return divide_small(longest - num_steps, width_of(longest)).x;
    }
    __device__ static length_classes of(int longest, int num_tiles, int sum_of_steps)
    {
        return {longest, width_of(longest), (float)num_tiles, (float)divide_small(sum_of_steps, max(num_tiles, 1)).x};
    }
    __device__ float most_steps(int of_class) const { return (float)(longest - of_class * width); }
};

/* What is tried: a length, by each lane its own. */
struct decode_trial {
    const decode_shape &shape;
    const length_classes &classes;
    float length, inverse; /* which is rounded down */

    /* As units are cut: exact up to MOST_STEPS_TRIED. */
    __device__ float parts_of(float num_steps) const
    {
        return num_steps <= fmaxf((float)DECODE_STAGES, length) ? 1 : ceilf(num_steps * inverse);
    }
    __device__ float steps_of_part() const { return length + shape.start_steps + shape.leave_steps; }
    /* From the last part's end until the sequence is done. */
    __device__ float steps_of_merging(float parts) const
    {
        return fmaf(ceilf(parts * (1.0f / MERGE_BATCH)), shape.batch_steps, parts * shape.part_steps);
    }

    /* In steps, if all sequences are cut to this length; INFINITY where the plan has no rows for so many parts. */
    __device__ float of_all() const
    {
        float more = 0, most_more = 0; /* parts that are no last ones; an upper bound */
        for (unsigned left = __ballot_sync(~0u, classes.tiles > 0); left; left &= left - 1) {
            const int of = __ffs(left) - 1;
            const float tiles = __shfl_sync(~0u, classes.tiles, of), steps = __shfl_sync(~0u, classes.steps, of);
            more = fmaf(tiles, parts_of(steps) - 1, more);
            most_more = fmaf(tiles, fminf(parts_of(classes.most_steps(of)) - 1, (steps + 1) * inverse), most_more);
        }
        makespan all((float)shape.slots);
        all.put(more, steps_of_part());
        float merged = 0;
        for (int of_short_rests = 0; of_short_rests < 2; of_short_rests++) /* which come behind the longer ones */
            for (unsigned left = __ballot_sync(~0u, classes.tiles > 0); left; left &= left - 1) {
                const int of = __ffs(left) - 1;
                const float tiles = __shfl_sync(~0u, classes.tiles, of), steps = __shfl_sync(~0u, classes.steps, of);
                const float parts = parts_of(steps), rest = fminf(steps, fmaf(1 - parts, length, steps));
                const bool is_cut = parts > 1, is_in_turn = (is_cut && 2 * rest <= length) == of_short_rests;
                all.put(is_in_turn ? tiles : 0, rest + shape.start_steps + (is_cut ? shape.leave_steps : 0));
                if (is_in_turn && is_cut) merged = fmaxf(merged, all.last + steps_of_merging(parts));
            }
        if (most_more > (float)(shape.num_units - shape.num_segments)) return INFINITY;
        return all.end(shape.lone_share) + fmaxf(merged - all.last, 0);
    }

    /* The same if `whole` sequences of so many steps stay whole, and only `left` are cut. */
    __device__ float of_left_over(float whole, float left, float num_steps, bool are_behind_all) const
    {
        const float parts = parts_of(num_steps), more = left * (parts - 1), rest = fmaf(1 - parts, length, num_steps);
        makespan all((float)shape.slots);
        if (!are_behind_all) all.put(more, steps_of_part());
        all.put(whole, num_steps + shape.start_steps);
        all.put(left, rest + shape.start_steps + shape.leave_steps);
        if (are_behind_all) all.put(more, steps_of_part());
        if (parts == 1 || more > (float)(shape.num_units - shape.num_segments)) return INFINITY;
        return all.end(shape.lone_share) + steps_of_merging(parts);
    }
};

/* A warp: the best of 32 lengths. `end_of_longest`: no sequence of the first class stands there or behind it. */
__device__ static inline decode_cut choose_cut(const decode_shape &shape, const length_classes &classes, int num_seqs,
                                               int total, int end_of_longest)
{
    const int longest = classes.longest, lane = (int)threadIdx.x % 32;
    if (shape.num_splits || longest <= DECODE_STAGES) return {longest, 0, false, longest};
    if (longest > MOST_STEPS_TRIED) { /* so long that a place's share is as good as any length */
        const int share = total / shape.slots + 1;
        return {share, 0, false, share};
    }
    const float most = fmaxf(1, __fdividef((float)longest * (float)shape.slots, (float)total));
    const float parts = fmaf(most - 1, (float)lane * (1.0f / (CUTS_TRIED - 1)), 1);
    /* A little less, so that what goes into it without a rest is not rounded up. */
    const int length = lane == 0 ? longest : (int)ceilf(__fdividef(0.999999f * (float)longest, parts));
    const float steps = decode_trial{shape, classes, (float)length, __frcp_rd((float)length)}.of_all();
    const int best = lane_of_least(steps), of_best = __shfl_sync(~0u, length, best);
    const decode_cut of_all = {of_best, 0, false, max(of_best, DECODE_STAGES)};

    /* Sequences of one length, one tile each, in front of those that are too short to be cut. */
    const bool are_few_lengths = __ballot_sync(~0u, lane > 0 && classes.steps > (float)DECODE_STAGES) == 0;
    const int num_longest = (int)__shfl_sync(~0u, classes.tiles, 0), left = divide_small(num_longest, shape.slots).y;
    const bool are_first = end_of_longest == num_longest && shape.num_segments == num_seqs;
    if (!are_few_lengths || !are_first || num_longest <= shape.slots || left == 0) return of_all;
    const bool are_behind_all = lane % 2;
    const int length_of_left = divide_small(longest + lane / 2 + 1, lane / 2 + 2).x; /* two parts and more */
    const decode_trial of_left = {shape, classes, (float)length_of_left, __frcp_rd((float)length_of_left)};
    const float steps_of_left = of_left.of_left_over((float)(num_longest - left), (float)left,
                                                     __shfl_sync(~0u, classes.steps, 0), are_behind_all);
    const int best_of_left = lane_of_least(steps_of_left);
    if (__shfl_sync(~0u, steps_of_left, best_of_left) >= __shfl_sync(~0u, steps, best)) return of_all;
    return {__shfl_sync(~0u, length_of_left, best_of_left), num_longest - left, best_of_left % 2 == 1, longest};
}

#endif
