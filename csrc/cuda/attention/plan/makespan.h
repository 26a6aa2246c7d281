/* makespan.h - when the last of some units of work ends, by list scheduling: each place takes the next unit when it is
 * done with the one before. Attention's plans try several cuts, a lane each, and take the one that ends first.
 *
 * Units are put in the order in which CTAs take them, all of one length at a time. Of the places we remember two levels:
 * those that got one unit less, exactly, and the mean of all others. So a step costs the same for any number of places,
 * and waves, what they leave over, and short units that share a place need no rules of their own.
 *
 * A call without a plan finds the same cuts as one with a plan. So a product that is added is written as fmaf: else each
 * kernel is compiled with roundings of its own, which decide where two cuts are nearly as good.
 */
#ifndef PK_CUDA_ATTENTION_PLAN_MAKESPAN_H
#define PK_CUDA_ATTENTION_PLAN_MAKESPAN_H

#include "cuda/attention/states.h"
#include "cuda/thresholds.h"

/* Lengths of sequences or items are divided into so many classes, the longest first: lane i has class i. */
constexpr int PLAN_CLASSES = 8;
constexpr int PLAN_TRIALS = 32; /* a lane each */

struct makespan {
    float places;
    float num_low;   /* places that are free at `low`; */
    float low, high; /* the others are at `high`, on average, */
    float last;      /* and the last one at `last` */

    __device__ explicit makespan(float places) : places(places), num_low(places), low(0), high(0), last(0) {}

    /* How often all of `some` get a unit. Both are whole numbers, and the quotient may be a little too small. */
    __device__ static float full_waves(float count, float some) { return floorf(__fdividef(count + 0.5f, some)); }

    /* `count` units more of one length. */
    __device__ void put(float count, float length)
    {
        const float turns = fminf(full_waves(count, num_low), floorf(__fdividef(high - low, length)));
        low = fmaf(turns, length, low), count = fmaf(-turns, num_low, count); /* until the low places have caught up */
        const float waves = full_waves(count, places);
        low = fmaf(waves, length, low), high = fmaf(waves, length, high), count = fmaf(-waves, places, count);
        if (count > 0 && count < num_low) {
            const float end = low + length, others = places - num_low;
            high = __fdividef(fmaf(count, end, others * high), count + others);
            num_low -= count, last = fmaxf(last, end);
        } else if (count > 0) { /* the low places are the last ones to end now, but for those that follow them */
            const float end = low + length, behind = count - num_low;
            low = high, last = fmaxf(last, behind > 0 ? high + length : end);
            high = __fdividef(fmaf(num_low, end, behind * (high + length)), count);
            num_low = places - count;
        }
        last = fmaxf(last, high);
    }

    /* When all are done. Where fewer places are busy they have more of the bandwidth each, but not all of it, because they
     * are not spread evenly; a place that is left alone takes `lone_share` of the time that it takes beside all others.
     * What the last units take to start is not shared. */
    __device__ float end(float lone_share, float start) const
    {
        const float busy = fminf(thresholds::UNEVEN * __fdividef(places - num_low, places), 1);
        const float at_once = fminf(start, high - low);
        return fmaf(last - high, lone_share, fmaf(high - low - at_once, fmaxf(lone_share, busy), low + at_once));
    }
};

/* Sequences or items of about one length, by each lane of a warp one class. */
struct length_class {
    float count, mean, longest;
};

/* What starts, ends and merges take, in the unit of the lengths, and how much room there is. */
struct cutting_costs {
    float places, room;        /* for units at once, and for more units than there are sequences or items */
    float uncut;               /* what is no longer is never cut */
    float start, leave;        /* of a unit, behind another; of a part, until it is left to be merged */
    float merge_batch;         /* from then on, for each MERGE_BATCH parts of one tile, */
    float kernel, kernel_part; /* or until a kernel of its own has started, and for each of all parts */
    float lone_share;          /* see makespan::end */

    /* The unit takes so long, and a tile is merged in so many rounds. */
    cutting_costs(float places, float room, float unit_us, float rounds)
        : places(places), room(room), uncut(0), kernel(0), kernel_part(0), lone_share(1)
    {
        start = thresholds::START_US / unit_us, leave = thresholds::LEAVE_US / unit_us;
        merge_batch = rounds * thresholds::MERGE_US / unit_us;
    }
    cutting_costs() = default;
};

/* When all is done if what is longer than `length`, by each lane its own, has parts of that length and a rest, but for the
 * first `whole` of the longest class. Those come first; then the parts, then rests and what is not cut. INFINITY: there is
 * no room for so many parts. */
struct cutting_trial {
    const cutting_costs &costs;
    const length_class &mine;
    float length, whole, per_length; /* rounded down: what goes into it without a rest has none */

    __device__ float parts_of(float its) const
    {
        return its <= fmaxf(costs.uncut, length) ? 1 : ceilf(its * per_length);
    }

    template <typename Take>
    __device__ void for_classes(Take take) const
    {
        float not_cut = whole;
        for (unsigned left = __ballot_sync(~0u, mine.count > 0); left; left &= left - 1, not_cut = 0) {
            const int of = __ffs(left) - 1;
            const float mean = __shfl_sync(~0u, mine.mean, of), parts = parts_of(mean);
            take(__shfl_sync(~0u, mine.count, of) - not_cut, mean, __shfl_sync(~0u, mine.longest, of), parts);
        }
    }

    __device__ float end() const
    {
        float more = 0, most_more = 0, cut = 0, merged = 0; /* parts that are no last ones; an upper bound; all parts */
        for_classes([&](float count, float mean, float longest, float parts) {
            more = fmaf(count, parts - 1, more), cut = parts > 1 ? fmaf(count, parts, cut) : cut;
            most_more = fmaf(count, fminf(parts_of(longest) - 1, (mean + 1) * per_length), most_more);
        });
        makespan all(costs.places);
        all.put(whole, __shfl_sync(~0u, mine.mean, 0) + costs.start);
        all.put(more, length + costs.start + costs.leave);
        for (int of_short = 0; of_short < 2; of_short++) /* rests, which come behind the longer ones */
            for_classes([&](float count, float mean, float, float parts) {
                const float rest = fminf(mean, fmaf(1 - parts, length, mean));
                const bool is_cut = parts > 1, is_in_turn = (is_cut && 2 * rest <= length) == of_short;
                all.put(is_in_turn ? count : 0, rest + costs.start + (is_cut ? costs.leave : 0));
                const float batches = is_in_turn && is_cut ? ceilf(parts * (1.0f / MERGE_BATCH)) : 0;
                if (batches > 0) merged = fmaxf(merged, fmaf(batches, costs.merge_batch, all.last));
            });
        if (most_more > costs.room) return INFINITY;
        const float by_kernel = cut > 0 ? fmaf(cut, costs.kernel_part, costs.kernel) : 0;
        return all.end(costs.lone_share, costs.start) + fmaxf(merged - all.last, 0) + by_kernel;
    }
};

#endif
