/* sm80_loader.h - the item that a CTA of sm80.cu has in hand, and its tiles of keys and values on their way to shared
 * memory.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_SM80_LOADER_H
#define PK_CUDA_ATTENTION_PREFILL_SM80_LOADER_H

#include "cuda/attention/prefill/prefill.h"

template <typename Kind, int D>
struct prefill_sm80_loader {
    static constexpr int WARPS = 4, THREADS = WARPS * 32, CTAS_PER_SM = 2;
    static constexpr int M_TILES = D > 128 ? 1 : 2; /* of 16 rows, of a warp */
    static constexpr int WARP_ROWS = 16 * M_TILES, ROWS = WARPS * WARP_ROWS;
    static constexpr int KEYS = D > 128 ? 32 : 64, WARP_KEYS = KEYS / WARPS, SLOTS = 3;
    using tile = cache_tile<Kind, D>;
    static constexpr int SLOT_BYTES = KEYS * tile::ROW_BYTES;
    /* A warp copies some rows at once, LANES pieces of each: the power of two in the pieces of a row, 8 at most. */
    static constexpr int LANES = tile::PIECES % 8 == 0 ? 8 : tile::PIECES & -tile::PIECES, ROWS_AT_ONCE = 32 / LANES;

    struct shared_memory {
        char slots[SLOTS][SLOT_BYTES];
        uint4 queries[WARPS][M_TILES][D / 16][32];
        uint4 rows[WARPS][32]; /* of the tile to load, a warp's share, keys and from 16 on values: address, bytes */
        unsigned int key_masks[SLOTS][WARPS]; /* which keys of a K tile are there; a warp loads WARP_KEYS of them */
        prefill_queue<prefill_schedule<0>> schedules[32]; /* of warp 0 */
        prefill_item item;                                /* not in registers, which O and S fill */
        int2 wholly_seen[WARPS];                          /* the keys that all rows of a warp see: [x, y) */
    };

    const prefill_batch &batch;
    shared_memory &shared;
    const pk_attention_args &args = batch.args;
    const prefill_item &item = shared.item;
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;

    int slot;       /* of the ring: the next tile to multiply */
    int first_slot; /* of the sequence's pages: where its first key lies */
    int page;       /* of a key of the tile to load next: lane i and 16 + i for key i of the warp's share */

    // --- the item in hand

    /* Takes the next item of this CTA; false at the end of the list. */
    __device__ bool enter_item()
    {
        __syncthreads(); /* the item before is done */
        if (warp == 0) {
            prefill_queue<prefill_schedule<0>> schedule = shared.schedules[lane];
            prefill_item next = schedule.take_next(batch, [] { return true; });
            shared.schedules[lane] = schedule;
            if (lane == 0) shared.item = next;
        }
        __syncthreads();
        int first = warp * WARP_ROWS, last = first + WARP_ROWS - 1;
        shared.wholly_seen[warp] = {visible_begin(batch, diagonal_of(last)),
                                    visible_end(batch, diagonal_of(first), item.context_len)};
        return item.num_positions > 0;
    }

    /* Of a row of the item; rows after the last see what that one sees. */
    __device__ int diagonal_of(int row) const
    {
        return item.first_key + min(row / batch.heads, item.num_positions - 1);
    }
    __device__ bool is_row(int row) const { return row / batch.heads < item.num_positions; }
    __device__ int token_of(int row) const { return item.first_token + row / batch.heads; }
    __device__ int kv_head() const { return batch.kv_head_of(item.q_head); }
    __device__ int q_head_of(int row) const { return item.q_head + row % batch.heads; }

    // --- loading: tile n is the keys n * KEYS and on; there is none below item.begin

    __device__ int key_of(int n) const { return n * KEYS + warp * WARP_KEYS + lane % WARP_KEYS; }
    __device__ int block_of(int slot) const { return batch.by_block_size.divide(slot); }

    __device__ void look_up_pages(int n)
    {
        int key = key_of(n);
        page = -1;
        if (key >= item.begin && key < item.end)
            page = args.block_tables[item.seq * args.block_table_stride + block_of(first_slot + key)];
    }

    __device__ void find_rows(int n, int to_slot)
    {
        page = checked_page(args, page, item.seq, batch.bad_id);
        unsigned int mask = __ballot_sync(~0u, page >= 0);
        if (lane == 0) shared.key_masks[to_slot][warp] = mask & ((1u << WARP_KEYS) - 1);
        int page_slot = first_slot + key_of(n), in_page = page_slot - block_of(page_slot) * (int)args.block_size;
        bool is_value = lane >= 16;
        int64_t at = max(page, 0) * (is_value ? args.v_strides.block : args.k_strides.block) +
                     in_page * (is_value ? args.v_strides.slot : args.k_strides.slot) +
                     kv_head() * (is_value ? args.v_strides.head : args.k_strides.head);
        uint64_t row = (uint64_t)(is_value ? args.v_cache : args.k_cache) + at * Kind::CACHE_BYTES;
        shared.rows[warp][lane] = {(uint32_t)row, (uint32_t)(row >> 32), page >= 0 ? 16u : 0u, 0};
        __syncwarp();
    }

    template <bool IS_VALUES>
    __device__ void load_tile(int n, int to_slot)
    {
        if ((n + 1) * KEYS > item.begin) {
            if (!IS_VALUES) find_rows(n, to_slot);
            uint4 rows[WARP_KEYS / ROWS_AT_ONCE];
            for (int i = 0; i < WARP_KEYS / ROWS_AT_ONCE; i++)
                rows[i] = shared.rows[warp][(IS_VALUES ? 16 : 0) + i * ROWS_AT_ONCE + lane / LANES];
            uint32_t to = smem_address(shared.slots[to_slot]) + warp * WARP_KEYS * tile::ROW_BYTES;
            to += tile::offset(lane / LANES, lane % LANES);
            for (int i = 0; i < WARP_KEYS / ROWS_AT_ONCE; i++) {
                int row = i * ROWS_AT_ONCE; /* the rows share no bits */
                uint32_t row_to = (tile::IS_SWIZZLED ? to ^ row % 8 * 16 : to) + row * tile::ROW_BYTES;
                const char *from = (const char *)(rows[i].x | (uint64_t)rows[i].y << 32) + lane % LANES * 16;
#pragma unroll /* beyond head_dim there are zeros: what was there may be NaN */
                for (int c = 0; c < tile::PIECES; c += LANES) {
                    int most_bytes = (c + lane % LANES) * 16 < (int)args.head_dim * Kind::CACHE_BYTES ? 16 : 0;
                    copy_async_16(row_to + c * 16, from + c * 16, rows[i].z & most_bytes);
                }
            }
            if (IS_VALUES) look_up_pages(n - 1);
        }
        copy_async_commit();
    }

    /* Waits for the tile that is next in the ring, and starts to load the second after it into the slot of the last. */
    template <bool IS_VALUES>
    __device__ uint32_t next_tile(int n)
    {
        copy_async_wait<SLOTS - 2>();
        __syncthreads();
        load_tile<IS_VALUES>(n - 1, slot == 0 ? SLOTS - 1 : slot - 1);
        uint32_t at = smem_address(shared.slots[slot]);
        slot = slot == SLOTS - 1 ? 0 : slot + 1;
        return at;
    }
};

#endif
