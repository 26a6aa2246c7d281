/* attention_plan_units.h - how sequences are cut into units (attention_plan.h). Two use it: the kernel that plans a
 * step for all layers (attention_plan.cu), and, where a call has no plan, each CTA of the decode kernel itself, which saves
 * the launch before it. It can do so where a warp has a lane for every sequence, or none is cut.
 *
 * Few sequences: all parts run at once, except that short sequences, and what is left of long ones, may follow each
 * other in a slot. We try 32 lengths of parts and take the one that should end first (best_length). The same is done for
 * nearly as many sequences as slots, if slots are shared. Many: a sequence is cut only when it exceeds some 1.5 times a
 * CTA's average share (lengths_of_share), into parts of a share where that saves some steps. When the last wave would be
 * nearly empty we split finer, because merging costs less than the idle SMs, but not where a few are far longer than the
 * others. Of sequences of one length only those are cut that full waves leave over (cut_left_over). The hardware hands
 * out the CTAs, longest first, and those that still run at the end draw the whole bandwidth. What a CTA has under way at
 * once is never cut: where the table has no room for more keys, a sequence is one unit. With num_splits every sequence has
 * up to that many parts, whose number and borders depend on its own length alone.
 */
#ifndef PK_CUDA_ATTENTION_PLAN_UNITS_H
#define PK_CUDA_ATTENTION_PLAN_UNITS_H

#include "cuda/attention_plan.h"
#include "cuda/thresholds.h"

enum {
    UNIT_BUCKETS = 32,  /* of lengths: units of one are in no order */
    LENGTHS_TRIED = 32, /* of parts: a lane each */
    SLOT = 64,          /* a slot is counted in 64ths, for sequences that share one */
    FEWEST_KEYS = 1024  /* of a part, with num_splits; a power of two, as a step */
};

/* In steps: the longest sequence that is not cut, and the longest part of one that is. Its parts are about as long as each
 * other. Where slots may be shared all but the last one are `cut` long, so that the rests of several sequences may follow
 * each other in a slot. */
struct part_lengths {
    int uncut, cut;
    bool leaves_rests;
};

__device__ static inline int count_parts(const decode_shape &shape, int num_steps, part_lengths most)
{
    if (shape.num_splits == 0)
        return num_steps <= max(DECODE_STAGES, most.uncut) ? 1 : divide_small(num_steps + most.cut - 1, most.cut).x;
    return max(1, min(shape.num_splits, num_steps >> (__clz(shape.step) - __clz(FEWEST_KEYS))));
}

/* Where parts are to fill the machine once, a length to try. The longest sequence has one part with the first, and with
 * the last as many as would fit if all sequences were cut to the same length. */
__device__ static inline int length_to_try(const decode_shape &shape, int total, int longest, int i)
{
    float most = fmaxf(1, __fdividef((float)longest * (float)shape.slots, (float)max(total, 1)));
    float parts = 1 + (most - 1) * ((float)i * (1.0f / (LENGTHS_TRIED - 1)));
    /* A little less, so that what goes into it without a rest is not rounded up. */
    return i == 0 ? longest : (int)ceilf(__fdividef(0.999999f * (float)longest, parts));
}
/* Parts of a sequence, as count_parts has it. Beyond MOST_STEPS_TRIED it may be one too few. */
__device__ static inline int count_tried(int num_steps, int length, float inverse /* rounded down */)
{
    return num_steps <= max(DECODE_STAGES, length) ? 1 : __float2int_ru((float)num_steps * inverse);
}
/* Whether short sequences and rests may follow each other in a slot. Each starts anew, so slots must have some steps to
 * save. Of nearly as many sequences as slots, a few that are far longer are better cut to shares, which fill all slots, and
 * the short ones follow behind them (lengths_of_share; decode/NOTES.md #107). */
__device__ static inline bool shares_slots(const decode_shape &shape, int total, int longest)
{
    if (!shape.may_share_slots || total < thresholds::FEWEST_STEPS_OF_SHARE * shape.slots) return false;
    const int share = total / shape.slots, saved = share * (shape.quarters - 4) / 4;
    return shape.is_one_wave || longest <= 2 * share || saved < thresholds::FEWEST_STEPS_SAVED;
}
/* Then what is no longer than the parts takes so many SLOT-ths of a slot. */
__device__ static inline int part_of_slot(const decode_shape &shape, int num_steps, int length)
{
    float in_slot = floorf(__fdividef(thresholds::OVERTIME * (float)length, (float)num_steps + shape.start_steps));
    return __float2int_ru(__fdividef(SLOT, fmaxf(in_slot, 1)));
}
template <bool SHARES>
__device__ static inline int slots_tried(const decode_shape &shape, int num_steps, int length, float inverse)
{
    int parts = count_tried(num_steps, length, inverse);
    if (!SHARES) return parts * SLOT;
    return (parts - 1) * SLOT + part_of_slot(shape, num_steps - (parts - 1) * length, length);
}
/* What merging so many parts of a tile takes, on a level or two, counted in steps of a CTA. */
__device__ static inline float steps_of_merging(const decode_shape &shape, int parts)
{
    int group = parts_of_group(shape, parts), batches = (group + MERGE_BATCH - 1) / MERGE_BATCH;
    float steps = (float)batches * shape.batch_steps + (float)group * shape.part_steps;
    if (parts > group) steps = 2 * steps + shape.level_steps;
    return parts == 1 ? 0 : steps;
}
/* An estimate, in the same; INFINITY where there are too few slots. All SMs share the memory's bandwidth: that takes
 * longer, but equally for every length. */
__device__ static inline float steps_of(const decode_shape &shape, int longest, int length, int slots)
{
    int parts = count_tried(longest, length, __frcp_rd((float)length));
    return slots > SLOT * shape.slots ? INFINITY : (float)length + steps_of_merging(shape, parts);
}
/* A warp, with a length a lane: the one that takes least time, and of those the longest. */
__device__ static inline int best_length(const decode_shape &shape, int longest, int length, int slots)
{
    return __shfl_sync(~0u, length, lane_of_least(steps_of(shape, longest, length, slots)));
}
/* Where the parts need not all run at once. Each cut costs a merge, so some sequences stay whole: those up to `length`.
 * Where there are more tiles than places also those up to a place's share, or up to `mean`, whichever is less; that is
 * the mean length of what is long enough to be cut. Else all, if the longest is hardly longer than `length`, and either
 * most are as long as that or a CTA has an SM to itself. A part of the others is a share at most, where that saves some
 * steps of what is waited for at the end. */
__device__ static inline part_lengths lengths_of_share(const decode_shape &shape, int total, int longest, int mean)
{
    int share = total / shape.slots + 1, quarters = shape.quarters;
    if (longest > 2 * share) quarters = max(quarters, 4); /* finer parts are for sequences of one length (#106) */
    int length = (share * quarters + 3) / 4;
    int cut = shape.cuts_to_shares && length - share >= thresholds::FEWEST_STEPS_SAVED ? share : length;
    if (shape.num_segments > shape.slots) length = max(length, min(mean, share)), cut = max(cut, min(mean, share));
    bool is_little = shape.num_segments <= shape.slots && 5 * longest <= thresholds::LITTLE_FIFTHS * length;
    return {is_little && (mean >= length || shape.ctas_per_sm == 1) ? longest : length, cut, false};
}
/* Sequences of one length, one tile each: full waves of them fill the slots, and a few are left over, the last ones, from
 * `first` on. These are cut into parts of `length` steps, which fill more of the slots. Left whole, they might take as
 * long as a full wave, in a few slots alone. */
struct sequences_left_over {
    int first, length; /* length 0: there are none */
    /* Where there are some, no other sequence is cut. */
    __device__ part_lengths lengths_of(int seq, int longest, const part_lengths &of_others) const
    {
        if (length == 0) return of_others;
        return seq < first ? part_lengths{longest, longest, false} : part_lengths{length, length, false};
    }
};
/* An estimate, in steps: waves of so many parts of each. BUSY_SHARE of the slots draws the whole bandwidth: fewer are no
 * faster. */
__device__ static inline float steps_of_left_over(const decode_shape &shape, int left, int parts, int length)
{
    const float waves = __fdividef((float)(left * parts), (float)shape.slots), full = floorf(waves + 1e-4f);
    const float last = waves - full < 1e-4f ? 0 : fmaxf(waves - full, thresholds::BUSY_SHARE);
    return (full + last) * ((float)length + shape.start_steps) + steps_of_merging(shape, parts);
}
/* A warp, with a number of parts a lane: the one that takes least time, if there is room for so many. */
__device__ static inline sequences_left_over cut_left_over(const decode_shape &shape, int num_seqs, int num_long,
                                                           int longest, int mean)
{
    const int2 waves = divide_small(num_long, shape.slots);
    const int left = waves.y, others = shape.num_segments - left;
    if (waves.x == 0 || left == 0 || shape.num_splits || shape.num_segments != num_seqs) return {};
    if (10 * mean < thresholds::EVEN_TENTHS * longest) return {};
    const int parts = (int)threadIdx.x % 32 + 1, length = divide_small(longest + parts - 1, parts).x;
    const bool have_room = left * parts <= min(shape.num_units - others, shape.max_slots);
    const bool are_possible = parts == 1 || (have_room && parts * DECODE_STAGES <= longest);
    const int best = lane_of_least(are_possible ? steps_of_left_over(shape, left, parts, length) : INFINITY);
    if (best == 0) return {};
    return {num_long - left, __shfl_sync(~0u, length, best)};
}

/* What a sequence's tiles add to the sum and to the number that the mean is of. */
__device__ static inline int2 cuttable(const planned_sequence &it)
{
    bool is_long = it.num_steps > DECODE_STAGES;
    return {is_long ? it.num_tiles * it.num_steps : 0, is_long ? it.num_tiles : 0};
}

/* The order of units. First, in bucket 0, come the parts of cut sequences, without the last part of each tile. Then come
 * those last parts and whole sequences, the longest first: this is their bucket. */
__device__ static inline int bucket_of(int num_steps, int num_parts, int longest, const part_lengths &most)
{
    int width = longest / (UNIT_BUCKETS - 1) + 1, last = num_steps;
    if (num_parts > 1) last = most.leaves_rests ? num_steps - (num_parts - 1) * most.cut : most.cut;
    return 1 + divide_small(max(longest - last, 0), width).x;
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

/* What all sequences take, in SLOT-ths, if parts are as long as this lane's length. A lane has a sequence, too. The last
 * lanes, whose sequences are too short to be cut or share no slot, are not looked at one by one: each tile takes a slot. */
template <bool SHARES>
__device__ static inline int sum_of_slots(const decode_shape &shape, int num_tiles, int num_steps, int length)
{
    int end = 32 - __clz(__ballot_sync(~0u, num_tiles && (SHARES || num_steps > DECODE_STAGES)));
    end = (end + LANES_AT_ONCE - 1) / LANES_AT_ONCE * LANES_AT_ONCE; /* so many are looked at below */
    int slots = SHARES ? 0 : SLOT * __reduce_add_sync(~0u, (int)threadIdx.x % 32 >= end ? num_tiles : 0);
    float inverse = __frcp_rd((float)length);
#pragma unroll 1
    for (int lane = 0; lane < end; lane += LANES_AT_ONCE)
#pragma unroll
        for (int i = 0; i < LANES_AT_ONCE; i++)
            slots += __shfl_sync(~0u, num_tiles, lane + i) *
                     slots_tried<SHARES>(shape, __shfl_sync(~0u, num_steps, lane + i), length, inverse);
    return slots;
}

/* A warp, with a sequence a lane: the unit of that number. If all run at once their order does not matter. */
__device__ static inline attention_unit find_unit(const decode_shape &shape, const planned_sequence &it, int num_seqs,
                                                  int number, int longest, const part_lengths &most, bool run_at_once)
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
    int last_before = __shfl_sync(~0u, first_before, 31); /* the last ones stand behind all others */
    first_before -= num_first, placed_before -= num_placed;
    if (run_at_once) {
        last_before += placed_before;
    } else {
        int bucket = bucket_of(it.num_steps, num_parts, longest, most);
#pragma unroll 1
        for (int first = 0; first < num_seqs; first += LANES_AT_ONCE)
#pragma unroll
            for (int other = first; other < first + LANES_AT_ONCE; other++) {
                int its_bucket = __shfl_sync(~0u, bucket, other), its_tiles = __shfl_sync(~0u, num_tiles, other);
                if (its_bucket < bucket || (its_bucket == bucket && other < lane)) last_before += its_tiles;
            }
    }
    unsigned int among_first = number - first_before, among_last = number - last_before;
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
    part_lengths most = {longest, longest, false};
    if (total == 0) return {};
    if (shape.are_whole) {
        attention_unit unit = unit_of(it, seq, 0, 0, 1, most);
        unit.num_parts = it.num_tiles; /* 0: not for the decode kernel */
        return unit;
    }
    const bool shares = shares_slots(shape, total, longest);
    const bool run_at_once = shape.is_one_wave || shares;
    if (longest > DECODE_STAGES && run_at_once) {
        int length = length_to_try(shape, total, longest, lane);
        int slots = shares ? sum_of_slots<true>(shape, it.num_tiles, it.num_steps, length)
                           : sum_of_slots<false>(shape, it.num_tiles, it.num_steps, length);
        length = best_length(shape, longest, length, slots);
        most = {length, length, shares};
    } else if (longest > DECODE_STAGES) {
        int2 mine = cuttable(it);
        int sum = __reduce_add_sync(~0u, mine.x), count = __reduce_add_sync(~0u, mine.y), mean = sum / max(count, 1);
        unsigned int are_long = __ballot_sync(~0u, mine.y > 0);
        sequences_left_over left_over = {};
        if (__popc(are_long) == 32 - __clz(are_long)) left_over = cut_left_over(shape, num_seqs, count, longest, mean);
        most = left_over.lengths_of(lane, longest, lengths_of_share(shape, total, longest, mean));
    }
    return find_unit(shape, it, num_seqs, number, longest, most, run_at_once && !shares);
}
/* The same as a function of its own, for kernels that usually have a plan. If it were inline, their CTAs would fetch
 * these instructions before the first copy and not use them. */
__device__ static __noinline__ attention_unit plan_unit_apart(const pk_attention_args &args, const decode_shape &shape,
                                                              int number, pk_cuda_bad_id *bad_id, bool is_recorder)
{
    return plan_unit(args, shape, number, bad_id, is_recorder);
}

#endif
