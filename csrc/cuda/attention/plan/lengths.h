/* lengths.h - how long the parts are into which sequences are cut (units.h).
 *
 * A slot is a place for a CTA. A rest is the last part of a sequence that is cut.
 *
 * Few sequences: all parts run at once. We try 32 lengths of parts and take the one that should end first
 * (best_length). Short sequences and short rests need no slot of their own: each follows where another unit ends
 * (slots_tried). The same is done for up to four times as many sequences as slots, if any length fits.
 *
 * Many, or short ones: a sequence is cut only when it exceeds some 1.5 times a CTA's average share (lengths_of_share),
 * into parts of a share where that saves some steps. When the last wave would be nearly empty we split finer, because
 * merging costs less than the idle SMs, but not where a few are far longer than the others. Of sequences of one length
 * only those are cut that full waves leave over (cut_left_over).
 *
 * The hardware hands out the CTAs, longest first, and those that still run at the end draw the whole bandwidth. What a
 * CTA has under way at once is never cut: where the table has no room for more keys, a sequence is one unit. With
 * num_splits every sequence has up to that many parts, whose number and borders depend on its own length alone.
 */
#ifndef PK_CUDA_ATTENTION_PLAN_LENGTHS_H
#define PK_CUDA_ATTENTION_PLAN_LENGTHS_H

#include "cuda/attention/plan/plan.h"
#include "cuda/thresholds.h"

enum {
    LENGTHS_TRIED = 32, /* of parts: a lane each */
    FEWEST_KEYS = 1024  /* of a part, with num_splits; a power of two, as a step */
};

/* In steps: the longest sequence that is not cut, and the longest part of one that is. Its parts are about as long as each
 * other. With leaves_rests all but the last one are `cut` long, and the rest is as short as that makes it. */
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
/* Whether short sequences, and short rests, may do without a slot of their own. A rest is one start more than if nothing
 * were cut there, so it has to be worth it: a slot's share of all steps must be long. A short sequence starts in any case.
 * A share of a few steps is enough for it, unless there are more sequences than slots; then the share must be long, too.
 * Where all have one length none is short. */
struct slot_sharing {
    bool of_sequences, of_rests;
    int num_equal; /* rests, where all sequences have one length and it matters when they end; else 0 */
};
__device__ static inline slot_sharing find_sharing(const decode_shape &shape, int total, int longest)
{
    const int mean = total / max(shape.num_segments, 1);
    const bool have_share = shape.may_share_slots && total >= thresholds::FEWEST_STEPS_OF_SHARE * shape.slots;
    const bool are_long = have_share && total >= thresholds::STEPS_TO_LEAVE_RESTS * shape.slots;
    const bool are_uneven = shape.num_segments <= shape.slots && 10 * mean < thresholds::EVEN_TENTHS * longest;
    const bool are_equal = shape.late_share > 0 && are_long && mean + 1 >= longest; /* to a step */
    return {have_share && (are_long || are_uneven), are_long, are_equal ? divide_small(total, longest).x : 0};
}
/* Whether a sequence or a rest is so short that it may follow a part, or another one like it, in one slot. */
__device__ static inline bool is_short(int num_steps, int length) { return 2 * num_steps <= length; }
/* How many slots a tile takes. A short sequence or a short rest takes none, if it may do without.
 * Parts are at least as long as a slot's share of all steps, so the slots that are left have time for it. If it waits until
 * the first parts end, it has more of the bandwidth then (decode/NOTES.md #108). */
__device__ static inline int slots_tried(slot_sharing sharing, int num_steps, int length, float inverse)
{
    const int parts = count_tried(num_steps, length, inverse), last = num_steps - (parts - 1) * length;
    const bool may_follow = parts == 1 ? sharing.of_sequences : sharing.of_rests;
    return parts - (may_follow && is_short(last, length));
}
/* What merging so many parts of a tile takes, counted in steps of a CTA. */
__device__ static inline float steps_of_merging(const decode_shape &shape, int parts)
{
    int batches = (parts + MERGE_BATCH - 1) / MERGE_BATCH;
    return parts == 1 ? 0 : (float)batches * shape.batch_steps + (float)parts * shape.part_steps;
}
/* How much later than the parts the short rests of sequences of one length end, in steps. They take turns in the slots
 * that are left. Where their number is no multiple of those slots, some slots have one rest more than the others. Rests of
 * unlike lengths even that out, and are not looked at (decode/NOTES.md #109). */
__device__ static inline float steps_late(const decode_shape &shape, slot_sharing sharing, int rest, int length,
                                          int slots)
{
    if (sharing.num_equal == 0 || !is_short(rest, length)) return 0;
    const float turns = ceilf(__fdividef((float)sharing.num_equal, (float)(shape.slots - slots)));
    return shape.late_share * fmaxf(0, turns * (float)rest - (float)length);
}
/* An estimate of what all parts take, in steps of a CTA; INFINITY where there are too few slots. All SMs share the memory's bandwidth: that takes
 * longer, but equally for every length. */
__device__ static inline float steps_of(const decode_shape &shape, slot_sharing sharing, int longest, int length,
                                        int slots)
{
    if (slots > shape.slots) return INFINITY;
    const int parts = count_tried(longest, length, __frcp_rd((float)length)), rest = longest - (parts - 1) * length;
    return (float)length + steps_late(shape, sharing, rest, length, slots) + steps_of_merging(shape, parts);
}
/* A warp, with a length a lane: the one that takes least time, and of those the longest; 0 if there are too few slots for
 * any. */
__device__ static inline int best_length(const decode_shape &shape, slot_sharing sharing, int longest, int length,
                                         int slots)
{
    const float steps = steps_of(shape, sharing, longest, length, slots);
    length = __shfl_sync(~0u, length, lane_of_least(steps));
    return __ballot_sync(~0u, steps < INFINITY) ? length : 0;
}
/* Where the parts need not all run at once. Each cut costs a merge, so some sequences stay whole: those up to `length`.
 * Where there are more tiles than places also those up to a place's share, or up to `mean`, whichever is less; that is
 * the mean length of what is long enough to be cut. Else all, if the longest is hardly longer than `length`, and either
 * most are as long as that or a CTA has an SM to itself. A part of the others is a share at most, where that saves some
 * steps of what is waited for at the end. */
__device__ static inline part_lengths lengths_of_share(const decode_shape &shape, int total, int longest, int mean)
{
    if (shape.num_splits) return {longest, longest, false}; /* count_parts does not read them */
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
    int first, length;   /* length 0: there are none */
    bool are_behind_all; /* so few that their parts go to the end; else to the front */
    /* Where there are some, no other sequence is cut. */
    __device__ part_lengths lengths_of(int seq, int longest, const part_lengths &of_others) const
    {
        if (length == 0) return of_others;
        return seq < first ? part_lengths{longest, longest, false} : part_lengths{length, length, false};
    }
    /* No whole sequence and no last part of another is longer. */
    __device__ int longest_last(int longest, const part_lengths &of_others) const
    {
        return length ? longest : min(longest, max(of_others.uncut, of_others.cut));
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
    const bool are_few = 100 * left <= thresholds::FEW_LEFT_PERCENT * shape.slots;
    return {num_long - left, __shfl_sync(~0u, length, best), are_few};
}

/* What a sequence's tiles add to the sum and to the number that the mean is of. */
__device__ static inline int2 cuttable(const planned_sequence &it)
{
    bool is_long = it.num_steps > DECODE_STAGES;
    return {is_long ? it.num_tiles * it.num_steps : 0, is_long ? it.num_tiles : 0};
}

#endif
