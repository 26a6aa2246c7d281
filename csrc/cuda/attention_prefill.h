/* attention_prefill.h - what the two prefill kernels share: items of work, and the order in which CTAs take them.
 *
 * An item is `positions` consecutive query tokens of one sequence times the query heads of one KV head, so that K and V
 * are read once for the whole group, and short sequences waste few rows. Every CTA works the list of items out for
 * itself from the lengths on the device, longest first; a counter says who takes what. Nothing is planned on the host.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_H
#define PK_CUDA_ATTENTION_PREFILL_H

#include "cuda/attention.h"
#include "cuda/thresholds.h"

struct prefill_batch {
    pk_attention_args args;
    row_filter filter;
    unsigned int *counters; /* items taken beyond the first of each CTA, CTAs done; zero between calls */
    pk_cuda_bad_id *bad_id;
    int group, positions;          /* query heads of a KV head; query tokens of an item */
    int tile;                      /* keys that are multiplied at once: what borders of parts are multiples of */
    int block_shift;               /* log2(block_size), or -1 */
    int window_left, window_right; /* -1: unbounded */
    float chunk_keys;              /* whose K and V, of all heads, stay in the L2 cache while they are in use */
    float *partials;               /* room for what parts leave */
    int most_parts;                /* that there is room for */

    /* The decode kernel has been launched for the other sequences of the batch, and may still run. */
    __device__ bool is_beside_decode() const { return filter.min_rows > 0; }
    /* Every sequence is one item of a KV head: its keys are read once. */
    __host__ __device__ bool reads_keys_once() const { return args.max_seqlen_q <= positions; }
};

/* num_positions 0: beyond the end of the list. begin == end in a part: fewer keys than parts, and it is nobody's. */
struct prefill_item {
    int seq, kv_head;
    int first_token, num_positions; /* rows of q */
    int first_key;                  /* the key that causal position 0 of the item sees last; may be negative */
    int context_len;
    int begin, end; /* the keys that some position sees, of them those of the part */
    int part, num_parts;
    int first_slot; /* of the item's first part among all parts */
};

/* Keys that a position sees: [begin, end). `diagonal` is the key at its own place, item.first_key + position. */
__device__ static inline int visible_begin(const prefill_batch &batch, int diagonal)
{
    return batch.window_left < 0 ? 0 : max(diagonal - batch.window_left, 0);
}
__device__ static inline int visible_end(const prefill_batch &batch, int diagonal, int context_len)
{
    return batch.window_right < 0 ? context_len : max(min(context_len, diagonal + batch.window_right + 1), 0);
}

/* Into how many parts items are cut. What they have in common is their level, so all items of a level have as many.
 *
 * Time is counted in keys that a CTA goes through: 128 of them take 1.4 us with 128 rows of 128 dims. The lengths are
 * known by their sum and maximum alone: with parts of at most `length` keys there are about sum / length of them, and
 * half a part more per item where lengths differ. They run in waves of one per CTA. The CTA that comes last merges the
 * parts of an item when the list is at its end, and it may be the last of as many items as there are waves. */
struct prefill_parts {
    int length; /* keys of a part, or 0: items stay whole */

    /* Whether any lengths are long enough, by what the host knows: so many items a CTA, at least, which see half of
     * their own sequence's queries, at least. */
    static bool may_pay(const pk_attention_args &args, double items)
    {
        if (items > thresholds::MOST_WAVES_TO_CUT) return false;
        int64_t longest = args.max_blocks_per_seq * args.block_size;
        if (args.window_left >= 0 && args.window_left < longest) longest = args.window_left;
        double own_keys = 0.5 * (double)args.num_tokens / (double)args.num_seqs;
        return longest >= thresholds::FEWEST_KEYS_TO_CUT &&
               (double)longest > items * (own_keys + thresholds::PART_START);
    }

    /* About as many as an item of the level goes through. */
    __device__ static int keys_of(const prefill_batch &batch, int level)
    {
        int keys = (level + 1) * batch.positions;
        return batch.window_left < 0 ? keys : min(keys, batch.window_left + 2 * batch.positions);
    }
    __device__ int count(const prefill_batch &batch, int level) const
    {
        return length ? (keys_of(batch, level) + length - 1) / length : 1;
    }

    /* One warp. Each lane has some of the items: their number, the sum and the maximum of their keys. */
    __device__ void choose(const prefill_batch &batch, float items, float keys, int longest)
    {
        for (int i = 16; i; i /= 2) {
            items += __shfl_xor_sync(~0u, items, i);
            keys += __shfl_xor_sync(~0u, keys, i);
        }
        longest = __reduce_max_sync(~0u, longest);
        items *= batch.args.num_kv_heads;
        keys *= batch.args.num_kv_heads;
        length = 0;
        if (items == 0 || items > thresholds::MOST_WAVES_TO_CUT * gridDim.x || longest < thresholds::FEWEST_KEYS_TO_CUT)
            return;
        int parts = (threadIdx.x & 31) + 1; /* of the longest */
        int mine = ((longest + parts - 1) / parts + batch.tile - 1) / batch.tile * batch.tile;
        float unevenness = 1 - keys / (items * longest);
        float units = parts == 1 ? items : keys / mine + items * fminf(4 * unevenness, 0.5f);
        float time = fmaxf(mine, ceilf(units / gridDim.x) * (keys / units + thresholds::PART_START));
        if (parts > 1) time += thresholds::PART_LEAVE + thresholds::PART_MERGE * (parts + ceilf(units / gridDim.x));
        /* Of those that are cut, surely no fewer than there are: each has more keys than one part. */
        if (parts > 1 && keys / mine + fminf(keys / mine, items) > batch.most_parts) time = INFINITY;
        float least = time;
        for (int i = 16; i; i /= 2) least = fminf(least, __shfl_xor_sync(~0u, least, i));
        int best = __ffs(__ballot_sync(~0u, time == least)) - 1;
        if (best > 0) length = __shfl_sync(~0u, mine, best);
    }
};

/* The list of items, walked forward; all lanes of one warp hold the same state but for their own sequence. Which CTA
 * takes which item is decided by a counter. The order: chunks of neighbouring sequences (so that the keys in use stay
 * in the L2 cache), sections of KV heads (all, or where one sequence's keys are far more than the cache holds, as many
 * as fit), in a section falling levels, on a level sequence by sequence, its heads. An item's level is the number of
 * its keys in units of `positions`; a sequence has at most one item of a level. */
template <bool CUTS>
struct prefill_schedule {
    prefill_parts parts; /* of CUTS */
    sequence_view mine;  /* lane's sequence of the chunk */
    int num_items, first_level;
    int next_seq, first_seq, seqs_per_chunk;
    int first_head, num_heads;        /* of the section */
    int section_begin, entries;       /* of the list: those before the section; those of the chunk, of a KV head */
    int level, next_level, top_level; /* the level in hand, the next that has items, the chunk's first */
    int before, count;                /* entries of a KV head above the level; items on it */
    int first_slot, chunk_slots;      /* parts before the section; of a KV head: these are a section's first entries */
    int index;                        /* of the entry taken last, or -1 */

    /* About as many sequences as fit in the cache together, at most one per lane. Lengths are only brought into their
     * range, so that no sum goes wrong: what is not sound is recorded when its turn comes. */
    __device__ void start(const prefill_batch &batch)
    {
        const pk_attention_args &args = batch.args;
        const int most_keys = (int)min(args.max_blocks_per_seq * args.block_size, (int64_t)1 << 30);
        float context_keys = 0, items = 0, keys = 0;
        int longest = 0;
        if (CUTS || !batch.reads_keys_once())
#pragma unroll 4
            for (int seq = threadIdx.x & 31; seq < args.num_seqs; seq += 32) {
                int context = min(max(args.context_lens[seq], 0), most_keys);
                context_keys += context;
                if constexpr (!CUTS) continue;
                int queries = (int)args.max_seqlen_q;
                if (args.cu_seqlens_q) queries = min(args.cu_seqlens_q[seq + 1] - args.cu_seqlens_q[seq], queries);
                add_items(batch, queries, context, items, keys, longest);
            }
        for (int i = 16; i; i /= 2) context_keys += __shfl_xor_sync(~0u, context_keys, i);
        float seqs = batch.chunk_keys * args.num_seqs / fmaxf(context_keys, 1.0f);
        seqs_per_chunk = (int)fminf(fmaxf(seqs, 1.0f), 32.0f);
        next_seq = 0;
        section_begin = 0;
        entries = 0;
        first_head = num_heads = (int)args.num_kv_heads; /* behind the last one of no chunk */
        first_slot = chunk_slots = 0;
        index = -1;
        if constexpr (CUTS) parts.choose(batch, items, keys, longest);
    }

    /* Of a sequence, to what prefill_parts wants to know. */
    __device__ static void add_items(const prefill_batch &batch, int queries, int context, float &items, float &keys,
                                     int &longest)
    {
        int64_t rows = (int64_t)queries * batch.group;
        if (rows <= batch.filter.min_rows || rows > batch.filter.max_rows) return;
        int count = (queries + batch.positions - 1) / batch.positions;
        int level = max(context - queries, 0) / batch.positions; /* of the first item */
        float levels = count * (level + 1.0f) + 0.5f * count * (count - 1.0f);
        int most = prefill_parts::keys_of(batch, level + count - 1);
        items += count;
        keys += fminf(levels * batch.positions, (float)count * most);
        longest = max(longest, most);
    }

    /* The lane's sequence, and its items. */
    __device__ void measure(const prefill_batch &batch, int seq)
    {
        mine = {};
        num_items = 0;
        if (seq < batch.args.num_seqs) {
            mine = view_sequence(batch.args, seq, batch.bad_id, blockIdx.x == 0);
            int64_t rows = (int64_t)mine.num_queries * batch.group;
            if (rows > batch.filter.min_rows && rows <= batch.filter.max_rows)
                num_items = (mine.num_queries + batch.positions - 1) / batch.positions;
        }
        first_level = max(mine.context - mine.num_queries, 0) / batch.positions;
    }

    /* This CTA's next item. To be called until there is none, once: then its part in the counters is done. */
    __device__ prefill_item take_next(const prefill_batch &batch)
    {
        int lane = threadIdx.x & 31;
        prefill_item item;
        do {
            if (index < 0)
                index = (int)blockIdx.x;
            else
                index = (int)__shfl_sync(~0u, lane == 0 ? gridDim.x + atomicAdd(&batch.counters[0], 1u) : 0, 0);
            item = find(batch);
        } while (item.part >= item.num_parts); /* it has fewer than its level says */
        if (item.num_positions == 0 && lane == 0 && atomicInc(&batch.counters[1], gridDim.x - 1) == gridDim.x - 1)
            batch.counters[0] = 0; /* the last CTA: atomicInc has put its own back */
        return item;
    }

    __device__ bool next_section(const prefill_batch &batch)
    {
        int all_heads = (int)batch.args.num_kv_heads;
        section_begin += entries * num_heads;
        first_slot += chunk_slots * num_heads;
        first_head += num_heads;
        if (first_head >= all_heads) {
            if (next_seq >= batch.args.num_seqs) return false;
            first_seq = next_seq;
            next_seq += seqs_per_chunk;
            int seq = first_seq + (threadIdx.x & 31);
            measure(batch, seq < next_seq ? seq : (int)batch.args.num_seqs);
            entries = __reduce_add_sync(~0u, num_items);
            if constexpr (CUTS) count_parts(batch);
            top_level = __reduce_max_sync(~0u, num_items ? first_level + num_items - 1 : -1);
            first_head = 0;
            num_heads = heads_at_once(batch);
        }
        num_heads = min(num_heads, all_heads - first_head);
        level = top_level;
        before = 0;
        scan_level();
        return true;
    }
    /* Sections cost the end of the list some of its balance. */
    __device__ int heads_at_once(const prefill_batch &batch) const
    {
        int all_heads = (int)batch.args.num_kv_heads, keys = __reduce_add_sync(~0u, num_items ? mine.context : 0);
        float share = batch.chunk_keys / (float)max(keys, 1);
        return share < 1.0f / thresholds::WHOLE_HEADS_CACHES ? max((int)(share * all_heads), 1) : all_heads;
    }
    /* Of the chunk: its entries, and which of them are parts: those of the highest levels. */
    __device__ void count_parts(const prefill_batch &batch)
    {
        int more = 0, in_parts = 0;
        for (int i = num_items - 1, num_parts; i >= 0; i--) {
            if ((num_parts = parts.count(batch, first_level + i)) == 1) break;
            more += num_parts - 1;
            in_parts += num_parts;
        }
        entries += __reduce_add_sync(~0u, more);
        chunk_slots = __reduce_add_sync(~0u, in_parts);
    }
    __device__ void scan_level()
    {
        int end = first_level + num_items;
        count = __popc(__ballot_sync(~0u, first_level <= level && level < end));
        next_level = __reduce_max_sync(~0u, num_items && first_level < level ? min(level, end) - 1 : -1);
    }
    __device__ static prefill_item end_of_list()
    {
        prefill_item none = {};
        none.num_parts = 1;
        return none;
    }
    /* Entry `index` of the whole list, which does not go down from call to call. On a level the parts of an item follow
     * each other, and the items of a sequence's heads. */
    __device__ prefill_item find(const prefill_batch &batch)
    {
        int num_parts = 1;
        while (index - section_begin >= entries * num_heads)
            if (!next_section(batch)) return end_of_list();
        int at = index - section_begin, pair = at / num_heads;
        while (true) {
            if constexpr (CUTS) num_parts = parts.count(batch, level);
            if (pair < before + count * num_parts) break;
            before += count * num_parts;
            level = next_level;
            scan_level();
        }
        int first = at - before * num_heads, part = 0;
        pair -= before;
        if (num_parts > 1) {
            part = first % num_parts;
            first /= num_parts;
            pair = first / num_heads;
        }
        prefill_item item = describe(batch, pair);
        item.kv_head = first_head + first - pair * num_heads;
        item.part = part;
        item.num_parts = 1;
        item.first_slot = first_slot + at - part; /* of parts, which come first */
        if (num_parts > 1) cut(item, num_parts, batch.tile);
        return item;
    }
    /* Leaves the item the keys of its part. Parts are as long as each other, give or take a tile. */
    __device__ static void cut(prefill_item &item, int num_parts, int tile)
    {
        int first = item.begin / tile, count = (item.end + tile - 1) / tile - first;
        item.num_parts = max(min(num_parts, count), 1);
        if (item.num_parts == 1) return;
        int begin = first + count * item.part / item.num_parts, end = first + count * (item.part + 1) / item.num_parts;
        item.begin = max(item.begin, begin * tile);
        item.end = min(item.end, end * tile);
    }
    /* The item of the rank-th sequence that has one on this level. */
    __device__ prefill_item describe(const prefill_batch &batch, int rank)
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

static inline int prefill_window(int64_t window) { return (int)(window < (1 << 30) ? window : 1 << 30); }

/* `rows`: of an item, at least the heads of a group. `tile`: keys. */
static inline pk_status make_prefill_batch(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call,
                                           int rows, int tile, prefill_batch *batch)
{
    pk_cuda_scratch scratch;
    PK_TRY(pk_cuda_scratch_of(call, &scratch, PK_SCRATCH_BYTES, PK_SCRATCH_PREFILL));
    batch->args = *args;
    batch->filter = filter;
    batch->counters = scratch.counters;
    batch->partials = (float *)scratch.data;
    batch->bad_id = call.device->bad_id;
    batch->group = (int)(args->num_q_heads / args->num_kv_heads);
    batch->positions = rows / batch->group;
    batch->tile = tile;
    batch->block_shift = -1;
    for (int shift = 0; shift < 31; shift++)
        if (args->block_size == 1ll << shift) batch->block_shift = shift;
    batch->window_left = prefill_window(args->window_left);
    batch->window_right = prefill_window(args->window_right);
    int cache_bytes = args->cache_dtype == PK_F8E4M3 ? 1 : 2;
    batch->chunk_keys = (float)call.device->l2_bytes / (float)(4 * cache_bytes * args->num_kv_heads * args->head_dim);
    /* No chunks, which a CTA walks through one after the other. */
    if (batch->reads_keys_once()) batch->chunk_keys = INFINITY;
    return PK_OK;
}

/* There are no more items than that. */
static inline int64_t most_items(const prefill_batch &batch)
{
    return (batch.args.num_tokens / batch.positions + batch.args.num_seqs) * batch.args.num_kv_heads;
}

/* Whether items of so many rows are to be cut where that pays. With num_splits a row's arithmetic may not depend on the
 * batch. */
static inline bool may_cut(const pk_attention_args &args, row_filter filter, int rows, int64_t num_ctas)
{
    int64_t group = args.num_q_heads / args.num_kv_heads, decode_tokens = args.num_seqs * (filter.min_rows / group);
    double items = (double)((args.num_tokens - decode_tokens) / (rows / group) * args.num_kv_heads); /* at least */
    return !args.num_splits && prefill_parts::may_pay(args, items / (double)num_ctas);
}

/* A row of the table of either kernel. */
using prefill_instance = pk_cuda_instance<pk_status(const pk_attention_args *, row_filter, const pk_cuda_call &)>;

#endif
