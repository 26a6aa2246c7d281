/* units.h - how sequences are cut into units (plan.h). Two use it: the kernel that plans a
 * step for all layers (plan.cu), and, where a call has no plan, each CTA of the decode kernel itself, which saves
 * the launch before it. It can do so where a warp has a lane for every sequence, or none is cut.
 */
#ifndef PK_CUDA_ATTENTION_PLAN_UNITS_H
#define PK_CUDA_ATTENTION_PLAN_UNITS_H

#include "cuda/attention/plan/lengths.h"

enum { UNIT_BUCKETS = 32 /* of lengths: units of one are in no order */ };

/* The order of units. First, in bucket 0, come the parts of cut sequences, without the last part of each tile. Then come
 * those last parts and whole sequences, the longest first. Only the parts of a few sequences that are left over come
 * after them: in front, they would make as many whole ones start late (decode/NOTES.md #110). */
__device__ static inline int bucket_of_parts(const sequences_left_over &left_over)
{
    return left_over.are_behind_all ? UNIT_BUCKETS - 1 : 0;
}
__device__ static inline int bucket_of_last(int num_steps, int num_parts, int longest_last, const part_lengths &most)
{
    int width = longest_last / (UNIT_BUCKETS - 1) + 1, last = num_steps;
    if (num_parts > 1) last = most.leaves_rests ? num_steps - (num_parts - 1) * most.cut : most.cut;
    return 1 + divide_small(max(longest_last - last, 0), width).x;
}

/* A part of a sequence's tile, not signed yet. */
__device__ static inline attention_unit unit_of(const planned_sequence &it, int seq, int tile, int part, int num_parts,
                                                const part_lengths &most)
{
    attention_unit unit = {0, seq, tile, it.view.first_query};
    unit.num_queries = it.view.num_queries;
    unit.context = it.view.context;
    unit.first_slot = it.view.first_slot;
    unit.num_parts = num_parts;
    unit.part = part;
    if (most.leaves_rests) {
        unit.first_step = part * most.cut;
        unit.end_step = part == num_parts - 1 ? it.num_steps : unit.first_step + most.cut;
        return unit;
    }
    int steps = it.num_steps / num_parts, num_longer = it.num_steps - steps * num_parts;
    unit.first_step = unit.part * steps + min(unit.part, num_longer);
    unit.end_step = unit.first_step + steps + (unit.part < num_longer);
    return unit;
}

constexpr int MOST_SEQS_OF_A_WARP = 32;

/* What a lane of the warp has. */
template <typename T>
__device__ static inline T of_lane(T it, int lane)
{
    for (int i = 0; i < (int)(sizeof(it) / sizeof(int)); i++) ((int *)&it)[i] = __shfl_sync(~0u, ((int *)&it)[i], lane);
    return it;
}

constexpr int LANES_AT_ONCE = 4; /* that a warp looks at one by one: what they have is under way together */

/* What all sequences take if parts are as long as this lane's length. A lane has a sequence, too. The last lanes, whose
 * sequences are too short to be cut and share no slot, are not looked at one by one: each tile takes a slot. */
__device__ static inline int sum_of_slots(slot_sharing sharing, int num_tiles, int num_steps, int length)
{
    int end = 32 - __clz(__ballot_sync(~0u, num_tiles && (sharing.of_sequences || num_steps > DECODE_STAGES)));
    end = (end + LANES_AT_ONCE - 1) / LANES_AT_ONCE * LANES_AT_ONCE; /* so many are looked at below */
    int slots = __reduce_add_sync(~0u, (int)threadIdx.x % 32 >= end ? num_tiles : 0);
    float inverse = __frcp_rd((float)length);
#pragma unroll 1
    for (int lane = 0; lane < end; lane += LANES_AT_ONCE)
#pragma unroll
        for (int i = 0; i < LANES_AT_ONCE; i++)
            slots += __shfl_sync(~0u, num_tiles, lane + i) *
                     slots_tried(sharing, __shfl_sync(~0u, num_steps, lane + i), length, inverse);
    return slots;
}

/* A warp, with a sequence a lane: the unit of that number. If all run at once their order does not matter. The parts but
 * the last ones stand before all others, or behind all. */
__device__ static inline attention_unit find_unit(const decode_shape &shape, const planned_sequence &it, int num_seqs,
                                                  int number, int longest_last, const part_lengths &most,
                                                  bool run_at_once, bool are_behind_all)
{
    int lane = threadIdx.x % 32, num_parts = count_parts(shape, it.num_steps, most), num_tiles = it.num_tiles;
    int num_first = num_tiles * (num_parts - 1); /* all units but the last ones of tiles */
    /* Last units that take a place among the parts. A whole sequence needs none, but has one where all run at once: then
     * the sum before this lane also says where its last units stand. */
    int num_placed = run_at_once || num_first ? num_tiles : 0;
    int first_before = num_first, placed_before = num_placed; /* so far with this lane's */
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        int its_first = __shfl_up_sync(~0u, first_before, distance);
        int its_placed = __shfl_up_sync(~0u, placed_before, distance);
        if (lane >= distance) first_before += its_first, placed_before += its_placed;
    }
    int last_before = are_behind_all ? 0 : __shfl_sync(~0u, first_before, 31);
    int others_before = are_behind_all ? __reduce_add_sync(~0u, num_tiles) : 0; /* of the first ones */
    first_before -= num_first, placed_before -= num_placed;
    if (run_at_once) {
        last_before += placed_before;
    } else {
        int bucket = bucket_of_last(it.num_steps, num_parts, longest_last, most);
#pragma unroll 1
        for (int first = 0; first < num_seqs; first += LANES_AT_ONCE)
#pragma unroll
            for (int other = first; other < first + LANES_AT_ONCE; other++) {
                int its_bucket = __shfl_sync(~0u, bucket, other), its_tiles = __shfl_sync(~0u, num_tiles, other);
                if (its_bucket < bucket || (its_bucket == bucket && other < lane)) last_before += its_tiles;
            }
    }
    unsigned int among_first = number - others_before - first_before, among_last = number - last_before;
    bool is_first = among_first < (unsigned)num_first, is_last = among_last < (unsigned)num_tiles;
    int owner = __ffs(__ballot_sync(~0u, is_first || is_last)) - 1;
    attention_unit unit = {};
    if (owner < 0) return unit;
    int2 at = {(int)among_last, num_parts - 1}; /* tile and part */
    if (is_first) at = divide_small((int)among_first, num_parts - 1);
    unit = unit_of(it, lane, at.x, at.y, num_parts, most);
    unit.first_part = first_before + placed_before + at.x * num_parts;
    return of_lane(unit, owner);
}

/* A warp: the unit of that number of a batch without a plan. A lane has a sequence. */
__device__ static inline attention_unit plan_unit(const pk_attention_args &args, const decode_shape &shape, int number,
                                                  pk_cuda_bad_id *bad_id, bool is_recorder)
{
    int lane = threadIdx.x % 32, num_seqs = (int)args.num_seqs;
    planned_sequence it = {};
    const int seq = shape.are_whole ? number : lane; /* where a sequence is one unit, all lanes have that one */
    is_recorder = is_recorder && (shape.are_whole || number == 0);
    if (shape.are_whole || lane < num_seqs) it = measure(args, shape, seq, bad_id, is_recorder);
    int total = __reduce_add_sync(~0u, it.num_tiles * it.num_steps);
    int longest = __reduce_max_sync(~0u, it.num_tiles ? it.num_steps : 1);
    part_lengths of_all = {longest, longest, false};
    sequences_left_over left_over = {};
    if (total == 0) return {};
    if (shape.are_whole) {
        attention_unit unit = unit_of(it, seq, 0, 0, 1, of_all);
        unit.num_parts = it.num_tiles; /* 0: not for the decode kernel */
        return unit;
    }
    const slot_sharing sharing = find_sharing(shape, total, longest);
    int length = 0;
    if (longest > DECODE_STAGES && (shape.is_one_wave || sharing.of_sequences)) {
        length = length_to_try(shape, total, longest, lane);
        int slots = sum_of_slots(sharing, it.num_tiles, it.num_steps, length);
        length = best_length(shape, sharing, longest, length, slots);
    }
    if (length) {
        of_all = {length, length, sharing.of_rests};
    } else if (longest > DECODE_STAGES) {
        int2 mine = cuttable(it);
        int sum = __reduce_add_sync(~0u, mine.x), count = __reduce_add_sync(~0u, mine.y), mean = sum / max(count, 1);
        unsigned int are_long = __ballot_sync(~0u, mine.y > 0);
        if (__popc(are_long) == 32 - __clz(are_long)) left_over = cut_left_over(shape, num_seqs, count, longest, mean);
        of_all = lengths_of_share(shape, total, longest, mean);
    }
    return find_unit(shape, it, num_seqs, number, left_over.longest_last(longest, of_all),
                     left_over.lengths_of(lane, longest, of_all), shape.is_one_wave && !sharing.of_sequences,
                     left_over.are_behind_all);
}
/* The same as a function of its own, for kernels that usually have a plan. If it were inline, their CTAs would fetch
 * these instructions before the first copy and not use them. */
__device__ static __noinline__ attention_unit plan_unit_apart(const pk_attention_args &args, const decode_shape &shape,
                                                              int number, pk_cuda_bad_id *bad_id, bool is_recorder)
{
    return plan_unit(args, shape, number, bad_id, is_recorder);
}

#endif
