/* lengths.h - how long the parts are into which sequences of decode are cut (attention/plan/units.h).
 *
 * One length serves all sequences of a step: what is longer has parts of that length and a rest. 32 lengths are tried, from
 * that of the longest sequence, which cuts nothing, to a place's share of all steps, and the one with the least makespan
 * is taken. Where sequences of one length fill the places more than once, full waves of them stay whole, so that only
 * those are cut that are left over.
 *
 * The hardware hands out the CTAs, longest first, and those that still run at the end draw more of the bandwidth. What a
 * CTA has under way at once is never cut: where the table has no room for more keys, a sequence is one unit. With
 * num_splits every sequence has up to that many parts, whose number and borders depend on its own length alone.
 */
#ifndef PK_CUDA_ATTENTION_PLAN_LENGTHS_H
#define PK_CUDA_ATTENTION_PLAN_LENGTHS_H

#include "cuda/attention/plan/makespan.h"
#include "cuda/attention/plan/plan.h"
#include "cuda/divider.h"

constexpr int UNIT_BUCKETS = 32;          /* of lengths: units of one are in no order */
constexpr int MOST_STEPS_TRIED = 1 << 20; /* of a sequence: up to there floats count parts exactly */
constexpr int FEWEST_KEYS = 1024;         /* of a part, with num_splits; a power of two, as a step */

/* Which sequences are cut, and how. */
struct decode_cut {
    int length;  /* of a part, in steps; what is not longer stays whole, */
    int first;   /* and so do the sequences before this one */
    int longest; /* no unit is longer */

    /* Of the parts of a sequence. */
    __device__ int length_of(const decode_shape &shape, int seq, int num_steps) const
    {
        if (shape.num_splits) {
            int parts = max(1, min(shape.num_splits, num_steps >> (__clz(shape.step) - __clz(FEWEST_KEYS))));
            return (num_steps + parts - 1) / parts;
        }
        return seq < first || num_steps <= DECODE_STAGES ? num_steps : min(length, num_steps);
    }
    /* Units are listed by their length, the longest first. */
    __device__ int bucket_of(int num_steps) const
    {
        return divide_small(max(longest - num_steps, 0), longest / UNIT_BUCKETS + 1).x;
    }
};

/* Class i of the sequences' lengths ends i * width below the longest. */
__device__ static inline int class_width(int longest) { return longest / PLAN_CLASSES + 1; }
__device__ static inline int class_of(int longest, int num_steps)
{
    return divide_small(longest - num_steps, class_width(longest)).x;
}

/* A warp, which has the tiles and steps of a class a lane. `end_of_longest`: no sequence of the first class stands there
 * or behind it. */
__device__ static inline decode_cut choose_cut(const decode_shape &shape, int longest, int num_tiles, int sum_of_steps,
                                               int num_seqs, int end_of_longest)
{
    const int lane = (int)threadIdx.x % 32, total = __reduce_add_sync(~0u, sum_of_steps);
    if (shape.num_splits || longest <= DECODE_STAGES) return {longest, 0, longest};
    if (longest > MOST_STEPS_TRIED) { /* so long that a place's share is as good as any length */
        const int share = total / shape.slots + 1;
        return {share, 0, share};
    }
    const int mean = divide_small(sum_of_steps, max(num_tiles, 1)).x;
    const length_class its = {(float)num_tiles, (float)mean, (float)(longest - lane * class_width(longest))};
    /* Sequences of one length, one tile each, in front of those that are too short to be cut. */
    const int num_longest = __shfl_sync(~0u, num_tiles, 0), left = divide_small(num_longest, shape.slots).y;
    const bool are_alike = __ballot_sync(~0u, lane > 0 && mean > DECODE_STAGES) == 0 && shape.num_segments == num_seqs;
    const bool are_left = are_alike && end_of_longest == num_longest && num_longest > shape.slots && left > 0;
    const int whole = are_left && lane > 0 ? num_longest - left : 0;

    const float most = fmaxf(1, __fdividef((float)longest * (float)shape.slots, (float)total));
    const float parts = are_left ? (float)lane + 1 : fmaf(most - 1, (float)lane * (1.0f / (PLAN_TRIALS - 1)), 1);
    /* A little less, so that what goes into it without a rest is not rounded up. */
    const int length = lane == 0 ? longest : (int)ceilf(__fdividef(0.999999f * (float)longest, parts));
    const cutting_trial trial = {shape.costs, its, (float)length, (float)whole, __frcp_rd((float)length)};
    const int best = lane_of_least(trial.end());
    const int its_length = __shfl_sync(~0u, length, best), first = __shfl_sync(~0u, whole, best);
    return {its_length, first, first ? longest : max(its_length, DECODE_STAGES)};
}

#endif
