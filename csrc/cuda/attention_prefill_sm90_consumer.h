/* attention_prefill_sm90_consumer.h - the computing half of attention_prefill_sm90.cu: one warpgroup's items, their
 * products S = Q K^T and O += P V, and their results. The softmax is attention_prefill_sm90_softmax.h.
 */
#ifndef PK_CUDA_ATTENTION_PREFILL_SM90_CONSUMER_H
#define PK_CUDA_ATTENTION_PREFILL_SM90_CONSUMER_H

#include "cuda/attention_prefill_sm90_softmax.h"

#ifdef PK_SM90A
template <int head_dim, typename Kind, bool CUTS, int WARPGROUPS>
struct consumer : prefill_rows<head_dim, Kind, WARPGROUPS> {
    using base = prefill_rows<head_dim, Kind, WARPGROUPS>;
    using base::cap_and_mask, base::softmax, base::pack_p, base::scale_o;
    using base::params, base::shared, base::q_smem, base::k_smem, base::v_smem, base::batch, base::args;
    using base::slot, base::q, base::k, base::v, base::n, base::tile_begin, base::tail_tile, base::bad_boxes;
    using base::tile;
    using base::unmasked_begin, base::unmasked_end, base::offset, base::sum, base::s, base::o, base::p;
    using base::warpgroup, base::lane, base::first_row, base::position, base::head, base::scale, base::k_scale;
    using typename base::shape, typename base::T, typename base::V;

    /* One lane a warp tells the producers that it needs a tile no longer; or all do, where others write to it, too. */
    __device__ __forceinline__ void release(uint64_t &barrier, bool by_all = false)
    {
        __syncwarp();
        if (lane == 0 || by_all) barrier_arrive(smem_address(&barrier));
    }

    /* Waits for the item at `slot` and starts its rows; false at the end of the list. An item stays in its slot until
     * its output is stored. */
    __device__ __forceinline__ bool begin_item()
    {
        barrier_wait(smem_address(&shared->q_full[q.at]), q.parity);
        const prefill_item &item = shared->item[slot.at];
        if (!item.num_positions) return false;
        int first = item.first_key + warpgroup * 64 / batch.group; /* diagonals of the warpgroup's first and last row */
        int last = item.first_key + (warpgroup * 64 + 63) / batch.group;
        n = shape::last_tile(item);
        tile_begin = shape::first_tile(item);
        unmasked_begin = (visible_begin(batch, last) + tile - 1) / tile;
        unmasked_end = visible_end(batch, first, item.context_len) / tile;
        tail_tile = item.context_len % tile ? item.context_len / tile : -1;
        if (Kind::IS_FP8) {
            k_scale = pk_scale_of(args.k_scale, item.seq, item.kv_head);
            if (args.softcap <= 0) scale = args.softmax_scale * PK_LOG2E * (k_scale > 0 ? k_scale : 1);
        }
        for (int r = 0; r < 2; r++) { /* a sink is a key without a value: in the sum from the start, once a quad */
            float sink = args.sinks && (!CUTS || item.num_parts == 1)
                             ? args.sinks[item.kv_head * batch.group + head[r]] * PK_LOG2E
                             : -INFINITY;
            offset[r] = fmaxf(sink, PK_NO_SCORE);
            sum[r] = lane % 4 == 0 ? exp2_fast(sink - offset[r]) : 0;
        }
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
        uint64_t a = descriptor<shape::row_bytes>(rows, 16, shape::group_bytes);
        uint64_t b =
            descriptor<shape::row_bytes>(k_smem + k.at * shape::kv_bytes, 16, shape::columns * shape::group_bytes);
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
        uint64_t b = descriptor<shape::row_bytes>(v_smem + v.at * shape::kv_bytes, shape::group_bytes,
                                                  shape::columns * shape::group_bytes);
        pin(o);
        wgmma_fence();
        for (int i = 0; i < tile; i += 16)
            wgmma<V, head_dim>::regs_smem(o, p + i / 4, b + i / 8 * shape::columns * shape::group_bytes / 16,
                                          i > 0 || add);
        wgmma_commit();
    }

    /* What lies beyond the end of a sequence in its last page may be NaN, and 0 * NaN would be NaN. Both warpgroups
     * write the same zeros, each before its own products. */
    __device__ __forceinline__ void zero_tail(const prefill_item &item)
    {
        constexpr int row_vectors = head_dim / 8, column_vectors = shape::column / 8;
        uint32_t tile_smem = v_smem + v.at * shape::kv_bytes;
        for (int i = item.context_len % tile * row_vectors + threadIdx.x % 128; i < tile * row_vectors; i += 128) {
            int row = i / row_vectors, vector = i % row_vectors;
            uint32_t at = tile_smem + (row / 8 * shape::columns + vector / column_vectors) * shape::group_bytes +
                          row % 8 * shape::row_bytes + vector % column_vectors * 16;
            asm volatile("st.shared.v4.b32 [%0], {%1, %1, %1, %1};" ::"r"(at), "r"(0) : "memory");
        }
        fence_async_proxy();
        named_sync(1 + shape::warpgroups + warpgroup, 128);
    }

    __device__ __forceinline__ void store(const prefill_item &item, const float (&offset)[2], const float (&sums)[2])
    {
        for (int r = 0; r < 2; r++) {
            float v_scale = Kind::IS_FP8 ? pk_scale_of(args.v_scale, item.seq, item.kv_head) : 1;
            float sum = quad_sum(sums[r]), inverse = sum == 0 ? 0 : v_scale / sum; /* NaN shows */
            int64_t token = item.first_token + position[r], q_head = item.kv_head * batch.group + head[r];
            T *out = (T *)args.out + token * args.out_token_stride + q_head * args.out_head_stride;
            bool is_row = position[r] < item.num_positions;
            if (args.lse && lane % 4 == 0 && is_row)
                args.lse[q_head * args.lse_head_stride + token] =
                    sum == 0 ? -INFINITY : (offset[r] + log2f(sum)) * PK_LN2;
            for (int c = 0; c < head_dim / 32; c++) { /* lanes of a quad swap pieces: 8 neighbouring columns each */
                uint32_t x[4];
                for (int i = 0; i < 4; i++)
                    x[i] = Kind::pack(o[16 * c + 4 * i + 2 * r] * inverse, o[16 * c + 4 * i + 2 * r + 1] * inverse);
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
    __device__ __forceinline__ void leave_part(const prefill_item &item, const float (&offset)[2],
                                               const float (&sums)[2])
    {
        static_assert(!CUTS || shape::rows == prefill_parts_room::ROWS, "rows of an item");
        auto part = batch.parts.part_at(item.first_slot + item.part, head_dim);
        for (int r = 0; r < 2; r++) {
            int row = first_row + 8 * r;
            float sum = quad_sum(sums[r]);
            if (lane % 4 == 0) {
                __stcg(part.max() + row, offset[r]);
                __stcg(part.sum() + row, sum);
            }
            float *to = part.output(row) + lane % 4 * 2;
            for (int i = 0; i < head_dim / 8; i++)
                __stcg((float2 *)(to + 8 * i), make_float2(o[4 * i + 2 * r], o[4 * i + 2 * r + 1]));
        }
        if (item.part == 0 && warpgroup == 0 && threadIdx.x % 128 == 0)
            batch.parts.note(
                {item.seq, item.kv_head, item.first_token, item.num_positions, item.first_slot, item.num_parts, {}});
    }

    __device__ __forceinline__ void finish_item(int slot, const float (&offset)[2], const float (&sums)[2])
    {
        const prefill_item &item = shared->item[slot];
        if (CUTS && item.num_parts > 1)
            leave_part(item, offset, sums);
        else
            store(item, offset, sums);
        barrier_arrive(smem_address(&shared->item_empty[slot]));
    }

    /* The products with V are done: frees their stage. */
    __device__ __forceinline__ void finish_values()
    {
        wgmma_wait<0>();
        pin(o);
        release(shared->v.empty[v.at], Kind::IS_FP8); /* zero_tail() wrote to it, too: see fillers */
        v.advance();
    }

    /* From scores that are done to P; frees what they were made of. */
    __device__ __forceinline__ bool finish_scores(bool is_first, float (&shrink)[2])
    {
        pin(s);
        cap_and_mask(s);
        bool is_shrunk = softmax(is_first, shrink);
        pin(s);
        release(shared->k.empty[k.at]);
        k.advance();
        if (n == tile_begin) barrier_arrive(smem_address(&shared->q_empty[q.at]));
        return is_shrunk;
    }

    __device__ __forceinline__ void run()
    {
        if (!begin_item()) return;
        if (warpgroup + 1 == shape::warpgroups) pass_turn(); /* warpgroup 0 issues first */
        bool add = false, has_tail;
        int done_slot;
        float shrink[2];
        barrier_wait(smem_address(&shared->k.full[k.at]), k.parity);
        wait_turn();
        issue_scores();
        pass_turn();
        wgmma_wait<0>();
        finish_scores(true, shrink);
        pack_p();
        while (true) { /* P of tile n is ready: the scores of the next tile, the values of this one */
            bool is_last = n == tile_begin;
            float done_offset[2] = {offset[0], offset[1]}, done_sum[2] = {sum[0], sum[1]};
            done_slot = slot.at;
            has_tail = n == tail_tile;
            n--;
            if (is_last) {
                slot.advance();
                q.advance();
                if (!begin_item()) break;
            }
            barrier_wait(smem_address(&shared->k.full[k.at]), k.parity);
            wait_turn();
            issue_scores();
            barrier_wait(smem_address(&shared->v.full[v.at]), v.parity);
            if (has_tail) zero_tail(shared->item[done_slot]);
            issue_values(add);
            pass_turn();
            wgmma_wait<1>();
            bool is_shrunk = finish_scores(is_last, shrink);
            if (is_last) { /* two waits: one before the branch would be moved up over the softmax by ptxas */
                finish_values();
                finish_item(done_slot, done_offset, done_sum);
            } else {
                finish_values();
                if (is_shrunk) scale_o(shrink);
            }
            add = !is_last;
            pack_p();
        }
        barrier_wait(smem_address(&shared->v.full[v.at]), v.parity);
        if (has_tail) zero_tail(shared->item[done_slot]);
        wait_turn();
        issue_values(add);
        pass_turn();
        finish_values();
        finish_item(done_slot, offset, sum);
        if (warpgroup == 0) wait_turn(); /* takes the last turn that was passed: no barrier is left half full */
    }
};
#endif  // PK_SM90A
#endif
