/* loader.h - the keys and values of a decode CTA's unit, on their way from the cache to shared memory.
 *
 * A warp loads every n-th chunk of the unit's keys into its own ring, some chunks ahead of what it computes. It reads
 * the block table further ahead still: an entry may have to come from memory, and no copy can start without it.
 */
#ifndef PK_CUDA_ATTENTION_DECODE_LOADER_H
#define PK_CUDA_ATTENTION_DECODE_LOADER_H

#include "cuda/attention/decode/warp.h"
#include "cuda/attention/plan/units.h"

/* Bytes from the first key's row in the caches to another's, and whether that is there at all. */
struct row_offsets {
    int64_t k, v;
    bool is_there;
};

/* A warp's ring of stages, and what fills it: which keys its unit has, their pages, their copies. */
template <typename Kind, int D, int NT, int STAGES>
struct decode_loader : decode_warp<Kind, D, NT> {
    using computing = decode_warp<Kind, D, NT>;
    using computing::args, computing::rows, computing::warp, computing::lane, computing::first_common,
        computing::end_common;
    using computing::CHUNK, computing::KEY_TILES, computing::ROWS, computing::ALL_KEYS, computing::TILE_BYTES;
    using typename computing::tile;
    static constexpr int CHUNKS_AT_ONCE = 32 / KEY_TILES; /* their pages are one load: a lane has 16 keys */
    static constexpr int STAGE_BYTES = 2 * TILE_BYTES;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES; /* at most: see ring_bytes */
    static constexpr int ROWS_AT_ONCE = 32 / tile::PIECES;  /* of the cache, that a warp's copy takes */

    const decode_params &params;
    char *smem;                 /* of the CTA: a ring per warp first */
    uint32_t ring;              /* this warp's stages, as a shared address: it has params.ring_bytes */
    unsigned int masks[STAGES]; /* which of the stages' keys are there, the oldest stage first */
    int step;                   /* keys of all warps' chunks */
    int first_seen, end_seen;   /* keys that some of the unit's queries sees */

    bool is_signed = true; /* the unit, where a plan has it */

    int lookup_key, load_key, end_key; /* of this warp's chunks: where it looks up next, loads next, and ends */
    int num_loaded, next_page;         /* chunks; of this lane's 16 keys of the next 32 / KEY_TILES chunks */
    row_offsets table;                 /* of its keys of these chunks */
    const char *k_lane, *v_lane;       /* what this lane's copies add such an offset to */

    __device__ decode_loader(const pk_attention_args &args, const decode_params &params, char *smem)
        : computing(args, params), params(params), smem(smem)
    {
        step = params.shape.step;
        ring = smem_address(smem + warp * params.ring_bytes);
    }

    /* The unit of this CTA, and whether there is one. */
    template <bool IS_USUALLY_PLANNED>
    __device__ bool read_unit(int unit_index)
    {
        attention_unit &unit = rows.unit;
        if (params.workspace.units) {
            const int4 *from = (const int4 *)(params.workspace.units + unit_index);
            *(int4 *)&unit.signature = __ldcg(from);
            *(int4 *)&unit.num_queries = __ldcg(from + 1);
            *(int4 *)&unit.part = __ldcg(from + 2);
            is_signed = unit.signature == pk_sign_row(params.shape.signature, unit_index, unit);
        } else {
            bool is_recorder = rows.head == 0 && warp == 0;
            unit = IS_USUALLY_PLANNED ? plan_unit_apart(args, params.shape, unit_index, params.bad_id, is_recorder)
                                      : plan_unit(args, params.shape, unit_index, params.bad_id, is_recorder);
        }
        int in_row = lane / tile::PIECES, piece = is_in_row() ? lane % tile::PIECES * 16 : 0;
        k_lane = (const char *)args.k_cache + piece +
                 (rows.head * args.k_strides.head + in_row * args.k_strides.slot) * Kind::CACHE_BYTES;
        v_lane = (const char *)args.v_cache + piece +
                 (rows.head * args.v_strides.head + in_row * args.v_strides.slot) * Kind::CACHE_BYTES;
        if (!is_signed || unit.num_parts == 0) return false;
        int first_position = rows.position_of(0), last_position = min(unit.context - 1, rows.position_of(ROWS - 1));
        first_seen = args.window_left < 0 ? 0 : (int)max((int64_t)0, first_position - args.window_left);
        first_common = args.window_left < 0 ? 0 : (int)max((int64_t)0, last_position - args.window_left);
        int64_t end = unit.context;
        end_seen = args.window_right < 0 ? unit.context : (int)min(end, last_position + args.window_right + 1);
        end_common = args.window_right < 0 ? unit.context : (int)min(end, first_position + args.window_right + 1);
        int first_key = decode_first_key(args, unit.context, unit.num_queries, CHUNK);
        lookup_key = first_key + unit.first_step * step + warp * CHUNK;
        load_key = lookup_key;
        end_key = first_key + unit.end_step * step;
        num_loaded = 0;
        return true;
    }

    // --- loading

    /* Both of a key: its page, and where it lies in that. */
    __device__ int read_page(int key) const
    {
        int block = params.block_size.divide(rows.unit.first_slot + key);
        return __ldcg(args.block_tables + rows.unit.seq * args.block_table_stride + block);
    }
    __device__ int slot_of(int key) const
    {
        int slot = rows.unit.first_slot + key;
        return slot - params.block_size.divide(slot) * params.block_size.divisor;
    }

    /* The pages of the next chunks, where those consist of 16 keys in one page: lane i looks after the i-th 16. Only
     * entries of keys that some query sees are read. */
    __device__ int key_of_lane() const { return lane / KEY_TILES * step + lane % KEY_TILES * 16; }
    __device__ int look_up()
    {
        int key = lookup_key + key_of_lane();
        lookup_key += CHUNKS_AT_ONCE * step;
        bool is_needed = params.are_16_in_a_page && key < min(end_key, end_seen) && key + 16 > first_seen;
        return is_needed ? read_page(key) : -1;
    }

    /* Whether the 16 bytes that this lane copies of a row are in it; those beyond head_dim become zeros. */
    __device__ bool is_in_row() const { return lane % tile::PIECES * 16 < (int)args.head_dim * Kind::CACHE_BYTES; }

    __device__ row_offsets offsets_of(int page, int64_t slot) const
    {
        int64_t k = slot * args.k_strides.slot, v = slot * args.v_strides.slot;
        if (page >= 0) page = checked_page(args, page, rows.unit.seq, params.bad_id);
        int64_t there = max(page, 0);
        return {(there * args.k_strides.block + k) * Kind::CACHE_BYTES,
                (there * args.v_strides.block + v) * Kind::CACHE_BYTES, page >= 0};
    }

    /* Copies a chunk; the result is the mask of its keys that are there. */
    __device__ unsigned int load_chunk(int stage)
    {
        int key = load_key + lane % CHUNK, first_lane = num_loaded % CHUNKS_AT_ONCE * KEY_TILES;
        bool is_seen = key >= first_seen && key < end_seen;
        row_offsets from = table;
        if (!params.are_16_in_a_page) /* less the row that the copying lane will add */
            from = offsets_of(is_seen ? read_page(key) : -1, slot_of(key) - lane % ROWS_AT_ONCE);
        unsigned int known = __ballot_sync(~0u, from.is_there);
        int its_lane = params.are_16_in_a_page ? first_lane + lane % CHUNK / 16 : lane;
        unsigned int mask = __ballot_sync(~0u, is_seen && known >> its_lane & 1) & ALL_KEYS;
        if (mask == 0) return 0; /* what the stage holds from before is not used */

        int in_row = lane / tile::PIECES;
        unsigned int mine = is_in_row() ? mask >> in_row : 0;
        uint32_t to = ring + stage * STAGE_BYTES + tile::offset(in_row, lane % tile::PIECES);
        uint64_t policy = evict_first_policy();
        /* of row + in_row */
        auto copy = [&](int row, const char *k, const char *v) {
            int bytes = mine >> row & 1 ? 16 : 0;
            uint32_t its_to = tile::moved(to, row, tile::IS_SWIZZLED ? row % 8 : 0);
            copy_async_16(its_to, k, bytes, policy);
            copy_async_16(its_to + TILE_BYTES, v, bytes, policy);
        };
        if (params.are_16_in_a_page) {
            int64_t k_step = ROWS_AT_ONCE * args.k_strides.slot * Kind::CACHE_BYTES;
            int64_t v_step = ROWS_AT_ONCE * args.v_strides.slot * Kind::CACHE_BYTES;
            for (int t = 0; t < KEY_TILES; t++) {
                const char *k = k_lane + __shfl_sync(~0u, from.k, first_lane + t);
                const char *v = v_lane + __shfl_sync(~0u, from.v, first_lane + t);
                for (int row = 0; row < 16; row += ROWS_AT_ONCE, k += k_step, v += v_step) copy(t * 16 + row, k, v);
            }
        } else {
#pragma unroll 1
            for (int row = 0; row < CHUNK; row += ROWS_AT_ONCE)
                copy(row, k_lane + __shfl_sync(~0u, from.k, row + in_row),
                     v_lane + __shfl_sync(~0u, from.v, row + in_row));
        }
        return mask;
    }

    __device__ void load_next(int stage)
    {
        int place = num_loaded % CHUNKS_AT_ONCE;
        if (place == 0) table = offsets_of(next_page, slot_of(load_key + key_of_lane()));
        for (int i = 0; i + 1 < STAGES; i++) masks[i] = masks[i + 1];
        masks[STAGES - 1] = load_key < end_key ? load_chunk(stage) : 0;
        copy_async_commit();
        if (place == CHUNKS_AT_ONCE / 2) next_page = look_up(); /* long before, since it may have to come from afar */
        load_key += step;
        num_loaded++;
    }
};

#endif
