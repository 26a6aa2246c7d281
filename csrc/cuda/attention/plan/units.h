/* units.h - how sequences are cut into units (attention/plan/plan.h). Two use it: the kernel that plans a step for all
 * layers (attention/plan/plan.cu), and, where a call has no plan, each CTA of the decode kernel itself, which saves the
 * launch before it. It can do so where a warp has a lane for every sequence, or none is cut.
 */
#ifndef PK_CUDA_ATTENTION_PLAN_UNITS_H
#define PK_CUDA_ATTENTION_PLAN_UNITS_H

#include "cuda/attention/plan/lengths.h"

constexpr int UNIT_BUCKETS = 32; /* of lengths: units of one are in no order */
constexpr int MOST_SEQS_OF_A_WARP = 32;
constexpr int LANES_AT_ONCE = 4; /* that a warp looks at one by one: what they have is under way together */

/* The parts of a sequence, and where they stand in the order of units: first, in bucket 0, come all parts but the last
 * one of each tile. Then come those last parts and whole sequences, the longest first. Only the parts of a few sequences
 * that are left over may come behind them: in front, they would make as many whole ones start late (decode/NOTES.md #110). */
struct sequence_parts {
    int num_tiles, length, num_parts, bucket_of_first, bucket_of_last;

    sequence_parts() = default;
    __device__ sequence_parts(const decode_shape &shape, const decode_cut &cut, int seq, const planned_sequence &it)
    {
        const int width = cut.longest_last / (UNIT_BUCKETS - 1) + 1;
        length = max(cut.length_of(shape, seq, it.num_steps), 1);
        num_tiles = it.num_tiles;
        num_parts = divide_small(it.num_steps + length - 1, length).x;
        bucket_of_first = cut.are_behind_all ? UNIT_BUCKETS - 1 : 0;
        const int last = it.num_steps - (num_parts - 1) * length;
        bucket_of_last = 1 + divide_small(max(cut.longest_last - last - (num_parts > 1), 0), width).x;
    }
    /* All units but the last ones of tiles. */
    __device__ int num_first() const { return num_tiles * (num_parts - 1); }

    /* One of them, not signed yet. */
    __device__ attention_unit unit_of(const planned_sequence &it, int seq, int tile, int part, int first_part) const
    {
        attention_unit unit = {0, seq, tile, it.view.first_query, it.view.num_queries, it.view.context};
        unit.first_step = part * length;
        unit.end_step = min(unit.first_step + length, it.num_steps);
        unit.part = part, unit.num_parts = num_parts;
        unit.first_slot = it.view.first_slot, unit.first_part = first_part + tile * num_parts;
        return unit;
    }
};

/* What a lane of the warp has. */
template <typename T>
__device__ static inline T of_lane(T it, int lane)
{
    for (int i = 0; i < (int)(sizeof(it) / sizeof(int)); i++) ((int *)&it)[i] = __shfl_sync(~0u, ((int *)&it)[i], lane);
    return it;
}

/* A warp with a sequence a lane: its classes of lengths, and the cut. */
__device__ static inline decode_cut cut_of_warp(const decode_shape &shape, const planned_sequence &it, int num_seqs)
{
    const int lane = (int)threadIdx.x % 32, all_steps = it.num_tiles * it.num_steps;
    const int total = __reduce_add_sync(~0u, all_steps);
    const int longest = __reduce_max_sync(~0u, it.num_tiles ? it.num_steps : 1);
    const int its_class = it.num_tiles ? length_classes::class_of(longest, it.num_steps) : PLAN_CLASSES;
    int tiles = 0, steps = 0;
    for (int i = 0; i < PLAN_CLASSES && longest > DECODE_STAGES; i++) {
        const int its_tiles = __reduce_add_sync(~0u, its_class == i ? it.num_tiles : 0);
        const int its_steps = __reduce_add_sync(~0u, its_class == i ? all_steps : 0);
        if (lane == i) tiles = its_tiles, steps = its_steps;
    }
    const int end_of_longest = 32 - __clz(__ballot_sync(~0u, its_class == 0));
    return choose_cut(shape, length_classes::of(longest, tiles, steps), num_seqs, total, end_of_longest);
}

/* The same: the unit of that number. */
__device__ static inline attention_unit find_unit(const decode_shape &shape, const planned_sequence &it, int num_seqs,
                                                  int number, const decode_cut &cut)
{
    const int lane = threadIdx.x % 32;
    const sequence_parts parts(shape, cut, lane, it);
    const int num_first = parts.num_first(), num_placed = num_first ? num_first + it.num_tiles : 0;
    int first_before = num_first, placed_before = num_placed; /* so far with this lane's */
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        int its_first = __shfl_up_sync(~0u, first_before, distance);
        int its_placed = __shfl_up_sync(~0u, placed_before, distance);
        if (lane >= distance) first_before += its_first, placed_before += its_placed;
    }
    int last_before = cut.are_behind_all ? 0 : __shfl_sync(~0u, first_before, 31);
    const int others_before = cut.are_behind_all ? __reduce_add_sync(~0u, it.num_tiles) : 0; /* of the first ones */
    first_before -= num_first, placed_before -= num_placed;
#pragma unroll 1
    for (int first = 0; first < num_seqs; first += LANES_AT_ONCE)
#pragma unroll
        for (int other = first; other < first + LANES_AT_ONCE; other++) {
            int its_bucket = __shfl_sync(~0u, parts.bucket_of_last, other);
            int its_tiles = __shfl_sync(~0u, it.num_tiles, other);
            if (its_bucket < parts.bucket_of_last || (its_bucket == parts.bucket_of_last && other < lane))
                last_before += its_tiles;
        }
    const unsigned int among_first = number - others_before - first_before, among_last = number - last_before;
    const bool is_first = among_first < (unsigned)num_first, is_last = among_last < (unsigned)it.num_tiles;
    const int owner = __ffs(__ballot_sync(~0u, is_first || is_last)) - 1;
    if (owner < 0) return {};
    int2 at = {(int)among_last, parts.num_parts - 1}; /* tile and part */
    if (is_first) at = divide_small((int)among_first, parts.num_parts - 1);
    return of_lane(parts.unit_of(it, lane, at.x, at.y, placed_before), owner);
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
