/* attention_prefill.h - what the two prefill kernels share: items of work, and the order in which CTAs take them.
 *
 * An item is `positions` consecutive query tokens of one sequence times the query heads of one KV head, so that K and V
 * are read once for the whole group, and short sequences waste few rows. Every CTA works the list of items out for
 * itself from the lengths on the device, longest first; a counter says who takes what. Nothing is planned on the host.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_H
#define PK_CUDA_ATTENTION_PREFILL_H

#include "cuda/attention.h"

struct prefill_batch {
    pk_attention_args args;
    row_filter filter;
    unsigned int *counters; /* items taken beyond the first of each CTA, CTAs done; zero between calls */
    pk_cuda_bad_id *bad_id;
    int group, positions;          /* query heads of a KV head; query tokens of an item */
    int block_shift;               /* log2(block_size), or -1 */
    int window_left, window_right; /* -1: unbounded */
    float chunk_keys;              /* whose K and V, of all heads, stay in the L2 cache while they are in use */

    /* Every sequence is one item of a KV head: its keys are read once. */
    __host__ __device__ bool reads_keys_once() const { return args.max_seqlen_q <= positions; }
};

/* num_positions 0: behind the end of the list. */
struct prefill_item {
    int seq, kv_head;
    int first_token, num_positions; /* rows of q */
    int first_key;                  /* the key that causal position 0 of the item sees last; may be negative */
    int context_len;
    int begin, end; /* the keys that some position sees */
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

/* The list of items, walked forward; all lanes of one warp hold the same state but for their own sequence. Which CTA
 * takes which item is decided by a counter. The order: chunks of neighbouring sequences (so that the keys in use stay
 * in the L2 cache), in a chunk falling levels, on a level sequence by sequence, all KV heads. An item's level is the
 * number of its keys in units of `positions`; a sequence has at most one item of a level. */
struct prefill_schedule {
    sequence_view mine; /* lane's sequence of the chunk */
    int num_items, first_level;
    int next_seq, first_seq, seqs_per_chunk;
    int chunk_begin, pairs; /* items before the chunk; (sequence, item) pairs of the chunk */
    int level, next_level;  /* the level in hand, the next that has items */
    int before, count;      /* pairs above the level, on it */
    int index;              /* of the item taken last, or -1 */

    /* About as many sequences as fit in the cache together, at most one a lane. */
    __device__ void start(const prefill_batch &batch)
    {
        float keys = 0;
        for (int seq = threadIdx.x & 31; seq < batch.args.num_seqs; seq += 32) keys += batch.args.context_lens[seq];
        for (int i = 16; i; i /= 2) keys += __shfl_xor_sync(~0u, keys, i);
        float seqs = batch.chunk_keys * batch.args.num_seqs / fmaxf(keys, 1.0f);
        seqs_per_chunk = (int)fminf(fmaxf(seqs, 1.0f), 32.0f);
        next_seq = 0;
        chunk_begin = 0;
        pairs = 0;
        index = -1;
    }

    /* This CTA's next item. To be called until there is none, once: then its part in the counters is done. */
    __device__ prefill_item take_next(const prefill_batch &batch)
    {
        int lane = threadIdx.x & 31;
        if (index < 0)
            index = (int)blockIdx.x;
        else
            index = (int)__shfl_sync(~0u, lane == 0 ? gridDim.x + atomicAdd(&batch.counters[0], 1u) : 0, 0);
        prefill_item item = find(batch);
        if (item.num_positions == 0 && lane == 0 && atomicInc(&batch.counters[1], gridDim.x - 1) == gridDim.x - 1)
            batch.counters[0] = 0; /* the last CTA: atomicInc has put its own back */
        return item;
    }

    __device__ bool next_chunk(const prefill_batch &batch)
    {
        if (next_seq >= batch.args.num_seqs) return false;
        chunk_begin += pairs * (int)batch.args.num_kv_heads;
        first_seq = next_seq;
        next_seq += seqs_per_chunk;
        int seq = first_seq + (threadIdx.x & 31);
        mine = {};
        num_items = 0;
        if (seq < next_seq && seq < batch.args.num_seqs) {
            mine = view_sequence(batch.args, seq, batch.bad_id, blockIdx.x == 0);
            int64_t rows = (int64_t)mine.num_queries * batch.group;
            if (rows > batch.filter.min_rows && rows <= batch.filter.max_rows)
                num_items = (mine.num_queries + batch.positions - 1) / batch.positions;
        }
        first_level = max(mine.context - mine.num_queries, 0) / batch.positions;
        pairs = __reduce_add_sync(~0u, num_items);
        level = __reduce_max_sync(~0u, num_items ? first_level + num_items - 1 : -1);
        before = 0;
        scan_level();
        return true;
    }
    __device__ void scan_level()
    {
        int end = first_level + num_items;
        count = __popc(__ballot_sync(~0u, first_level <= level && level < end));
        next_level = __reduce_max_sync(~0u, num_items && first_level < level ? min(level, end) - 1 : -1);
    }
    /* Item `index` of the whole list, which does not go down from call to call. */
    __device__ prefill_item find(const prefill_batch &batch)
    {
        int num_heads = (int)batch.args.num_kv_heads;
        while (index - chunk_begin >= pairs * num_heads)
            if (!next_chunk(batch)) return prefill_item{};
        int pair = (index - chunk_begin) / num_heads;
        while (pair >= before + count) {
            before += count;
            level = next_level;
            scan_level();
        }
        prefill_item item = describe(batch, pair - before);
        item.kv_head = index - chunk_begin - pair * num_heads;
        return item;
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

/* `rows`: of an item, at least the heads of a group. num_ctas: at most that many, or as many as there can be items. */
static inline pk_status make_prefill_batch(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call,
                                           int rows, prefill_batch *batch, int64_t *num_ctas)
{
    pk_cuda_scratch scratch;
    PK_TRY(pk_cuda_scratch_of(call, &scratch));
    batch->args = *args;
    batch->filter = filter;
    batch->counters = scratch.counters;
    batch->bad_id = call.device->bad_id;
    batch->group = (int)(args->num_q_heads / args->num_kv_heads);
    batch->positions = rows / batch->group;
    batch->block_shift = -1;
    for (int shift = 0; shift < 31; shift++)
        if (args->block_size == 1ll << shift) batch->block_shift = shift;
    batch->window_left = prefill_window(args->window_left);
    batch->window_right = prefill_window(args->window_right);
    int cache_bytes = args->cache_dtype == PK_F8E4M3 ? 1 : 2;
    batch->chunk_keys = (float)call.device->l2_bytes / (float)(4 * cache_bytes * args->num_kv_heads * args->head_dim);
    /* No chunks, which a CTA walks through one behind the other. */
    if (batch->reads_keys_once()) batch->chunk_keys = INFINITY;
    int64_t most_items = (args->num_tokens / batch->positions + args->num_seqs) * args->num_kv_heads;
    if (most_items < *num_ctas) *num_ctas = most_items;
    return PK_OK;
}

#endif
