/* schedule.h - the order in which items of prefill are worked on, from the lengths on the device. */
#ifndef PK_CUDA_ATTENTION_PREFILL_SCHEDULE_H
#define PK_CUDA_ATTENTION_PREFILL_SCHEDULE_H

#include "cuda/attention/prefill/lengths.h"

/* The list of items, walked forward; all lanes of one warp hold the same state but for their own sequence. The order:
 * groups of 32 neighbouring sequences; in a group chunks (so that the keys in use stay in the L2 cache), those of the
 * longest sequences first (so that little is left to do when the first CTAs find nothing more); in a chunk falling
 * levels, on a level sequence by sequence, its KV heads. An item's level is the number of its keys in units of
 * `positions`; a sequence has at most one item of a level for each KV head, its bundle of query heads. So a run of levels
 * has the same sequences, and is passed in one step.
 *
 * Without a plan a CTA can do nothing before this has found its first item (prefill/NOTES.md #25, #33): it has to be
 * short. */
template <int CUT_TILE>
struct prefill_schedule {
    static constexpr bool WALKS = true;
    static constexpr bool CUTS = CUT_TILE > 0; /* items into parts of so many keys and multiples; 0: items stay whole */
    prefill_parts parts;                       /* of CUTS */
    sequence_view mine;                        /* lane's sequence of the group */
    int first_level;                           /* the lowest level of its items */
    int num_items;                             /* the items, or 0 where it is not in the chunk in hand; */
    int num_waiting;                           /* or 0 where it was in an earlier chunk */
    int first_seq;                             /* of the group */
    unsigned waiting_keys;                     /* of the group's sequences that come behind the chunk in hand; */
    unsigned keys_before;                      /* of those that are longer than the lane's; 0 where all are one chunk */
    int num_bundles;                           /* of a sequence */
    int chunk_begin;                           /* entries of the list before the chunk */
    int level, num_levels;                     /* the run in hand: its highest level, and how many there are */
    int next_level;                            /* the next below it that has items, or -1 */
    int before, count;                         /* entries of a bundle above the run; items on each of its levels */
    int num_parts;                             /* of each of them */
    int first_slot, num_slots; /* parts before the chunk; of a bundle: these follow each other in a chunk, */
    int first_cut;             /* behind so many entries of a bundle */

    __device__ static void look_again(const prefill_batch &, const prefill_item &) {} /* see prefill_planned */

    /* What is not sound about a length is recorded when its turn comes. */
    __device__ void start(const prefill_batch &batch)
    {
        if constexpr (CUTS) parts.choose(batch, CUT_TILE);
        first_seq = -32;
        num_items = num_waiting = 0;
        waiting_keys = 0;
        chunk_begin = 0;
        before = count = num_levels = num_parts = 0;
        next_level = -1;
        num_bundles = batch.num_bundles;
        first_slot = num_slots = first_cut = 0;
    }

    /* The lane's sequence, and its items. */
    __device__ void measure(const prefill_batch &batch, int seq)
    {
        mine = {};
        num_waiting = 0;
        if (seq < batch.args.num_seqs) {
            mine = view_sequence(batch.args, seq, batch.bad_id, blockIdx.x == 0);
            int64_t rows = (int64_t)mine.num_queries * batch.group.divisor;
            if (rows > batch.filter.min_rows && rows <= batch.filter.max_rows)
                num_waiting = batch.by_positions.divide_up(mine.num_queries);
        }
        first_level = batch.by_positions.divide(max(mine.context - mine.num_queries, 0));
    }
    /* At most 2^26, which is more than any cache holds: a sum over 32 lanes does not overflow. */
    __device__ unsigned keys_of_mine() const { return num_waiting ? min(max(mine.context, 1), 1 << 26) : 0; }

    /* The next chunk of the group, or of a group behind it: as many sequences as fit in the cache, at least one. Returns
     * its keys, or 0: there is none. */
    __device__ unsigned next_chunk(const prefill_batch &batch)
    {
        num_waiting -= num_items;
        while (waiting_keys == 0) {
            if (first_seq + 32 >= batch.args.num_seqs) return 0;
            first_seq += 32;
            measure(batch, first_seq + (threadIdx.x & 31));
            order(batch);
        }
        unsigned end = keys_before + keys_of_mine(), keys = waiting_keys;
        bool is_here = keys_before == 0 || (float)end <= batch.chunk_keys;
        num_items = is_here ? num_waiting : 0;
        if ((float)keys > batch.chunk_keys) keys = __reduce_max_sync(~0u, num_items ? end : 0);
        waiting_keys -= keys;
        keys_before -= keys; /* for sequences that still wait */
        return keys;
    }
    /* Counts the group's keys. Where they are more than one chunk, finds each sequence's place, from long to short. */
    __device__ void order(const prefill_batch &batch)
    {
        unsigned keys = keys_of_mine();
        waiting_keys = __reduce_add_sync(~0u, keys);
        keys_before = 0;
        if ((float)waiting_keys <= batch.chunk_keys) return;
        int lane = threadIdx.x & 31, end = first_level + num_waiting;
#pragma unroll 2
        for (int i = 0; i < 32; i++) {
            int its_end = __shfl_sync(~0u, end, i);
            unsigned its_keys = __shfl_sync(~0u, keys, i);
            if (its_end + (i < lane) > end) keys_before += its_keys; /* of equal ones those before it */
        }
    }

    /* Entry `index` of the whole list, which does not go down from call to call. On a level the parts of an item follow
     * each other, and the items of a sequence's bundles. */
    __device__ prefill_item find(const prefill_batch &batch, int index)
    {
        while (index - chunk_begin >= (before + num_levels * count * num_parts) * num_bundles) {
            before += num_levels * count * num_parts;
            if (num_parts > 1) num_slots += num_levels * count * num_parts;
            num_levels = 0;
            if (next_level >= 0)
                begin_run(batch, next_level);
            else if (!begin_chunk(batch, index))
                return prefill_end_of_list();
        }
        int at = index - chunk_begin;
        unsigned int in_run = at - before * num_bundles, entries = count * num_parts * num_bundles; /* of a level */
        int2 by_part = {(int)(in_run % entries), 0};
        if constexpr (CUTS) by_part = divide_small(by_part.x, num_parts);
        int2 by_bundle = divide_small(by_part.x, num_bundles);
        prefill_item item = describe(batch, level - (int)(in_run / entries), by_bundle.x);
        item.q_head = by_bundle.y * batch.heads;
        item.part = by_part.y;
        item.num_parts = 1;
        item.first_slot = first_slot + at - first_cut * num_bundles - item.part;
        if (CUTS && num_parts > 1) cut(item);
        return item;
    }

    __device__ bool begin_chunk(const prefill_batch &batch, int index)
    {
        if (next_chunk(batch) == 0) return false;
        chunk_begin += before * num_bundles;
        first_slot += num_slots * num_bundles;
        before = num_slots = 0;
        next_level = __reduce_max_sync(~0u, num_items ? first_level + num_items - 1 : -1);
        if constexpr (!CUTS) { /* a chunk that ends before the entry is passed at once */
            int entries = __reduce_add_sync(~0u, num_items);
            if (index - chunk_begin >= entries * num_bundles) before = entries, next_level = -1;
        }
        return true;
    }
    /* A run ends where a sequence's items begin or end, or have fewer parts. */
    __device__ void begin_run(const prefill_batch &batch, int highest)
    {
        level = highest;
        num_parts = CUTS ? parts.count(batch, level) : 1;
        if (num_slots == 0) first_cut = before;
        int end = first_level + num_items;
        bool is_here = first_level <= level && level < end, is_below = num_items && end <= level;
        count = __popc(__ballot_sync(~0u, is_here));
        int lowest = __reduce_max_sync(~0u, is_here ? first_level : is_below ? end : 0);
        if constexpr (CUTS) lowest = max(lowest, parts.lowest_of_same(batch, level, num_parts));
        num_levels = level - lowest + 1;
        next_level = __reduce_max_sync(~0u, num_items && first_level < lowest ? min(lowest, end) - 1 : -1);
    }
    /* Leaves the item the keys of its part. Parts are as long as each other, give or take a tile. */
    __device__ void cut(prefill_item &item) const
    {
        constexpr unsigned int TILE = CUTS ? CUT_TILE : 1;
        unsigned int first = (unsigned)item.begin / TILE,
                     count = ((unsigned)max(item.end, 1) + TILE - 1) / TILE - first;
        unsigned int parts = min((unsigned)num_parts, count), each = count / parts, part = item.part;
        item.num_parts = (int)parts;
        if (parts == 1) return;
        unsigned int more = count - each * parts, begin = first + part * each + min(part, more); /* a tile each */
        item.begin = max(item.begin, (int)(begin * TILE));
        item.end = min(item.end, (int)((begin + each + (part < more)) * TILE));
    }
    /* The item of the rank-th sequence that has one on a level of the run. */
    __device__ prefill_item describe(const prefill_batch &batch, int level, int rank)
    {
        int lane = threadIdx.x & 31, skipped = (level - first_level) * batch.positions;
        bool is_here = first_level <= level && level < first_level + num_items;
        unsigned here = __ballot_sync(~0u, is_here);
        int owner = __ffs(__ballot_sync(~0u, is_here && __popc(here & ((1u << lane) - 1)) == rank)) - 1;
        prefill_item item;
        item.seq = first_seq + owner;
        item.first_token = __shfl_sync(~0u, mine.first_query + skipped, owner);
        item.num_positions = __shfl_sync(~0u, min(batch.positions, mine.num_queries - skipped), owner);
        item.first_key = __shfl_sync(~0u, mine.context - mine.num_queries + skipped, owner);
        item.context_len = __shfl_sync(~0u, mine.context, owner);
        item.begin = visible_begin(batch, item.first_key);
        item.end = visible_end(batch, item.first_key + item.num_positions - 1, item.context_len);
        return item;
    }
};

#endif
