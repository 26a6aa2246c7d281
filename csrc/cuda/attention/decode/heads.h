/* heads.h - queries, new keys and values of decode attention, straight from the projection, with one token per sequence.
 *
 * A CTA normalises and rotates its own queries, and the CTA of a sequence's last keys its new key and value too, which go
 * to the cache and, after what the cache held there before, into the ring. So nothing but the projection is waited for,
 * and all keys may be on their way before.
 */
#ifndef PK_CUDA_ATTENTION_DECODE_HEADS_H
#define PK_CUDA_ATTENTION_DECODE_HEADS_H

#include "cuda/attention/decode/loader.h"
#include "cuda/rope.h"

template <typename Kind, int D, int NT, int STAGES>
struct decode_heads : decode_loader<Kind, D, NT, STAGES> {
    using loading = decode_loader<Kind, D, NT, STAGES>;
    using loading::args, loading::rows, loading::warp, loading::lane, loading::params, loading::smem, loading::masks;
    using loading::offsets_of, loading::slot_of;
    using loading::ROWS, loading::QUERY_STRIDE, loading::TILE_BYTES, loading::STAGE_BYTES;
    using typename loading::tile;
    /* Behind the rings: queries, the new key and value as the cache has them, and the squares of the row of x. */
    static constexpr int QUERY_BYTES = decode_query_bytes(D, ROWS);
    static constexpr int ROW_BYTES = 2 * D * Kind::CACHE_BYTES; /* of the new key and value */

    __device__ decode_heads(const pk_attention_args &args, const decode_params &params, char *smem)
        : loading(args, params, smem)
    {
    }

    /* A sequence's token, as far as it is known without the projection. */
    struct new_token {
        bool is_valid;
        int slot; /* where this CTA, which has the last keys, stores the token; or -1 */
        float cosine[8], sine[8];
    };

    __device__ char *heads_memory() const { return smem + blockDim.x / 32 * params.ring_bytes; }
    __device__ bool has_last_keys() const { return rows.unit.part + 1 == rows.unit.num_parts; }
    __device__ int dim_of_piece() const { return lane % (D / 16) * 8; }

    __device__ void read_token(new_token &token) const
    {
        const pk_qk_norm_rope_store_args &rope = params.rope;
        int half = (int)args.head_dim / 2, dim = dim_of_piece(), position = rope.positions[rows.unit.seq];
        int64_t slot = pk_load_slot(rope.store, rows.unit.seq);
        token.is_valid = position >= 0 && position < rope.max_positions;
        if (token.is_valid && pk_is_slot(rope.store, slot) && has_last_keys()) token.slot = (int)slot;
        if (blockIdx.x == 0)
            for (const void *weight : {rope.q_weight, rope.k_weight})
                pk_prefetch_to_l2((const char *)weight + lane * 16);
        if (!token.is_valid || dim >= half) return;
        load_angles<true>(token.cosine, token.sine, rope.cos_sin + position * args.head_dim + dim, half, 8);
    }

    /* Leaves the queries where load_queries looks for them, and after them the key and the value. */
    template <typename T>
    __device__ void take_heads(const new_token &token) const
    {
        using piece = head_piece<T>;
        using Cache = std::conditional_t<Kind::IS_FP8, __nv_fp8_e4m3, T>;
        const pk_qk_norm_rope_store_args &rope = params.rope;
        int head_dim = (int)args.head_dim, half = head_dim / 2, dim = dim_of_piece(), group = params.group.divisor;
        int num_q_heads = (int)args.num_q_heads, num_turned = num_q_heads + (int)args.num_kv_heads;
        int num_heads = group + (token.slot >= 0 ? 2 : 0);
        const T *qkv = (const T *)rope.qkv + rows.unit.seq * rope.qkv_stride + dim;
        float *squares = (float *)(heads_memory() + QUERY_BYTES + ROW_BYTES), scale = 1;
#pragma unroll 1
        for (int first = 0; first < num_heads; first += blockDim.x / (D / 16)) { /* all warps, for the barrier */
            int i = first + (int)threadIdx.x / (D / 16);
            head_kind kind = i < group ? QUERY : i == group ? KEY : VALUE;
            int head = kind == QUERY ? rows.head * group + i : rows.head + (kind == KEY ? num_q_heads : num_turned);
            bool is_there = i < num_heads && dim < half;
            piece x = {}, weights = {};
            if (is_there) x = piece::template load<true>(qkv + head * head_dim, half, 8);
            const T *weight = (const T *)(kind == QUERY ? rope.q_weight : rope.k_weight);
            if (is_there && weight) weights = piece::template load<true>(weight + dim, half, 8);
            if (first == 0) {
                pk_leave_squares<T, true>(squares, rope.rms, rows.unit.seq, blockDim.x, threadIdx.x);
                scale = pk_rms_scale(squares, rope.rms);
            }
            piece turned =
                turn_head(x, scale, weights, weight, token.cosine, token.sine, D / 16, 1.0f / head_dim, rope.eps);
            x = kind == VALUE ? x.times(scale) : token.is_valid ? turned : piece{};
            if (!is_there) continue;
            if (kind == QUERY) {
                T *to = (T *)heads_memory() + i * QUERY_STRIDE + dim;
                x.low.store(to);
                x.high.store(to + half);
            } else {
                pk_cache_divisor divisor(kind == KEY ? args.k_scale : args.v_scale, Kind::IS_FP8, rows.head);
                Cache *to = (Cache *)new_row(kind == VALUE) + dim;
                pk_write_cache<true>(to, x.low, 8, divisor);
                pk_write_cache<true>(to + half, x.high, 8, divisor);
            }
        }
    }

    __device__ char *new_row(bool is_value) const
    {
        return heads_memory() + QUERY_BYTES + is_value * D * Kind::CACHE_BYTES;
    }

    /* Brings the new key and value to the cache, and to the stage that was loaded before they were there. */
    __device__ void put_new_rows(int new_slot, int stage, int in_chunk) const
    {
        row_offsets at = offsets_of(params.block_size.divide(new_slot), slot_of(new_slot));
        char *k_row = (char *)args.k_cache + rows.head * args.k_strides.head * Kind::CACHE_BYTES + at.k;
        char *v_row = (char *)args.v_cache + rows.head * args.v_strides.head * Kind::CACHE_BYTES + at.v;
        for (int i = lane; i < 2 * tile::PIECES; i += 32) {
            int piece = i % tile::PIECES, is_value = i / tile::PIECES;
            if (piece * 16 >= (int)args.head_dim * Kind::CACHE_BYTES) continue;
            uint4 bits = *(const uint4 *)(new_row(is_value) + piece * 16);
            *(uint4 *)((is_value ? v_row : k_row) + piece * 16) = bits;
            char *to = smem + warp * params.ring_bytes + stage * STAGE_BYTES + is_value * TILE_BYTES;
            bool is_seen = masks[0] >> in_chunk & 1; /* its page is no padding */
            if (is_seen) *(uint4 *)(to + tile::offset(in_chunk, piece)) = bits;
        }
        __syncwarp();
    }
};

#endif
