/* sm90_consumer.h - the computing half of sm90.cu: one warpgroup's items, their
 * products S = Q K^T and O += P V, and their results. The softmax is sm90_softmax.h.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_SM90_CONSUMER_H
#define PK_CUDA_ATTENTION_PREFILL_SM90_CONSUMER_H

#include "cuda/attention/prefill/sm90_softmax.h"

#ifdef PK_SM90A
template <int head_dim, typename Kind, bool CUTS, int WARPGROUPS>
struct consumer : prefill_rows<head_dim, Kind, WARPGROUPS> {
    using base = prefill_rows<head_dim, Kind, WARPGROUPS>;
    using base::first_position, base::last_position, base::scale, base::k_scale;
    using base::kind_of_tile, base::prepare_scores, base::softmax, base::pack_p, base::shrink_o;
    using base::params, base::shared, base::q_smem, base::k_smem, base::v_smem, base::batch, base::args;
    using base::PLAIN, base::MODIFIED, base::SHRUNK, base::FIRST, base::VERY_FIRST, base::NO_TILE;
    using base::slot, base::q, base::k, base::v, base::n, base::tile_begin, base::tail_tile, base::bad_boxes;
    using base::tile;
    using base::unmasked_begin, base::unmasked_end, base::offset, base::sum, base::s, base::o, base::p;
    using base::warpgroup, base::lane, base::first_row, base::position, base::head;
    using typename base::shape, typename base::T, typename base::V, typename base::tile_kind;

    /* One lane a warp tells the producers that it needs a tile no longer; or all do, where others write to it, too. */
    __device__ __forceinline__ void release(uint64_t &barrier, bool by_all = false)
    {
        __syncwarp();
        if (lane == 0 || by_all) barrier_arrive(smem_address(&barrier));
    }

    /* A number that is the same in all lanes. The compiler cannot know, and would write branches for lanes that part. */
    __device__ static int in_all_lanes(int x) { return __shfl_sync(~0u, x, 0); }

    /* Waits for the item at `slot` and starts its rows; false at the end of the list. An item stays in its slot until
     * its output is stored. */
    __device__ __forceinline__ bool begin_item()
    {
        barrier_wait(smem_address(&shared->q_full[q.at]), q.parity);
        const prefill_item &item = shared->item[slot.at];
        if (!in_all_lanes(item.num_positions)) return false;
        int first = item.first_key + first_position, last = item.first_key + last_position; /* diagonals */
        n = in_all_lanes(shape::last_tile(item));
        tile_begin = in_all_lanes(shape::first_tile(item));
        unmasked_begin = in_all_lanes((visible_begin(batch, last) + tile - 1) / tile);
        unmasked_end = in_all_lanes(visible_end(batch, first, item.context_len) / tile);
        tail_tile = in_all_lanes(item.context_len % tile ? item.context_len / tile : -1);
        if (Kind::IS_FP8) {
            k_scale = pk_scale_of(args.k_scale, item.seq, batch.kv_head_of(item.q_head));
            if (args.softcap <= 0) scale = args.softmax_scale * PK_LOG2E * (k_scale > 0 ? k_scale : 1);
        }
        for (int r = 0; r < 2; r++) offset[r] = PK_NO_SCORE, sum[r] = 0;
        return true;
    }

    /* One warpgroup issues products at a time, in turn, so that the softmax of one lies under the products of others. */
    __device__ __forceinline__ void wait_turn() { named_sync(1 + warpgroup, 256); }
    __device__ __forceinline__ void pass_turn()
    {
        named_arrive(warpgroup + 1 == shape::warpgroups ? 1 : 2 + warpgroup, 256);
    }

    __device__ __forceinline__ void issue_scores()
    {
        /* Read by the lane that gives it back: racecheck does not see that a warp which never parts is synchronised. */
        bad_boxes = __shfl_sync(~0u, lane == 0 ? shared->k.bad_boxes[k.at] : 0, 0);
        uint32_t rows = q_smem + q.at * shape::q_bytes + warpgroup * 64 * shape::row_bytes;
        uint64_t a = descriptor(rows, 16, shape::group_bytes);
        uint64_t b = descriptor(k_smem + k.at * shape::kv_bytes, 16, shape::columns * shape::group_bytes);
        pin(s);
        wgmma_fence();
        for (int d = 0; d < head_dim; d += 16) {
            int column = d / shape::column, inner = d % shape::column * 2;
            wgmma<T, tile>::smem_smem(s, a + (column * shape::rows * shape::row_bytes + inner) / 16,
                                      b + (column * shape::group_bytes + inner) / 16, d > 0);
        }
        wgmma_commit();
    }

    __device__ __forceinline__ void issue_values(bool add)
    {
        uint64_t b =
            descriptor(v_smem + v.at * shape::kv_bytes, shape::group_bytes, shape::columns * shape::group_bytes);
        pin(o);
        wgmma_fence();
        for (int i = 0; i < tile; i += 16)
            wgmma<V, head_dim>::regs_smem(o, p + i / 4, b + i / 8 * shape::columns * shape::group_bytes / 16,
                                          i > 0 || add);
        wgmma_commit();
    }

    /* What lies beyond the end of a sequence in its last box may be NaN, and 0 * NaN would be NaN; further boxes are
     * zeros. Both warpgroups write the same zeros, each before its own products. */
    __device__ __forceinline__ void zero_tail(const prefill_item &item)
    {
        constexpr int row_vectors = head_dim / 8, column_vectors = shape::column / 8;
        uint32_t tile_smem = v_smem + v.at * shape::kv_bytes;
        int first = item.context_len % tile, end = (first + params.box_rows - 1) & -params.box_rows; /* of its box */
#pragma unroll 1
        for (int i = first * row_vectors + threadIdx.x % 128; i < end * row_vectors; i += 128) {
            int row = i / row_vectors, vector = i % row_vectors;
            uint32_t at = tile_smem + (row / 8 * shape::columns + vector / column_vectors) * shape::group_bytes +
                          row % 8 * shape::row_bytes + vector % column_vectors * 16;
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
        }
        fence_async_proxy();
        named_sync(1 + shape::warpgroups + warpgroup, 128);
    }

    /* Keeps offsets and sums of an item whose softmax is done: the next item's take their place before finish_item(). */
    __device__ __forceinline__ void set_rows_aside()
    {
        for (int r = 0; r < 2; r++) {
            float total = quad_sum(sum[r]);
            if (lane % 4 == 0) shared->done[first_row + 8 * r] = {offset[r], total};
        }
        __syncwarp();
    }

    __device__ __forceinline__ void store(const prefill_item &item)
    {
        for (int r = 0; r < 2; r++) {
            float2 done = shared->done[first_row + 8 * r];
            float v_scale = Kind::IS_FP8 ? pk_scale_of(args.v_scale, item.seq, batch.kv_head_of(item.q_head)) : 1;
            int64_t token = item.first_token + position[r], q_head = item.q_head + head[r];
            const row_end end = finish_row(args, q_head, done.x, done.y, v_scale);
            T *out = (T *)args.out + token * args.out_token_stride + q_head * args.out_head_stride;
            bool is_row = position[r] < item.num_positions;
            if (args.lse && lane % 4 == 0 && is_row) args.lse[q_head * args.lse_head_stride + token] = end.lse;
            for (int c = 0; c < head_dim / 32; c++) { /* lanes of a quad swap pieces: 8 neighbouring columns each */
                uint32_t x[4];
                for (int i = 0; i < 4; i++)
                    x[i] = Kind::pack(o[16 * c + 4 * i + 2 * r] * end.scale, o[16 * c + 4 * i + 2 * r + 1] * end.scale);
                for (int i = 0; i < 4; i += 2) {
                    uint32_t got = __shfl_xor_sync(~0u, lane & 1 ? x[i] : x[i + 1], 1);
                    (lane & 1 ? x[i] : x[i + 1]) = got;
                }
                for (int i = 0; i < 2; i++) {
                    uint32_t got = __shfl_xor_sync(~0u, lane & 2 ? x[i] : x[i + 2], 2);
                    (lane & 2 ? x[i] : x[i + 2]) = got;
                }
                if (is_row) *(uint4 *)(out + 32 * c + lane % 4 * 8) = make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
    }

    /* The rows of a part; and with the first one, for who merges them, whose they are. */
    __device__ __forceinline__ void leave_part(const prefill_item &item)
    {
        static_assert(!CUTS || shape::rows == PREFILL_PART_ROWS, "rows of an item");
        partial_rows part = batch.parts.part_at(item.first_slot + item.part);
        for (int r = 0; r < 2; r++) {
            int row = first_row + 8 * r;
            if (lane % 4 == 0) {
                __stcg(part.max() + row, shared->done[row].x);
                __stcg(part.sum() + row, shared->done[row].y);
            }
            float *to = part.output(row) + lane % 4 * 2;
            for (int i = 0; i < head_dim / 8; i++)
                __stcg((float2 *)(to + 8 * i), make_float2(o[4 * i + 2 * r], o[4 * i + 2 * r + 1]));
        }
        if (item.part == 0 && warpgroup == 0 && threadIdx.x % 128 == 0)
            batch.parts.note({item.seq, item.q_head, batch.heads, item.first_token, item.num_positions, 0,
                              item.first_slot, item.num_parts});
    }

    /* The outputs of an item. */
    __device__ __forceinline__ void finish_item(int slot)
    {
        const prefill_item &item = shared->item[slot];
        if (CUTS && in_all_lanes(item.num_parts) > 1)
            leave_part(item);
        else
            store(item);
        __syncwarp(); /* what was set aside has been read */
        barrier_arrive(smem_address(&shared->item_empty[slot]));
    }

    /* From the scores in hand to P; frees what they were made of. */
    __device__ __forceinline__ tile_kind finish_scores(tile_kind kind)
    {
        pin(s);
        const bool is_prepared = kind != PLAIN;
        if (is_prepared) {
            if (kind == NO_TILE) return kind;
            if (prepare_scores(kind >= FIRST) && kind == MODIFIED) kind = SHRUNK;
        }
        if (softmax(is_prepared) && kind < FIRST) kind = SHRUNK;
        pin(s);
        release(shared->k.empty[k.at]);
        k.advance();
        if (n == tile_begin) barrier_arrive(smem_address(&shared->q_empty[q.at]));
        return kind;
    }

    /* Frees the values once they have been multiplied. */
    __device__ __forceinline__ void free_values()
    {
        pin(o);
        release(shared->v.empty[v.at], Kind::IS_FP8); /* zero_tail() wrote to it, too: see fillers */
        v.advance();
    }

    __device__ __forceinline__ void wait_for_values(int tail_slot)
    {
        barrier_wait(smem_address(&shared->v.full[v.at]), v.parity);
        if (tail_slot >= 0) zero_tail(shared->item[tail_slot]);
    }

    /* All tiles take one way: what a short item waits for is the fetching of instructions (prefill/NOTES.md #29). */
    __device__ __forceinline__ void run()
    {
        if (!begin_item()) return;
        if (warpgroup + 1 == shape::warpgroups) pass_turn(); /* warpgroup 0 issues first */
        tile_kind kind = VERY_FIRST;
        barrier_wait(smem_address(&shared->k.full[k.at]), k.parity);
        wait_turn();
        issue_scores();
        pass_turn();
        wgmma_wait<0>();
        while (true) { /* the scores of tile n are there, the values of the one before are on their way */
            kind = finish_scores(kind);
            wgmma_wait<0>();
            if (kind != VERY_FIRST) free_values();
            if (kind >= SHRUNK) {
                if (kind == SHRUNK) shrink_o();
                if (kind == FIRST || kind == NO_TILE) finish_item((slot.at + ITEM_SLOTS - 1) % ITEM_SLOTS);
                if (kind == NO_TILE) break;
            }
            pack_p();
            bool add = kind < FIRST, is_last = n == tile_begin;
            int tail_slot = n == tail_tile ? slot.at : -1;
            n--;
            if (is_last) {
                set_rows_aside();
                slot.advance();
                q.advance();
                if (!begin_item()) {
                    wait_for_values(tail_slot);
                    wait_turn();
                    issue_values(add);
                    pass_turn();
                    kind = NO_TILE;
                    continue;
                }
            }
            barrier_wait(smem_address(&shared->k.full[k.at]), k.parity);
            wait_turn();
            issue_scores();
            wait_for_values(tail_slot);
            issue_values(add);
            pass_turn();
            kind = is_last ? FIRST : kind_of_tile(); /* while the scores are being computed */
            wgmma_wait<1>();
        }
        if (warpgroup == 0) wait_turn(); /* takes the last turn that was passed: no barrier is left half full */
    }
};
#endif  // PK_SM90A
#endif
