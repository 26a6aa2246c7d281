/* sm90.h - the producing half of sm90.cu: how items and their tiles get into shared
 * memory.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_SM90_H
#define PK_CUDA_ATTENTION_PREFILL_SM90_H

#include "cuda/attention/prefill/prefill.h"
#include "cuda/wgmma.h"

enum { ITEM_SLOTS = 4 };

/* Shapes of one head_dim: what the tensor maps, the matrix descriptors and the registers must agree on. */
template <int head_dim, bool IS_FP8, int WARPGROUPS = 2>
struct tiling {
    static constexpr int warpgroups = WARPGROUPS, rows = 64 * warpgroups; /* that compute; of an item */
    static constexpr int tile = head_dim > 128 ? 80 : 128;                /* keys */
    static constexpr int q_stages = head_dim > 128 ? 1 : 2, k_stages = head_dim > 128 ? 2 : 3, v_stages = 2;
    /* Threads, and registers: what the first warpgroup (and with fp8 the last) gives away those that compute take. */
    static constexpr int producers = IS_FP8 ? 256 : 128, consumers = 128 * warpgroups, threads = producers + consumers;
    static constexpr int launched_with = 65536 / threads / 8 * 8; /* registers per thread */
    static constexpr int producer_registers = warpgroups > 2 ? 32 : 40;
    static constexpr int consumer_registers =
        (threads * launched_with - producers * producer_registers) / consumers / 8 * 8;
    static constexpr bool is_fp8 = IS_FP8;
    static constexpr int head_bytes = head_dim * 2;                           /* of a row, as it is multiplied */
    static constexpr int column = 64;                                         /* elements of a swizzled row */
    static constexpr int columns = head_dim / column;                         /* of one head */
    static constexpr int row_bytes = column * 2, group_bytes = 8 * row_bytes; /* a group: 8 rows of a column */
    static constexpr int q_bytes = rows * head_dim * 2, kv_bytes = tile * head_dim * 2;
    static constexpr int part_bytes = kv_bytes / 4; /* of e4m3 in half a tile of keys */
    static constexpr int smem_bytes = q_stages * q_bytes + (k_stages + v_stages) * kv_bytes + 1024 /* alignment */;

    /* Tiles of keys that an item goes through. Rows that see nothing have one, too, and write zeros. */
    __device__ static int last_tile(const prefill_item &item) { return (max(item.end, 1) - 1) / tile; }
    __device__ static int first_tile(const prefill_item &item) { return min(item.begin / tile, last_tile(item)); }
};

struct prefill_params {
    CUtensorMap q_map; /* [head_dim / column, num_tokens, num_q_heads, column] */
    CUtensorMap k_map; /* [num_blocks, block_size / 8, heads * columns, 8, column]; is_one_page: 1, block_size */
    CUtensorMap v_map;
    prefill_batch batch;
    bool is_one_page;                   /* all keys of a sequence are in one: a box starts at any slot */
    int box_rows, box_shift;            /* keys that one TMA box brings, a power of two */
    int k_head_columns, v_head_columns; /* from one head to the next, in columns */
    float cap_scale;                    /* of a score to twice the argument of tanh, in units of log2 */
};

template <int stages>
struct tile_ring {
    uint64_t full[stages], empty[stages];
    uint64_t converting[stages]; /* fp8: the bytes of a tile are there */
    uint32_t bad_boxes[stages];  /* boxes of a tile whose page does not exist: masked */
};

template <typename shape_>
struct prefill_shared {
    using shape = shape_;
    prefill_item item[ITEM_SLOTS];
    uint64_t item_full[ITEM_SLOTS], item_empty[ITEM_SLOTS];
    uint64_t item_loading[ITEM_SLOTS]; /* only its last tile of keys is still to be asked for */
    uint64_t q_full[shape::q_stages], q_empty[shape::q_stages];
    tile_ring<shape::k_stages> k;
    tile_ring<shape::v_stages> v;
    float2 done[shape::rows]; /* offset and sum of a row whose item waits for its last values */
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

/* The consumers, before the first item: a box of Q holds whole tokens, and the rows after it would keep what another
 * kernel left there. Nobody reads their results, but numbers that are NaN or huge take the slow path of the softmax. */
template <typename shape>
__device__ static void zero_idle_rows(const prefill_batch &batch, uint32_t q_smem)
{
    int begin = batch.positions * batch.heads * shape::row_bytes, bytes = shape::rows * shape::row_bytes - begin;
    constexpr int threads = shape::consumers;
    for (int column = 0; column < shape::q_stages * shape::columns; column++)
        for (int i = ((int)threadIdx.x - 128) * 16; i < bytes; i += threads * 16)
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(
                             q_smem + column * shape::rows * shape::row_bytes + begin + i),
                         "r"(0)
                         : "memory");
    fence_async_proxy();
}

/* One warp: decides what this CTA does next, tells the other warps and brings the queries. It finds the first item while
 * the others set the barriers up. It takes the next one when only the last tile of keys of the one before is still to be
 * asked for, so that tiles keep coming. Earlier, items would be dealt out before it is known which CTA is late
 * (prefill/NOTES.md #28). */
template <typename List, typename shape>
__device__ static void produce_items(const prefill_params &params, prefill_shared<shape> *shared, uint32_t q_smem)
{
    const prefill_batch &batch = params.batch;
    prefill_queue<List> queue;
    queue.start(batch);
    ring_position<ITEM_SLOTS> slot;
    uint32_t loading = 0, loading_parity = 0; /* of the item before, or 0: nothing to wait for */
    auto may_take = [&] { return !loading || __all_sync(~0u, barrier_wait_up_to(1000, loading, loading_parity)); };
    for (ring_position<shape::q_stages> q;; q.advance(), slot.advance()) {
        bool is_first = queue.is_first;
        prefill_item item = queue.take_next(batch, may_take);
        if (is_first) __syncthreads();
        barrier_wait(smem_address(&shared->item_empty[slot.at]), slot.parity ^ 1);
        if (threadIdx.x == 0) {
            shared->item[slot.at] = item;
            barrier_arrive(smem_address(&shared->item_full[slot.at]));
        }
        barrier_wait(smem_address(&shared->q_empty[q.at]), q.parity ^ 1);
        if (threadIdx.x == 0) {
            uint32_t full = smem_address(&shared->q_full[q.at]), to = q_smem + q.at * shape::q_bytes;
            barrier_arrive_expect(full, item.num_positions ? batch.positions * batch.heads * shape::head_bytes : 0);
            for (int c = 0; c < shape::columns && item.num_positions; c++)
                copy_4d(to + c * shape::rows * shape::row_bytes, &params.q_map, full, 0, item.q_head, item.first_token,
                        c);
        }
        if (!item.num_positions) {
            pk_let_next_kernel_start(); /* its CTAs follow those that end; earlier, they are in the way (#32) */
            return;
        }
        if (threadIdx.x == 0) List::look_again(batch, item);
        bool is_long = shape::last_tile(item) > shape::first_tile(item);
        loading = is_long ? smem_address(&shared->item_loading[slot.at]) : 0;
        loading_parity = slot.parity;
    }
}

/* The next item, for the warps that bring and convert its tiles; they tell that it has been read. */
template <typename shape>
__device__ __forceinline__ prefill_item read_item(prefill_shared<shape> *shared, const ring_position<ITEM_SLOTS> &slot)
{
    barrier_wait(smem_address(&shared->item_full[slot.at]), slot.parity);
    prefill_item item = shared->item[slot.at];
    barrier_arrive(smem_address(&shared->item_empty[slot.at]));
    return item;
}

/* The page of one lane's box of a tile, looked up ahead of its copy. */
struct page_lookup {
    int page, group; /* page -1: reads as zeros; is_one_page: group is the slot */
    bool is_bad;
};
template <int tile>
__device__ static page_lookup look_up(const prefill_params &params, const prefill_item &item, int first_slot, int n)
{
    const pk_attention_args &args = params.batch.args;
    int key = n * tile + (threadIdx.x & 31) * params.box_rows;
    page_lookup found = {-1, 0, false};
    /* An entry whose keys nobody sees is not looked at: what it holds may be anything. */
    if (n < 0 || key >= min((n + 1) * tile, item.end) || key + params.box_rows <= item.begin) return found;
    int slot = first_slot + key, at = params.batch.by_block_size.divide(slot);
    found.group = params.is_one_page ? slot : (int)(unsigned)(slot - at * (int)args.block_size) / 8;
    found.page = args.block_tables[item.seq * args.block_table_stride + at];
    found.page = checked_page(args, found.page, item.seq, params.batch.bad_id);
    found.is_bad = found.page < 0;
    if (found.is_bad) found.page = -1;
    return found;
}

/* Two warps: one brings the items' keys, the other their values. `head_columns`: from one head to the next. `loading`:
 * a barrier for each slot of an item, at which it arrives before the item's last tile; or NULL. */
template <typename shape, int stages>
__device__ static void produce_tiles(const prefill_params &params, const CUtensorMap &map, int head_columns,
                                     prefill_shared<shape> *shared, tile_ring<stages> *ring, uint64_t *loading,
                                     uint32_t smem)
{
    constexpr bool IS_FP8 = shape::is_fp8;
    constexpr int key_bytes = shape::head_bytes / (IS_FP8 ? 2 : 1);
    int lane = threadIdx.x & 31, boxes = shape::tile >> params.box_shift;
    ring_position<ITEM_SLOTS> slot;
    ring_position<stages> stage;
    for (;; slot.advance()) {
        prefill_item item = read_item(shared, slot);
        if (!item.num_positions) return;
        int n = shape::last_tile(item), column = params.batch.kv_head_of(item.q_head) * head_columns;
        int first_slot = (int)first_slot_of(params.batch.args, item.seq); /* if it is nowhere, there are no keys */
        page_lookup found = look_up<shape::tile>(params, item, first_slot, n);
        for (; n >= shape::first_tile(item); n--, stage.advance()) {
            uint32_t full = smem_address(IS_FP8 ? &ring->converting[stage.at] : &ring->full[stage.at]);
            uint32_t to = smem + stage.at * shape::kv_bytes;
            if (loading && n == shape::first_tile(item) && lane == 0) barrier_arrive(smem_address(&loading[slot.at]));
            unsigned bad = __ballot_sync(~0u, found.is_bad);
            barrier_wait(smem_address(&ring->empty[stage.at]), stage.parity ^ 1);
            if (lane == 0) {
                ring->bad_boxes[stage.at] = bad;
                barrier_arrive_expect(full, shape::tile * key_bytes);
            }
            __syncwarp();
            to += lane * params.box_rows * key_bytes;
            if (IS_FP8) to += lane * params.box_rows < shape::tile / 2 ? shape::part_bytes : 2 * shape::part_bytes;
            /* What is read once need not stay in L2. (evict_normal would be slower than no hint.) */
            int row = params.is_one_page ? found.group : 0, group = params.is_one_page ? 0 : found.group;
            if (lane < boxes && params.batch.reads_keys_once())
                copy_5d(to, &map, full, 0, row, column, group, found.page, evict_first_policy());
            else if (lane < boxes)
                copy_5d(to, &map, full, 0, row, column, group, found.page);
            found = look_up<shape::tile>(params, item, first_slot, n - 1);
        }
    }
}

/* Eight e4m3 as T, exactly; NaN stays NaN. */
template <typename T>
__device__ __forceinline__ uint4 widened(uint2 eight)
{
    uint2 low = fp8_to_f16(eight.x), high = fp8_to_f16(eight.y);
    uint32_t pairs[4] = {low.x, low.y, high.x, high.y};
    if constexpr (!std::is_same_v<T, __half>)
        for (uint32_t &pair : pairs) {
            float2 x = pk_to_floats(*(__half2 *)&pair);
            pair = pk_pack_pair<T>(x.x, x.y);
        }
    return {pairs[0], pairs[1], pairs[2], pairs[3]};
}

/* Two warps for the keys, two for the values, each for half of every tile: its bytes lie in the upper half of where
 * their elements belong, in the same order (without the swizzle), and are read from the front just before what they
 * become is written over them. */
template <typename T, typename shape, int stages>
__device__ static void convert_tiles(prefill_shared<shape> *shared, tile_ring<stages> *ring, uint32_t smem)
{
    constexpr int in_flight = 4, bytes_at_once = in_flight * 32 * 8;
    static_assert(shape::part_bytes % bytes_at_once == 0, "half a tile is read in whole steps");
    int lane = threadIdx.x & 31;
    smem += threadIdx.x / 32 % 2 * 2 * shape::part_bytes;
    ring_position<ITEM_SLOTS> slot;
    ring_position<stages> stage;
    for (;; slot.advance()) {
        prefill_item item = read_item(shared, slot);
        if (!item.num_positions) return;
        for (int n = shape::last_tile(item); n >= shape::first_tile(item); n--, stage.advance()) {
            uint32_t to = smem + stage.at * shape::kv_bytes, from = to + shape::part_bytes + lane * 8;
            barrier_wait(smem_address(&ring->converting[stage.at]), stage.parity);
#pragma unroll 1
            for (int i = 0; i < shape::part_bytes; i += bytes_at_once) {
                uint2 bytes[in_flight];
                for (int j = 0; j < in_flight; j++)
                    asm volatile("ld.shared.v2.b32 {%0, %1}, [%2];"
                                 : "=r"(bytes[j].x), "=r"(bytes[j].y)
                                 : "r"(from + i + j * 32 * 8)
                                 : "memory");
                __syncwarp();
                for (int j = 0; j < in_flight; j++) {
                    uint4 x = widened<T>(bytes[j]);
                    uint32_t at = to + 2 * i + swizzled((j * 32 + lane) * 16);
                    asm volatile("st.shared.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(x.x), "r"(x.y), "r"(x.z),
                                 "r"(x.w)
                                 : "memory");
                }
            }
            fence_async_proxy();
            barrier_arrive(smem_address(&ring->full[stage.at]));
        }
    }
}

#endif  // PK_SM90A
#endif
