/* attention_prefill_sm90.h - the producing half of attention_prefill_sm90.cu: how items and their tiles get into shared
 * memory.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_SM90_H
#define PK_CUDA_ATTENTION_PREFILL_SM90_H

#include "cuda/attention_prefill.h"
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
    prefill_batch batch;
    int box_rows, box_shift;            /* keys that one TMA box brings, a power of two */
    int k_head_columns, v_head_columns; /* from one head to the next, in columns */
    float cap_scale;                    /* of a score to twice the argument of tanh, in units of log2 */
};

/* Tiles of keys that an item goes through: [begin, end). Rows that see nothing have one, too, and write zeros. */
template <int tile>
__device__ static int last_tile(const prefill_item &item)
{
    return (max(item.end, 1) - 1) / tile;
}
template <int tile>
__device__ static int first_tile(const prefill_item &item)
{
    return min(item.begin / tile, last_tile<tile>(item));
}

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

/* The page of one lane's box of a tile, looked up ahead of its copy. */
struct page_lookup {
    int page, group; /* page -1: reads as zeros */
    bool is_bad;
};
template <int tile>
__device__ static page_lookup look_up(const prefill_params &params, const prefill_item &item, int n)
{
    const pk_attention_args &args = params.batch.args;
    int key = n * tile + (threadIdx.x & 31) * params.box_rows;
    page_lookup found = {-1, 0, false};
    /* An entry whose keys nobody sees is not looked at: what it holds may be anything. */
    if (n < 0 || key >= min((n + 1) * tile, item.end) || key + params.box_rows <= item.begin) return found;
    unsigned block_size = (unsigned)args.block_size, at = (unsigned)key / block_size;
    found.group = (int)(key - at * block_size) / 8;
    found.page = args.block_tables[item.seq * args.block_table_stride + at];
    found.page = checked_page(args, found.page, item.seq, params.batch.bad_id);
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
__device__ static void produce_items(const prefill_batch &batch, prefill_shared<head_dim> *shared)
{
    prefill_schedule schedule;
    schedule.start(batch);
    for (ring_position<ITEM_SLOTS> slot;; slot.advance()) {
        prefill_item item = schedule.take_next(batch);
        barrier_wait(smem_address(&shared->item_empty[slot.at]), slot.parity ^ 1);
        if (threadIdx.x % 32 == 0) {
            shared->item[slot.at] = item;
            barrier_arrive(smem_address(&shared->item_full[slot.at]));
        }
        if (!item.num_positions) return;
    }
}

template <int head_dim>
__device__ static prefill_item take_item(prefill_shared<head_dim> *shared, ring_position<ITEM_SLOTS> slot)
{
    barrier_wait(smem_address(&shared->item_full[slot.at]), slot.parity);
    prefill_item item = shared->item[slot.at];
    barrier_arrive(smem_address(&shared->item_empty[slot.at]));
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
        page_lookup found = look_up<shape::tile>(params, item, last_tile<shape::tile>(item));
        barrier_wait(smem_address(&shared->q_empty[q.at]), q.parity ^ 1);
        if (!item.num_positions) {
            if (lane == 0) barrier_arrive(full);
            return;
        }
        if (lane == 0) {
            barrier_arrive_expect(full, params.batch.positions * params.batch.group * head_dim * 2);
            for (int c = 0; c < shape::columns; c++)
                copy_4d(q_smem + q.at * shape::q_bytes + c * ROWS * shape::row_bytes, &params.q_map, full, 0,
                        item.kv_head * params.batch.group, item.first_token, c);
        }
        for (int n = last_tile<shape::tile>(item); n >= first_tile<shape::tile>(item); n--, k.advance()) {
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
        page_lookup found = look_up<shape::tile>(params, item, last_tile<shape::tile>(item));
        for (int n = last_tile<shape::tile>(item); n >= first_tile<shape::tile>(item); n--, v.advance()) {
            barrier_wait(smem_address(&shared->v_empty[v.at]), v.parity ^ 1);
            copy_tile<head_dim>(params, params.v_map, v_smem + v.at * shape::kv_bytes,
                                smem_address(&shared->v_full[v.at]), found, item.kv_head * params.v_head_columns);
            found = look_up<shape::tile>(params, item, n - 1);
        }
    }
}

#endif  // PK_SM90A
#endif
