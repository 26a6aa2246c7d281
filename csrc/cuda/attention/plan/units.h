/* units.h - how sequences are cut into units (attention/plan/plan.h). Two use it: the kernel that plans a step for all
 * layers (attention/plan/plan.cu), and, where a call has no plan, each CTA of the decode kernel itself, which saves the
 * launch before it. It can do so where a warp has a lane for every sequence, or none is cut.
 */
#ifndef PK_CUDA_ATTENTION_PLAN_UNITS_H
#define PK_CUDA_ATTENTION_PLAN_UNITS_H

#include "cuda/attention/plan/lengths.h"

constexpr int MOST_SEQS_OF_A_WARP = 32;
constexpr int LANES_AT_ONCE = 4; /* that a warp looks at one by one: what they have is under way together */

/* The units of a sequence: all parts but the last ones of its tiles, then those. */
struct sequence_units {
    int num_tiles, num_parts, length, num_first, bucket_of_last;

    __device__ sequence_units(const decode_shape &shape, const decode_cut &cut, int seq, const planned_sequence &it)
    {
        num_tiles = it.num_tiles;
        length = max(cut.length_of(shape, seq, it.num_steps), 1);
        num_parts = divide_small(it.num_steps + length - 1, length).x;
        num_first = num_tiles * (num_parts - 1);
        bucket_of_last = cut.bucket_of(it.num_steps - (num_parts - 1) * length);
    }
    __device__ int num_left() const { return num_first ? num_first + num_tiles : 0; } /* that are parts */

    /* One of them, not signed yet. A tile's parts are left side by side. */
    __device__ attention_unit unit_of(const planned_sequence &it, int seq, int number, int first_part) const
    {
        int2 at = {number - num_first, num_parts - 1}; /* tile and part */
        if (at.x < 0) at = divide_small(number, num_parts - 1);
        attention_unit unit = {0, seq, at.x, it.view.first_query, it.view.num_queries, it.view.context};
        unit.first_step = at.y * length;
        unit.end_step = min(unit.first_step + length, it.num_steps);
        unit.part = at.y, unit.num_parts = num_parts;
        unit.first_slot = it.view.first_slot, unit.first_part = first_part + at.x * num_parts;
        return unit;
    }
};

/* A warp with a sequence a lane: its classes of lengths, and the cut. */
__device__ static inline decode_cut cut_of_warp(const decode_shape &shape, const planned_sequence &it, int num_seqs)
{
    const int lane = (int)threadIdx.x % 32, all_steps = it.num_tiles * it.num_steps;
    const int longest = __reduce_max_sync(~0u, it.num_tiles ? it.num_steps : 1);
    const int its_class = it.num_tiles ? class_of(longest, it.num_steps) : PLAN_CLASSES;
    int tiles = 0, steps = 0;
    for (int i = 0; i < PLAN_CLASSES && longest > DECODE_STAGES; i++) {
        const int its_tiles = __reduce_add_sync(~0u, its_class == i ? it.num_tiles : 0);
        const int its_steps = __reduce_add_sync(~0u, its_class == i ? all_steps : 0);
        if (lane == i) tiles = its_tiles, steps = its_steps;
    }
    const int end_of_longest = 32 - __clz(__ballot_sync(~0u, its_class == 0));
    return choose_cut(shape, longest, tiles, steps, num_seqs, end_of_longest);
}

/* The same: the unit of that number. */
__device__ static inline attention_unit find_unit(const decode_shape &shape, const planned_sequence &it, int num_seqs,
                                                  int number, const decode_cut &cut)
{
    const int lane = threadIdx.x % 32;
    const sequence_units units(shape, cut, lane, it);
    const int bucket_of_first = cut.bucket_of(cut.length), num_left = units.num_left();
    int first_before = units.num_first, left_before = num_left, last_before = 0; /* so far with this lane's */
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const int its_first = __shfl_up_sync(~0u, first_before, distance);
        const int its_left = __shfl_up_sync(~0u, left_before, distance);
        if (lane >= distance) first_before += its_first, left_before += its_left;
    }
    const int num_first = __shfl_sync(~0u, first_before, 31);
    first_before += __reduce_add_sync(~0u, units.bucket_of_last < bucket_of_first ? it.num_tiles : 0);
    if (units.bucket_of_last >= bucket_of_first) last_before += num_first;
#pragma unroll 1
    for (int first = 0; first < num_seqs; first += LANES_AT_ONCE)
#pragma unroll
        for (int other = first; other < first + LANES_AT_ONCE; other++) {
            const int bucket = __shfl_sync(~0u, units.bucket_of_last, other);
            const int tiles = __shfl_sync(~0u, it.num_tiles, other);
            if (bucket < units.bucket_of_last || (bucket == units.bucket_of_last && other < lane)) last_before += tiles;
        }
    const unsigned int among_first = number - (first_before - units.num_first), among_last = number - last_before;
    const bool is_first = among_first < (unsigned)units.num_first, is_last = among_last < (unsigned)it.num_tiles;
    const int owner = __ffs(__ballot_sync(~0u, is_first || is_last)) - 1;
    if (owner < 0) return {};
    const int its_number = is_first ? (int)among_first : units.num_first + (int)among_last;
    attention_unit unit = units.unit_of(it, lane, its_number, left_before - num_left);
    for (int i = 0; i < PLAN_COLUMNS; i++) ((int *)&unit)[i] = __shfl_sync(~0u, ((int *)&unit)[i], owner);
    return unit;
}

/* A warp: the unit of that number of a batch without a plan. A lane has a sequence. */
__device__ static inline attention_unit plan_unit(const pk_attention_args &args, const decode_shape &shape, int number,
                                                  pk_cuda_bad_id *bad_id, bool is_recorder)
{
    const int lane = threadIdx.x % 32, num_seqs = (int)args.num_seqs;
    const int seq = shape.are_whole ? number : lane; /* where a sequence is one unit, all lanes have that one */
    planned_sequence it = {};
    is_recorder = is_recorder && (shape.are_whole || number == 0);
    if (shape.are_whole || lane < num_seqs) it = measure(args, shape, seq, bad_id, is_recorder);
    if (shape.are_whole) {
        attention_unit unit = {0, seq, 0, it.view.first_query, it.view.num_queries, it.view.context};
        unit.end_step = it.num_steps, unit.num_parts = it.num_tiles; /* 0: not for the decode kernel */
        unit.first_slot = it.view.first_slot;
        return unit;
    }
    if (__ballot_sync(~0u, it.num_tiles > 0) == 0) return {};
    return find_unit(shape, it, num_seqs, number, cut_of_warp(shape, it, num_seqs));
}
/* The same as a function of its own, for kernels that usually have a plan. If it were inline, their CTAs would fetch
 * these instructions before the first copy and not use them. */
__device__ static __noinline__ attention_unit plan_unit_apart(const pk_attention_args &args, const decode_shape &shape,
                                                              int number, pk_cuda_bad_id *bad_id, bool is_recorder)
{
    return plan_unit(args, shape, number, bad_id, is_recorder);
}

#endif
