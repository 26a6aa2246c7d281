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

#include "cuda/cuda.h"
#include "cuda/thresholds.h"

/* Lengths of sequences or items are divided into so many classes, the longest first: lane i has class i. */
constexpr int PLAN_CLASSES = 8;
constexpr int CUTS_TRIED = 32; /* a lane each */

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
     * are not spread evenly; a place that is left alone takes `lone_share` of the time that it takes beside all others. */
    __device__ float end(float lone_share) const
    {
        const float busy = fminf(thresholds::UNEVEN * __fdividef(places - num_low, places), 1);
        return fmaf(last - high, lone_share, fmaf(high - low, fmaxf(lone_share, busy), low));
    }
};

#endif
