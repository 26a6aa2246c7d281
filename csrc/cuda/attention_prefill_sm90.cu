/* attention_prefill_sm90.cu - paged attention with many query tokens a sequence, on Hopper's matrix and copy units.
 *
 * One CTA an SM takes items of 128 rows (attention_prefill.h).
 *
 *     warp 0        the list of items                         (128 threads that give their registers away)
 *     warps 1, 2    Q and K tiles, V tiles by TMA
 *     warpgroups    64 rows each: S = Q K^T, softmax, O += P V; P stays in registers
 *     1 and 2
 *
 * A tile is 128 keys (64 for head_dim 256); three stages of K, two of V, two of Q. A page arrives by one TMA box: the
 * tensor map splits a slot into (slot / 8, slot % 8) and a head into columns of 64 elements, so that the box of any
 * page lands as groups of 8 swizzled rows at one stride, whatever the page size. A page that does not exist is a
 * coordinate outside of the tensor, which reads as zeros.
 *
 * Each warpgroup walks one chain of tiles, over the borders of items: issue S of the next tile, issue O of this one, do
 * the softmax of the next while O runs. The warpgroups take turns at issuing, so that the softmax of one lies under the
 * products of the other. Tiles run from the last visible key to the first: the masked ones come first. What bounds it
 * is the softmax of one warpgroup, 64 exponentials a thread and tile; hence softmax() looks for no maxima.
 *
 * The order of the arithmetic of a row depends on its own sequence alone, never on the batch.
 * Reached on an H200, bf16, 16/8 heads of 128, page 16 (TFLOP/s): 1 x 16384 745, 1 x 4096 605, 16 x 1024 464. Attempts:
 * benchmarks/lab/prefill/NOTES.md.
 */
#include "cuda/attention_prefill_sm90.h"

#include <math.h>

// --- kernels

#ifdef PK_SM90A
template <int head_dim, typename T>
struct consumer {
    using shape = tiling<head_dim>;
    using kind = attention_kind<T, false>;
    static constexpr int tile = shape::tile;
    static constexpr float most_of_a_tile = 8192, all_that_fits = 1e38f; /* see softmax() */

    const prefill_params &params;
    const prefill_batch &batch;
    const pk_attention_args &args;
    prefill_shared<head_dim> *shared;
    uint32_t q_smem, k_smem, v_smem;
    int warpgroup, lane;
    int position[2], head[2]; /* of the two rows of this thread, within an item */
    float scale;              /* of the scores to log2 */

    ring_position<ITEM_SLOTS> slot;
    ring_position<shape::q_stages> q;
    ring_position<shape::k_stages> k;
    ring_position<shape::v_stages> v;
    int n, tile_begin;                /* the tile whose scores are next, and the item's last one */
    int unmasked_begin, unmasked_end; /* tiles that all rows of the warpgroup see wholly */
    int tail_tile;                    /* the tile that ends in keys of nobody, or -1 */
    float offset[2], sum[2]; /* of the softmax, in base 2 (-inf: no key yet); the sum is of this thread's columns */
    unsigned bad_boxes;      /* of the tile: see prefill_shared */
    float s[tile / 2], o[head_dim / 2];
    uint32_t p[tile / 4];

    __device__ __forceinline__ consumer(const prefill_params &params_, prefill_shared<head_dim> *shared_, uint32_t smem)
        : params(params_),
          batch(params_.batch),
          args(params_.batch.args),
          shared(shared_),
          q_smem(smem),
          k_smem(smem + shape::q_stages * shape::q_bytes),
          v_smem(k_smem + shape::k_stages * shape::kv_bytes)
    {
        warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0) - 1;
        lane = threadIdx.x & 31;
        for (int r = 0; r < 2; r++) {
            position[r] = (first_row() + 8 * r) / batch.group;
            head[r] = (first_row() + 8 * r) % batch.group;
        }
        scale = (args.softcap > 0 ? args.softcap : args.softmax_scale) * PK_LOG2E;
    }

    /* Of this thread's two rows of the item; the other is 8 below. */
    __device__ __forceinline__ int first_row() { return warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4; }

    /* One lane a warp tells the producers that it needs a tile no longer. */
    __device__ __forceinline__ void release(uint64_t &barrier)
    {
        __syncwarp();
        if (lane == 0) barrier_arrive(smem_address(&barrier));
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
        n = last_tile<tile>(item);
        tile_begin = first_tile<tile>(item);
        unmasked_begin = (visible_begin(batch, last) + tile - 1) / tile;
        unmasked_end = visible_end(batch, first, item.context_len) / tile;
        tail_tile = item.context_len % tile ? item.context_len / tile : -1;
        return true;
    }

    /* A sink is a key without a value: it is in the sum from the start, once a quad. */
    __device__ __forceinline__ void begin_rows()
    {
        const prefill_item &item = shared->item[slot.at];
        for (int r = 0; r < 2; r++) {
            bool has_sink = args.sinks && position[r] < item.num_positions;
            offset[r] = has_sink ? args.sinks[item.kv_head * batch.group + head[r]] * PK_LOG2E : -INFINITY;
            sum[r] = has_sink && lane % 4 == 0 ? 1.0f : 0.0f;
        }
    }

    __device__ __forceinline__ void wait_turn() { named_sync(1 + warpgroup, 256); }
    __device__ __forceinline__ void pass_turn() { named_arrive(2 - warpgroup, 256); }

    __device__ __forceinline__ void issue_scores()
    {
        /* Read by the lane that gives it back: racecheck does not see that a warp which never parts is synchronised. */
        bad_boxes = __shfl_sync(~0u, lane == 0 ? shared->k_bad_boxes[k.at] : 0, 0);
        uint32_t rows = q_smem + q.at * shape::q_bytes + warpgroup * 64 * shape::row_bytes;
        uint64_t a = descriptor<shape::row_bytes>(rows, 16, shape::group_bytes);
        uint64_t b =
            descriptor<shape::row_bytes>(k_smem + k.at * shape::kv_bytes, 16, shape::columns * shape::group_bytes);
        pin(s);
        wgmma_fence();
#pragma unroll
        for (int d = 0; d < head_dim; d += 16) {
            int column = d / shape::column, inner = d % shape::column * 2;
            wgmma<T, tile>::smem_smem(s, a + (column * ROWS * shape::row_bytes + inner) / 16,
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
#pragma unroll
        for (int i = 0; i < tile; i += 16)
            wgmma<T, head_dim>::regs_smem(o, p + i / 4, b + i / 8 * shape::columns * shape::group_bytes / 16,
                                          i > 0 || add);
        wgmma_commit();
    }

    /* What lies behind the end of a sequence in its last page may be NaN, and 0 * NaN would be NaN. Both warpgroups
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
        named_sync(3 + warpgroup, 128);
    }

    __device__ __forceinline__ float cap(float score)
    {
        return 1.0f - __fdividef(2.0f, exp2_fast(score * params.cap_scale) + 1.0f); /* tanh */
    }

    /* Whether row r sees the j-th of its columns, which are 8j + 2 (lane % 4) + e of the tile. */
    struct visible_columns {
        int begin, end;
        unsigned bad_boxes, box_shift;
        __device__ __forceinline__ bool has(int j, int e) const
        {
            return 8 * j + e >= begin && 8 * j + e < end && !(bad_boxes >> (8 * j >> box_shift) & 1);
        }
    };
    __device__ __forceinline__ visible_columns columns_of(int r)
    {
        const prefill_item &item = shared->item[slot.at];
        int diagonal = item.first_key + position[r], column = n * tile + 2 * (lane % 4);
        return {visible_begin(batch, diagonal) - column, visible_end(batch, diagonal, item.context_len) - column,
                bad_boxes, (unsigned)params.box_shift};
    }

    __device__ __forceinline__ void cap_and_mask()
    {
        if (args.softcap > 0) {
#pragma unroll
            for (int i = 0; i < tile / 2; i++) s[i] = cap(s[i]);
        }
        if (n >= unmasked_begin && n < unmasked_end && !bad_boxes) return;
#pragma unroll
        for (int r = 0; r < 2; r++) {
            visible_columns visible = columns_of(r);
#pragma unroll
            for (int j = 0; j < tile / 8; j++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    if (!visible.has(j, e)) s[4 * j + 2 * r + e] = -INFINITY;
        }
    }

    /* Scores of the rows of this warp once more, into s where wanted[r]: a rare path that needs no other warp. */
    __device__ __forceinline__ void score_again(const bool (&wanted)[2])
    {
        auto swizzled = [](uint32_t at) { return at ^ (at >> 3 & (shape::row_bytes == 128 ? 0x70 : 0x30)); };
        uint32_t q_row = q_smem + q.at * shape::q_bytes + (first_row() - lane / 4 + lane % 16) * shape::row_bytes;
        uint32_t k_row = k_smem + k.at * shape::kv_bytes + lane % 8 * shape::row_bytes +
                         lane / 16 * shape::columns * shape::group_bytes;
        visible_columns visible[2] = {columns_of(0), columns_of(1)};
        float scores[tile / 2]; /* in local memory, so that the loop need not be unrolled */
#pragma unroll 1
        for (int j = 0; j < tile / 8; j += 2, k_row += 2 * shape::columns * shape::group_bytes) {
            float d[2][4] = {};
#pragma unroll 1
            for (int i = 0; i < head_dim; i += 16) {
                uint32_t a[4], b[4];
                int column = i / shape::column, at = i % shape::column * 2;
                ldmatrix_x4(a, swizzled(q_row + column * ROWS * shape::row_bytes + at + lane / 16 * 16));
                ldmatrix_x4(b, swizzled(k_row + column * shape::group_bytes + at + lane / 8 % 2 * 16));
                kind::mma(d[0], a, {b[0], b[1]});
                kind::mma(d[1], a, {b[2], b[3]});
            }
#pragma unroll
            for (int i = 0; i < 8; i++) {
                float score = args.softcap > 0 ? cap(d[i / 4][i % 4]) : d[i / 4][i % 4];
                scores[4 * j + i] = visible[i / 2 % 2].has(j + i / 4, i % 2) ? score : -INFINITY;
            }
        }
#pragma unroll
        for (int i = 0; i < tile / 2; i++)
            if (wanted[i / 2 % 2]) s[i] = scores[i];
    }

    /* Moves the offsets of some rows up to the greatest score of the tile in s; shrink: what that leaves of what was
     * summed before. */
    __device__ __forceinline__ void raise_offsets(const bool (&wanted)[2], float (&shrink)[2])
    {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = s[2 * r];
#pragma unroll
            for (int i = 2 * r; i < tile / 2; i += 4) top = fmaxf(top, fmaxf(s[i], s[i + 1]));
            top = fmaxf(quad_max(top) * scale, offset[r]);
            if (!wanted[r]) continue;
            shrink[r] = exp2_fast(offset[r] - (top == -INFINITY ? 0.0f : top));
            offset[r] = top;
        }
    }

    /* Turns the scores of row r into exp2(scale * score - offset) and returns their sum. */
    __device__ __forceinline__ float exponentials(int r)
    {
        float subtract = offset[r] == -INFINITY ? 0.0f : offset[r], sum = 0;
#pragma unroll
        for (int i = 2 * r; i < tile / 2; i += 4) {
            s[i] = exp2_fast(s[i] * scale - subtract);
            s[i + 1] = exp2_fast(s[i + 1] * scale - subtract);
            sum += s[i] + s[i + 1];
        }
        return sum;
    }

    /* The exponentials in s are too large for the offsets of some rows. Mostly a power of two brings them down; where a
     * sum left the range of fp32 the scores are computed again. */
    __device__ __forceinline__ void lower(float (&tile_sum)[2], float (&shrink)[2])
    {
        bool is_lost[2];
#pragma unroll
        for (int r = 0; r < 2; r++) is_lost[r] = quad_any(!(tile_sum[r] < all_that_fits));
        if (__any_sync(~0u, is_lost[0] || is_lost[1])) {
            score_again(is_lost);
            raise_offsets(is_lost, shrink);
#pragma unroll
            for (int r = 0; r < 2; r++)
                if (is_lost[r]) tile_sum[r] = exponentials(r);
        }
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float top = quad_max(tile_sum[r]), factor = 1.0f;
            if (top > most_of_a_tile && !is_lost[r]) {
                int exponent = (__float_as_int(top) >> 23) - 127;
                factor = __int_as_float((127 - exponent) << 23);
                offset[r] = (offset[r] == -INFINITY ? 0.0f : offset[r]) + (float)exponent;
            }
            tile_sum[r] *= factor;
            shrink[r] *= factor;
#pragma unroll
            for (int i = 2 * r; i < tile / 2; i += 4) {
                s[i] *= factor;
                s[i + 1] *= factor;
            }
        }
    }

    /* The softmax of the tile in s. A row's offset is the greatest score of its first tile and stays: finding every
     * tile's maximum first costs a third of the softmax, and any offset gives the same quotient as long as nothing
     * overflows or vanishes. Where exponentials sum to more than 2^13 (which fp16 still holds) the offset is raised. A
     * row decides for itself: its bits do not depend on the rows beside it. Returns whether `shrink` must be applied
     * to what was summed before. */
    __device__ __forceinline__ bool softmax(bool is_first, float (&shrink)[2])
    {
        bool is_new[2];
        float tile_sum[2];
#pragma unroll
        for (int r = 0; r < 2; r++) {
            is_new[r] = is_first || offset[r] == -INFINITY;
            shrink[r] = 1.0f;
        }
        bool any_new = __any_sync(~0u, is_new[0] || is_new[1]);
        if (any_new) raise_offsets(is_new, shrink);
#pragma unroll
        for (int r = 0; r < 2; r++) tile_sum[r] = exponentials(r);
        bool any_over = __any_sync(~0u, !(tile_sum[0] + tile_sum[1] <= most_of_a_tile)); /* NaN too */
        if (any_over) lower(tile_sum, shrink);
#pragma unroll
        for (int r = 0; r < 2; r++) sum[r] = sum[r] * shrink[r] + tile_sum[r];
        return any_new || any_over;
    }

    __device__ __forceinline__ void pack_p()
    {
#pragma unroll
        for (int i = 0; i < tile / 4; i++) p[i] = kind::pack(s[2 * i], s[2 * i + 1]);
    }

    __device__ __forceinline__ void scale_o(const float (&factor)[2])
    {
#pragma unroll
        for (int i = 0; i < head_dim / 2; i++) o[i] *= factor[i / 2 % 2];
    }

    __device__ __forceinline__ void store(const prefill_item &item, const float (&offset)[2], const float (&sums)[2])
    {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            float sum = quad_sum(sums[r]), inverse = sum == 0 ? 0 : 1 / sum; /* NaN shows */
            int64_t token = item.first_token + position[r], q_head = item.kv_head * batch.group + head[r];
            T *out = (T *)args.out + token * args.out_token_stride + q_head * args.out_head_stride;
            bool is_row = position[r] < item.num_positions;
            if (args.lse && lane % 4 == 0 && is_row)
                args.lse[q_head * args.lse_head_stride + token] =
                    sum == 0 ? -INFINITY : (offset[r] + log2f(sum)) * PK_LN2;
#pragma unroll
            for (int c = 0; c < head_dim / 32; c++) { /* lanes of a quad swap pieces: 8 neighbouring columns each */
                uint32_t x[4];
#pragma unroll
                for (int i = 0; i < 4; i++)
                    x[i] = kind::pack(o[16 * c + 4 * i + 2 * r] * inverse, o[16 * c + 4 * i + 2 * r + 1] * inverse);
#pragma unroll
                for (int i = 0; i < 4; i += 2) {
                    uint32_t got = __shfl_xor_sync(~0u, lane & 1 ? x[i] : x[i + 1], 1);
                    (lane & 1 ? x[i] : x[i + 1]) = got;
                }
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    uint32_t got = __shfl_xor_sync(~0u, lane & 2 ? x[i] : x[i + 2], 2);
                    (lane & 2 ? x[i] : x[i + 2]) = got;
                }
                if (is_row) *(uint4 *)(out + 32 * c + lane % 4 * 8) = make_uint4(x[0], x[1], x[2], x[3]);
            }
        }
    }

    /* The products with V are done: frees their stage. */
    __device__ __forceinline__ void finish_values()
    {
        wgmma_wait<0>();
        pin(o);
        release(shared->v_empty[v.at]);
        v.advance();
    }

    /* From scores that are done to P; frees what they were made of. */
    __device__ __forceinline__ bool finish_scores(bool is_first, float (&shrink)[2])
    {
        pin(s);
        cap_and_mask();
        bool is_shrunk = softmax(is_first, shrink);
        pin(s);
        release(shared->k_empty[k.at]);
        k.advance();
        if (n == tile_begin) release(shared->q_empty[q.at]);
        return is_shrunk;
    }

    __device__ __forceinline__ void run()
    {
        if (!begin_item()) return;
        if (warpgroup == 1) pass_turn(); /* warpgroup 0 issues first */
        bool add = false;
        float shrink[2];
        begin_rows();
        barrier_wait(smem_address(&shared->k_full[k.at]), k.parity);
        wait_turn();
        issue_scores();
        pass_turn();
        wgmma_wait<0>();
        finish_scores(true, shrink);
        pack_p();
        while (true) { /* P of tile n is ready: the scores of the next tile, the values of this one */
            int done_slot = slot.at;
            bool is_last = n == tile_begin, has_tail = n == tail_tile;
            float done_offset[2] = {offset[0], offset[1]}, done_sum[2] = {sum[0], sum[1]};
            n--;
            if (is_last) {
                slot.advance();
                q.advance();
                if (!begin_item()) break;
                begin_rows();
            }
            barrier_wait(smem_address(&shared->k_full[k.at]), k.parity);
            wait_turn();
            issue_scores();
            barrier_wait(smem_address(&shared->v_full[v.at]), v.parity);
            if (has_tail) zero_tail(shared->item[done_slot]);
            issue_values(add);
            pass_turn();
            wgmma_wait<1>();
            bool is_shrunk = finish_scores(is_last, shrink);
            if (is_last) { /* two waits: one before the branch would be moved up over the softmax by ptxas */
                finish_values();
                store(shared->item[done_slot], done_offset, done_sum);
                barrier_arrive(smem_address(&shared->item_empty[done_slot]));
            } else {
                finish_values();
                if (is_shrunk) scale_o(shrink);
            }
            add = !is_last;
            pack_p();
        }
        int done_slot = (slot.at + ITEM_SLOTS - 1) % ITEM_SLOTS;
        barrier_wait(smem_address(&shared->v_full[v.at]), v.parity);
        if (n + 1 == tail_tile) zero_tail(shared->item[done_slot]);
        wait_turn();
        issue_values(add);
        pass_turn();
        finish_values();
        store(shared->item[done_slot], offset, sum);
        if (warpgroup == 0) wait_turn(); /* takes the last turn that was passed: no barrier is left half full */
    }
};
#endif  // PK_SM90A

template <int head_dim, typename T>
__global__ void __launch_bounds__(NUM_THREADS, 1)
    attention_prefill_kernel(const __grid_constant__ prefill_params params)
{
#ifdef PK_SM90A
    using shape = tiling<head_dim>;
    extern __shared__ char dynamic_smem[];
    __shared__ prefill_shared<head_dim> shared;
    uint32_t smem = (smem_address(dynamic_smem) + 1023) & ~1023u; /* the swizzle counts from such borders */
    uint32_t k_smem = smem + shape::q_stages * shape::q_bytes, v_smem = k_smem + shape::k_stages * shape::kv_bytes;

    if (threadIdx.x == 0) {
        constexpr int consumers = 4 * WARPGROUPS; /* warps */
        auto init = [](auto &barriers, int arrivals) {
            for (uint64_t &barrier : barriers) barrier_init(smem_address(&barrier), arrivals);
        };
        init(shared.item_full, 1);
        init(shared.item_empty, 32 * (consumers + 2)); /* and the two copying warps; all lanes of each read */
        init(shared.q_full, 1);
        init(shared.q_empty, consumers);
        init(shared.k_full, 1);
        init(shared.k_empty, consumers);
        init(shared.v_full, 1);
        init(shared.v_empty, consumers);
        barrier_init_fence();
        prefetch_tensor_map(&params.q_map);
        prefetch_tensor_map(&params.k_map);
        prefetch_tensor_map(&params.v_map);
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        give_registers<PRODUCER_REGISTERS>();
        if (threadIdx.x < 32)
            produce_items<head_dim>(params.batch, &shared);
        else if (threadIdx.x < 64)
            produce_q_and_k<head_dim>(params, &shared, smem, k_smem);
        else if (threadIdx.x < 96)
            produce_v<head_dim>(params, &shared, v_smem);
    } else {
        take_registers<CONSUMER_REGISTERS>();
        consumer<head_dim, T>(params, &shared, smem).run();
    }
#endif
}

// --- launchers

static pk_status encode_cache(CUtensorMap *map, const char *name, const pk_attention_args *args, const void *data,
                              int64_t block_stride, int64_t slot_stride, int64_t head_stride, int column, int columns,
                              int box_rows, pk_error *err)
{
    int64_t sizes[5] = {column, 8, (args->num_kv_heads - 1) * (head_stride / column) + columns, args->block_size / 8,
                        args->num_blocks};
    int64_t strides[5] = {1, slot_stride, column, 8 * slot_stride, block_stride};
    int box[5] = {column, 8, columns, box_rows / 8, 1};
    return pk_cuda_tensor_map(map, name, args->dtype, data, 5, sizes, strides, box, err);
}

template <int head_dim, typename T>
static pk_status launch_prefill(const pk_attention_args *args, row_filter filter, const pk_cuda_device *device,
                                pk_stream stream, pk_error *err)
{
    using shape = tiling<head_dim>;
    static uint64_t smem_allowed;
    prefill_params params = {};
    int64_t num_ctas = device->num_sms;
    PK_TRY(make_prefill_batch(args, filter, device, stream, ROWS, &params.batch, &num_ctas, err));
    params.box_shift = 3;
    while (args->block_size % (2 << params.box_shift) == 0 && shape::tile % (2 << params.box_shift) == 0)
        params.box_shift++;
    params.box_rows = 1 << params.box_shift;
    params.k_head_columns = (int)(args->k_head_stride / shape::column);
    params.v_head_columns = (int)(args->v_head_stride / shape::column);
    if (args->softcap > 0) params.cap_scale = args->softmax_scale / args->softcap * 2 * PK_LOG2E;

    int64_t sizes[4] = {shape::column, args->num_q_heads, args->num_tokens, shape::columns};
    int64_t strides[4] = {1, args->q_head_stride, args->q_token_stride, shape::column};
    int box[4] = {shape::column, params.batch.group, params.batch.positions, 1};
    PK_TRY(pk_cuda_tensor_map(&params.q_map, "q", args->dtype, args->q, 4, sizes, strides, box, err));
    PK_TRY(encode_cache(&params.k_map, "k_cache", args, args->k_cache, args->k_block_stride, args->k_slot_stride,
                        args->k_head_stride, shape::column, shape::columns, params.box_rows, err));
    PK_TRY(encode_cache(&params.v_map, "v_cache", args, args->v_cache, args->v_block_stride, args->v_slot_stride,
                        args->v_head_stride, shape::column, shape::columns, params.box_rows, err));
    auto kernel = attention_prefill_kernel<head_dim, T>;
    PK_TRY(pk_cuda_allow_smem(err, kernel, shape::smem_bytes, device->index, &smem_allowed));
    return pk_cuda_launch(err, "attention_prefill_kernel", kernel, dim3((unsigned)num_ctas), dim3(NUM_THREADS),
                          shape::smem_bytes, stream, params);
}

bool pk_cuda_attention_prefill_sm90_applies(const pk_attention_args *args, const pk_cuda_device *device)
{
    int64_t head_dim = args->head_dim, column = head_dim % 64 ? 32 : 64;
    if (device->compute_capability != 90 || (args->dtype != PK_BF16 && args->dtype != PK_F16)) return false;
    if (head_dim != 64 && head_dim != 96 && head_dim != 128 && head_dim != 256) return false;
    for (const void *data : {args->q, (const void *)args->out, args->k_cache, args->v_cache})
        if (!pk_is_aligned(data, 16)) return false;
    for (int64_t stride : {args->q_token_stride, args->q_head_stride, args->out_token_stride, args->out_head_stride,
                           args->k_block_stride, args->k_slot_stride, args->v_block_stride, args->v_slot_stride})
        if (stride <= 0 || stride % 8) return false; /* of 16 bytes, in the tensor maps and in stores */
    for (int64_t stride : {args->k_head_stride, args->v_head_stride})
        if (stride <= 0 || stride % column) return false;
    return args->cache_dtype == args->dtype && args->block_size % 8 == 0 && args->num_blocks > 0 &&
           args->num_blocks < (1ll << 31) && args->max_blocks_per_seq * args->block_size < (1 << 30) &&
           args->num_tokens < (1 << 24) && args->num_kv_heads < (1 << 10) &&
           args->num_q_heads / args->num_kv_heads <= ROWS && args->softmax_scale > 0 && !args->alibi_slopes;
}

template <typename T>
static pk_status launch_prefill_of_dtype(const pk_attention_args *args, row_filter filter, const pk_cuda_device *device,
                                         pk_stream stream, pk_error *err)
{
    if (args->head_dim == 64) return launch_prefill<64, T>(args, filter, device, stream, err);
    if (args->head_dim == 96) return launch_prefill<96, T>(args, filter, device, stream, err);
    if (args->head_dim == 128) return launch_prefill<128, T>(args, filter, device, stream, err);
    return launch_prefill<256, T>(args, filter, device, stream, err);
}

pk_status pk_cuda_attention_prefill_sm90(const pk_attention_args *args, row_filter filter, const pk_cuda_device *device,
                                         pk_stream stream, pk_error *err)
{
    if (args->dtype == PK_F16) return launch_prefill_of_dtype<__half>(args, filter, device, stream, err);
    return launch_prefill_of_dtype<__nv_bfloat16>(args, filter, device, stream, err);
}
