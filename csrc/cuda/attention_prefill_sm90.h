/* attention_prefill_sm90.h - the producing half of attention_prefill_sm90.cu: which items there are, in which order
 * CTAs take them, and how their tiles get into shared memory.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_SM90_H
#define PK_CUDA_ATTENTION_PREFILL_SM90_H

#include "cuda/attention.h"
#include "cuda/sm90.h"

enum {
    ROWS = 128, /* of an item: 64 for each of the two warpgroups that compute */
    WARPGROUPS = 2,
    NUM_THREADS = 128 + 128 * WARPGROUPS,
    PRODUCER_REGISTERS = 40, /* 128 * 40 + 256 * 232 = 384 * 168: what the launch gives */
    CONSUMER_REGISTERS = 232,
    ITEM_SLOTS = 2 /* the item in work and the next one: taking more ahead would unbalance the end */
};

/* Shapes of one head_dim: what the tensor maps, the matrix descriptors and the registers must agree on. */
template <int head_dim>
struct tiling {
    static constexpr int tile = head_dim > 128 ? 64 : 128; /* keys */
    static constexpr int q_stages = head_dim > 128 ? 1 : 2, k_stages = 3, v_stages = 2;
    static constexpr int column = head_dim % 64 ? 32 : 64;                    /* elements of a swizzled row */
    static constexpr int columns = head_dim / column;                         /* of one head */
    static constexpr int row_bytes = column * 2, group_bytes = 8 * row_bytes; /* a group: 8 rows of a column */
    static constexpr int q_bytes = ROWS * head_dim * 2, kv_bytes = tile * head_dim * 2;
    static constexpr int smem_bytes = q_stages * q_bytes + (k_stages + v_stages) * kv_bytes + 1024 /* alignment */;
};

struct prefill_params {
    CUtensorMap q_map; /* [head_dim / column, num_tokens, num_q_heads, column] */
    CUtensorMap k_map; /* [num_blocks, block_size / 8, heads * columns, 8, column] */
    CUtensorMap v_map;
    pk_attention_args args;
    row_filter filter;
    unsigned int *counters; /* items taken beyond the first of each CTA, CTAs done; zero between calls */
    pk_cuda_bad_id *bad_id;
    int group, positions;               /* query heads of a KV head; query tokens of an item */
    int box_rows, box_shift;            /* keys that one TMA box brings, a power of two */
    int k_head_columns, v_head_columns; /* from one head to the next, in columns */
    int window_left, window_right;      /* -1: unbounded */
    float cap_scale;                    /* of a score to twice the argument of tanh, in units of log2 */
    float bytes_per_key, chunk_bytes;   /* K and V of all heads; what should stay in the L2 cache while it is in use */
};

/* One item, as the producer describes it to the consumers. num_positions 0 ends the list. */
struct prefill_item {
    int first_token, num_positions; /* rows of q */
    int first_key;                  /* the key that causal position 0 of the item sees last; may be negative */
    int context_len, kv_head, seq;
    int tile_begin, tile_end;
    int page_end; /* keys from context_len to here are in a page of the sequence but belong to nobody */
};

template <int head_dim>
struct prefill_shared {
    using shape = tiling<head_dim>;
    uint64_t item_full[ITEM_SLOTS], item_empty[ITEM_SLOTS], q_full[shape::q_stages], q_empty[shape::q_stages];
    uint64_t k_full[shape::k_stages], k_empty[shape::k_stages], v_full[shape::v_stages], v_empty[shape::v_stages];
    uint32_t k_bad_boxes[shape::k_stages]; /* boxes of a K tile whose page does not exist: masked */
    prefill_item item[ITEM_SLOTS];
};

#ifdef PK_SM90A
using namespace sm90;

/* Where a producer or a consumer stands in a ring of buffers: consumers wait for `parity` of a full barrier, producers
 * for the other one of an empty barrier. */
template <int count>
struct ring_position {
    int at = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void advance()
    {
        if (++at == count) {
            at = 0;
            parity ^= 1;
        }
    }
};

/* The list of items, walked forward; all lanes of one warp hold the same state but for their own sequence. Which CTA
 * takes which item is decided by a counter. The order: chunks of neighbouring sequences (so that the keys in use stay
 * in the L2 cache), in a chunk falling levels, on a level sequence by sequence, all KV heads. An item's level is the
 * number of its keys in units of `positions`; a sequence has at most one item of a level. */
struct prefill_schedule {
    sequence_view mine; /* lane's sequence of the chunk */
    int num_items, first_level;
    int next_seq, first_seq, seqs_per_chunk;
    int chunk_begin, pairs; /* items before the chunk; (sequence, item) pairs of the chunk */
    int level, next_level, top, before,
        count; /* the level in hand, the next that has items; pairs above it and on it */

    /* About as many sequences as fit in the cache together, at most one a lane. */
    __device__ void start(const prefill_params &params)
    {
        int64_t keys = 0;
        for (int seq = threadIdx.x & 31; seq < params.args.num_seqs; seq += 32) keys += params.args.context_lens[seq];
        for (int i = 16; i; i /= 2) keys += __shfl_xor_sync(~0u, keys, i);
        float bytes = (float)keys * params.bytes_per_key / params.args.num_seqs;
        seqs_per_chunk = (int)fminf(fmaxf(params.chunk_bytes / fmaxf(bytes, 1.0f), 1.0f), 32.0f);
        next_seq = 0;
        chunk_begin = 0;
        pairs = 0;
    }

    __device__ bool next_chunk(const prefill_params &params)
    {
        if (next_seq >= params.args.num_seqs) return false;
        chunk_begin += pairs * (int)params.args.num_kv_heads;
        first_seq = next_seq;
        next_seq += seqs_per_chunk;
        int seq = first_seq + (threadIdx.x & 31);
        mine = {};
        num_items = 0;
        if (seq < next_seq && seq < params.args.num_seqs) {
            mine = view_sequence(params.args, seq, params.bad_id, blockIdx.x == 0);
            int64_t rows = (int64_t)mine.num_queries * params.group;
            if (rows > params.filter.min_rows && rows <= params.filter.max_rows)
                num_items = (mine.num_queries + params.positions - 1) / params.positions;
        }
        first_level = max(mine.context - mine.num_queries, 0) / params.positions;
        pairs = __reduce_add_sync(~0u, num_items);
        top = __reduce_max_sync(~0u, num_items ? first_level + num_items - 1 : -1);
        before = 0;
        level = top;
        scan_level();
        return true;
    }
    __device__ void scan_level()
    {
        int end = first_level + num_items;
        count = __popc(__ballot_sync(~0u, first_level <= level && level < end));
        next_level = __reduce_max_sync(~0u, num_items && first_level < level ? min(level, end) - 1 : -1);
    }
    /* Item `index` of the whole list, which must not go down from call to call. */
    __device__ prefill_item find(const prefill_params &params, int index)
    {
        int num_heads = (int)params.args.num_kv_heads;
        while (index - chunk_begin >= pairs * num_heads)
            if (!next_chunk(params)) return prefill_item{};
        int pair = (index - chunk_begin) / num_heads;
        while (pair >= before + count) {
            before += count;
            level = next_level;
            scan_level();
        }
        prefill_item item = describe(params, pair - before);
        item.kv_head = index - chunk_begin - pair * num_heads;
        return item;
    }
    /* The item of the rank-th sequence that has one on this level. */
    __device__ prefill_item describe(const prefill_params &params, int rank)
    {
        int lane = threadIdx.x & 31, skipped = (level - first_level) * params.positions;
        bool is_here = first_level <= level && level < first_level + num_items;
        unsigned here = __ballot_sync(~0u, is_here);
        int owner = __ffs(__ballot_sync(~0u, is_here && __popc(here & ((1u << lane) - 1)) == rank)) - 1;
        prefill_item item;
        item.seq = first_seq + owner;
        item.first_token = __shfl_sync(~0u, mine.first_query + skipped, owner);
        item.num_positions = __shfl_sync(~0u, min(params.positions, mine.num_queries - skipped), owner);
        item.first_key = __shfl_sync(~0u, mine.context - mine.num_queries + skipped, owner);
        item.context_len = __shfl_sync(~0u, mine.context, owner);
        return item;
    }
};

/* Keys that a position sees: [begin, end). */
__device__ static int visible_begin(const prefill_params &params, int diagonal)
{
    return params.window_left < 0 ? 0 : max(diagonal - params.window_left, 0);
}
__device__ static int visible_end(const prefill_params &params, int diagonal, int context_len)
{
    return params.window_right < 0 ? context_len : min(context_len, diagonal + params.window_right + 1);
}

/* The page of one lane's box of a tile, looked up ahead of its copy. */
struct page_lookup {
    int page, group; /* page -1: reads as zeros */
    bool is_bad;
};
template <int tile>
__device__ static page_lookup look_up(const prefill_params &params, const prefill_item &item, int n)
{
    int key = n * tile + (threadIdx.x & 31) * params.box_rows;
    page_lookup found = {-1, 0, false};
    if (n < item.tile_begin || key >= min((n + 1) * tile, item.context_len)) return found;
    /* An entry whose keys nobody sees is not looked at: what it holds may be anything. */
    int last = item.first_key + item.num_positions - 1;
    if (key + params.box_rows <= visible_begin(params, item.first_key) ||
        key >= visible_end(params, last, item.context_len))
        return found;
    unsigned block_size = (unsigned)params.args.block_size, at = (unsigned)key / block_size;
    found.group = (int)(key - at * block_size) / 8;
    found.page = params.args.block_tables[item.seq * params.args.block_table_stride + at];
    found.page = checked_page(params.args, found.page, item.seq, params.bad_id);
    found.is_bad = found.page < 0;
    if (found.is_bad) found.page = -1;
    return found;
}

template <int head_dim>
__device__ static void copy_tile(const prefill_params &params, const CUtensorMap &map, uint32_t smem, uint32_t barrier,
                                 page_lookup found, int head_column)
{
    using shape = tiling<head_dim>;
    int lane = threadIdx.x & 31, boxes = shape::tile >> params.box_shift;
    if (lane == 0) barrier_arrive_expect(barrier, shape::kv_bytes);
    __syncwarp();
    if (lane < boxes)
        copy_5d(smem + lane * params.box_rows * head_dim * 2, &map, barrier, 0, 0, head_column, found.group,
                found.page);
}

/* One warp: decides what this CTA does next and tells the others. */
template <int head_dim>
__device__ static void produce_items(const prefill_params &params, prefill_shared<head_dim> *shared)
{
    constexpr int tile = tiling<head_dim>::tile;
    int lane = threadIdx.x & 31, block_size = (int)params.args.block_size;
    unsigned index = blockIdx.x;
    prefill_schedule schedule;
    schedule.start(params);
    for (ring_position<ITEM_SLOTS> slot;; slot.advance()) {
        prefill_item item = schedule.find(params, (int)index);
        if (item.num_positions) {
            int last = visible_end(params, item.first_key + item.num_positions - 1, item.context_len);
            item.page_end = (item.context_len + block_size - 1) / block_size * block_size;
            item.tile_end = max((max(last, 0) + tile - 1) / tile, 1); /* rows that see nothing still write zeros */
            item.tile_begin = min(visible_begin(params, item.first_key) / tile, item.tile_end - 1);
        }
        barrier_wait(smem_address(&shared->item_empty[slot.at]), slot.parity ^ 1);
        if (lane == 0) {
            shared->item[slot.at] = item;
            barrier_arrive(smem_address(&shared->item_full[slot.at]));
            if (item.num_positions)
                index = gridDim.x + atomicAdd(&params.counters[0], 1u);
            else if (atomicInc(&params.counters[1], gridDim.x - 1) == gridDim.x - 1)
                params.counters[0] = 0; /* the last CTA: atomicInc has put its own back */
        }
        if (!item.num_positions) return;
        index = __shfl_sync(~0u, index, 0);
    }
}

template <int head_dim>
__device__ static prefill_item take_item(prefill_shared<head_dim> *shared, ring_position<ITEM_SLOTS> slot)
{
    barrier_wait(smem_address(&shared->item_full[slot.at]), slot.parity);
    prefill_item item = shared->item[slot.at];
    __syncwarp();
    if ((threadIdx.x & 31) == 0) barrier_arrive(smem_address(&shared->item_empty[slot.at]));
    return item;
}

template <int head_dim>
__device__ static void produce_q_and_k(const prefill_params &params, prefill_shared<head_dim> *shared, uint32_t q_smem,
                                       uint32_t k_smem)
{
    using shape = tiling<head_dim>;
    int lane = threadIdx.x & 31;
    ring_position<ITEM_SLOTS> slot;
    ring_position<shape::q_stages> q;
    ring_position<shape::k_stages> k;
    for (;; slot.advance(), q.advance()) {
        prefill_item item = take_item(shared, slot);
        uint32_t full = smem_address(&shared->q_full[q.at]);
        page_lookup found = look_up<shape::tile>(params, item, item.tile_end - 1);
        barrier_wait(smem_address(&shared->q_empty[q.at]), q.parity ^ 1);
        if (!item.num_positions) {
            if (lane == 0) barrier_arrive(full);
            return;
        }
        if (lane == 0) {
            barrier_arrive_expect(full, params.positions * params.group * head_dim * 2);
            for (int c = 0; c < shape::columns; c++)
                copy_4d(q_smem + q.at * shape::q_bytes + c * ROWS * shape::row_bytes, &params.q_map, full, 0,
                        item.kv_head * params.group, item.first_token, c);
        }
        for (int n = item.tile_end - 1; n >= item.tile_begin; n--, k.advance()) {
            unsigned bad = __ballot_sync(~0u, found.is_bad);
            barrier_wait(smem_address(&shared->k_empty[k.at]), k.parity ^ 1);
            if (lane == 0) shared->k_bad_boxes[k.at] = bad;
            copy_tile<head_dim>(params, params.k_map, k_smem + k.at * shape::kv_bytes,
                                smem_address(&shared->k_full[k.at]), found, item.kv_head * params.k_head_columns);
            found = look_up<shape::tile>(params, item, n - 1);
        }
    }
}

template <int head_dim>
__device__ static void produce_v(const prefill_params &params, prefill_shared<head_dim> *shared, uint32_t v_smem)
{
    using shape = tiling<head_dim>;
    ring_position<ITEM_SLOTS> slot;
    ring_position<shape::v_stages> v;
    for (;; slot.advance()) {
        prefill_item item = take_item(shared, slot);
        if (!item.num_positions) return;
        page_lookup found = look_up<shape::tile>(params, item, item.tile_end - 1);
        for (int n = item.tile_end - 1; n >= item.tile_begin; n--, v.advance()) {
            barrier_wait(smem_address(&shared->v_empty[v.at]), v.parity ^ 1);
            copy_tile<head_dim>(params, params.v_map, v_smem + v.at * shape::kv_bytes,
                                smem_address(&shared->v_full[v.at]), found, item.kv_head * params.v_head_columns);
            found = look_up<shape::tile>(params, item, n - 1);
        }
    }
}

#endif  // PK_SM90A
#endif
