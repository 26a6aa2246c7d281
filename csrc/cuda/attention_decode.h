/* attention_decode.h - attention of a few query rows over a long, paged KV cache. Bound by reading the cache.
 *
 * Rows. The queries of one sequence that share a KV head (group * queries, at most 32) are the columns of the tensor
 * core's tile and the keys its rows: S^T = K Q^T, then O^T = V^T P^T with m16n8k16. A tile of 8 rows is enough for most
 * models, against 16 or 64 for the other way round: half the multiplications, exponentials and registers, and registers
 * and power are what a decode kernel at full bandwidth is short of. P^T comes from S^T by one movmatrix a register.
 *
 * Split. Work is counted in steps of WARPS * 16 keys of one (sequence, KV head) and cut into equal ranges, one a CTA of
 * a grid that fills the machine. Every CTA finds its own range from context_lens (one scan; no plan kernel, no host). A
 * (sequence, head) that is cut leaves partial results in the workspace; the last CTA to arrive adds them in the order
 * of the keys. With num_splits the borders depend on the sequence alone: then a row's bits do not depend on its batch.
 *
 * Pipeline. A warp owns 16 keys of a step and its own ring of STAGES in shared memory, filled by cp.async, so the loop
 * has no CTA barrier: a warp waits only for its own bytes. The ring runs on across the borders of sequences. 8 warps an
 * SM with two 8 KB stages under way keep 128 KB in flight; 34 KB would cover the latency.
 */
#ifndef PK_CUDA_ATTENTION_DECODE_H
#define PK_CUDA_ATTENTION_DECODE_H

#include "cuda/attention.h"

struct decode_plan {
    float *partials;        /* [slot][(2 + head_dim padded) * ROWS]: max, sum, unnormalised output */
    unsigned int *arrivals; /* how many parts of a cut (sequence, head) are there; zero between calls */
    pk_cuda_bad_id *bad_id;
    row_filter filter;
    int num_splits;  /* 0: equal ranges; else CTA = (sequence, head, split) */
    int block_shift; /* log2(block_size), or -1 */
};

enum { MAX_ARRIVALS = 1 << 20 };

// --- kernels

template <typename Kind, int D, int NT>
struct decode_config {
    static constexpr int WARPS = 4, CHUNK = 16, STEP = WARPS * CHUNK, ROWS = 8 * NT;
    static constexpr int CTAS_PER_SM = D * Kind::CACHE_BYTES <= 256 ? 2 : 1;
    static constexpr int STAGES = D * Kind::CACHE_BYTES <= 128 ? 5 : 3;
    static constexpr int PIECES = D * Kind::CACHE_BYTES / 16; /* 16-byte pieces of a row */
    static constexpr int ROW_BYTES = (PIECES | 1) * 16;       /* odd, so that ldmatrix meets every bank once */
    static constexpr int TILE_BYTES = CHUNK * ROW_BYTES, STAGE_BYTES = 2 * TILE_BYTES;
    /* Warps meet at the end of a (sequence, head); their outputs pass through shared memory MERGE_DIMS at a time. */
    static constexpr int MERGE_DIMS = D % (64 / NT) == 0 ? 64 / NT : 32 / NT;
    static constexpr int MERGE_STRIDE = MERGE_DIMS + (NT < 4 ? 4 : 0);
    static constexpr int PARTIAL_FLOATS = ROWS * (D + 2);

    struct shared {
        float max[WARPS][ROWS], sum[WARPS][ROWS];
        float output[WARPS][ROWS][MERGE_STRIDE];
        int64_t warp_units[WARPS];
        int64_t first_base;
        int first_seq, first_unit;
        unsigned int key_masks[WARPS][STAGES];
        bool is_last;
    };
    static constexpr int SHARED_BYTES = WARPS * STAGES * STAGE_BYTES + (int)sizeof(shared);
    static_assert(CTAS_PER_SM * (SHARED_BYTES + 1024) <= 228 * 1024, "fewer CTAs than the grid counts on");
};

template <typename Kind, int D, int NT>
struct decode_cta {
    using config = decode_config<Kind, D, NT>;
    using Element = typename Kind::Element;
    static constexpr int WARPS = config::WARPS, CHUNK = config::CHUNK, STEP = config::STEP, ROWS = config::ROWS;
    static constexpr int STAGES = config::STAGES, K_STEPS = D / 16, M_TILES = D / 16;

    const pk_attention_args &args;
    const decode_plan &plan;
    typename config::shared &shared;
    uint32_t ring;                      /* this warp's stages, as a shared address */
    int warp, lane, quad_row, quad_col; /* quad_row = lane / 4, quad_col = lane % 4 * 2 */

    /* Where a walk over the flat list of steps stands. */
    struct cursor {
        int seq, head, step, num_steps, first_key;
        sequence_view view;
    };
    struct pages { /* of a chunk that is about to be loaded: lane i looks after key i */
        int page, slot, first_key, head;
        bool is_valid;
    };

    cursor load_at, compute_at;
    pages pending;
    int num_units, loads_left;
    int64_t total, segment_begin; /* of the flat list of steps; of the current (sequence, head) in it */
    int64_t num_ranges;

    uint32_t q[NT][K_STEPS][2];
    float row_scale[NT][2], row_max[NT][2], row_sum[NT][2];
    float output[M_TILES][NT][4];

    __device__ decode_cta(const pk_attention_args &args, const decode_plan &plan, char *smem)
        : args(args), plan(plan), shared(*(typename config::shared *)(smem + WARPS * STAGES * config::STAGE_BYTES))
    {
        warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        quad_row = lane / 4;
        quad_col = lane % 4 * 2;
        ring = smem_address(smem) + warp * STAGES * config::STAGE_BYTES;
        if (args.head_dim < D) { /* the columns behind head_dim are never loaded and must not be NaN */
            for (int i = lane; i < STAGES * config::STAGE_BYTES / 16; i += 32)
                ((uint4 *)(smem + warp * STAGES * config::STAGE_BYTES))[i] = uint4{};
            __syncwarp();
        }
    }

    __device__ int group() const { return (int)(args.num_q_heads / args.num_kv_heads); }

    // --- the flat list of steps

    /* Steps of one KV head of a sequence; 0 where this kernel does not take it. One without keys has a step, too: its
     * rows are written. */
    __device__ int count_steps(const sequence_view &view) const
    {
        int64_t rows = (int64_t)view.num_queries * group();
        if (rows <= plan.filter.min_rows || rows > plan.filter.max_rows) return 0;
        int keys = view.context - (view.first_key & ~(CHUNK - 1));
        return keys <= 0 ? 1 : (keys + STEP - 1) / STEP;
    }

    __device__ void enter_sequence(cursor &at, int seq)
    {
        at.seq = seq;
        at.view = view_sequence(args, seq, plan.bad_id, false);
        at.num_steps = count_steps(at.view);
        at.first_key = at.view.first_key & ~(CHUNK - 1);
    }

    /* True where another (sequence, head) begins. */
    __device__ bool advance(cursor &at)
    {
        if (++at.step < at.num_steps) return false;
        at.step = 0;
        if (++at.head < args.num_kv_heads) return true;
        at.head = 0;
        do enter_sequence(at, at.seq + 1);
        while (at.num_steps == 0); /* the caller's range ends before the sequences do */
        return true;
    }

    /* This CTA's part of the list. False: nothing to do. */
    __device__ bool find_range(cursor &at)
    {
        int num_seqs = (int)args.num_seqs, per_thread = (num_seqs + WARPS * 32 - 1) / (WARPS * 32);
        int first = min((int)threadIdx.x * per_thread, num_seqs), last = min(first + per_thread, num_seqs);
        int64_t units = 0;
        for (int seq = first; seq < last; seq++)
            units += count_steps(view_sequence(args, seq, plan.bad_id, blockIdx.x == 0)) * args.num_kv_heads;
        int64_t before = units;
        for (int distance = 1; distance < 32; distance *= 2) {
            int64_t other = __shfl_up_sync(~0u, before, distance);
            if (lane >= distance) before += other;
        }
        if (lane == 31) shared.warp_units[warp] = before;
        before -= units;
        __syncthreads();
        total = 0;
        for (int i = 0; i < WARPS; i++) {
            if (i < warp) before += shared.warp_units[i];
            total += shared.warp_units[i];
        }
        num_ranges = min((int64_t)gridDim.x, total);
        if (blockIdx.x >= num_ranges) return false;
        int64_t begin = total * blockIdx.x / num_ranges, end = total * (blockIdx.x + 1) / num_ranges;
        if (begin >= before && begin < before + units) {
            int64_t in_seq = begin - before;
            for (int seq = first;; seq++) {
                int64_t steps = count_steps(view_sequence(args, seq, plan.bad_id, false)) * args.num_kv_heads;
                if (in_seq < steps) {
                    shared.first_seq = seq;
                    shared.first_unit = (int)in_seq;
                    break;
                }
                in_seq -= steps;
            }
        }
        __syncthreads();
        enter_sequence(at, shared.first_seq);
        at.head = shared.first_unit / at.num_steps;
        at.step = shared.first_unit - at.head * at.num_steps;
        num_units = (int)(end - begin);
        segment_begin = begin - at.step;
        return true;
    }

    /* The same where the borders are fixed: CTA = (sequence, head, split). */
    __device__ bool find_split(cursor &at)
    {
        int segment = blockIdx.x / plan.num_splits, split = blockIdx.x - segment * plan.num_splits;
        int seq = segment / (int)args.num_kv_heads;
        enter_sequence(at, seq);
        at.head = segment - seq * (int)args.num_kv_heads;
        at.step = (int)((int64_t)at.num_steps * split / plan.num_splits);
        num_units = (int)((int64_t)at.num_steps * (split + 1) / plan.num_splits) - at.step;
        return at.num_steps > 0;
    }

    // --- loading

    __device__ void look_up_pages()
    {
        int first_key = load_at.first_key + load_at.step * STEP + warp * CHUNK, key = first_key + lane % CHUNK;
        int block_size = (int)args.block_size;
        int block = plan.block_shift >= 0 ? key >> plan.block_shift : key / block_size;
        pending.first_key = first_key;
        pending.head = load_at.head;
        pending.slot = key - block * block_size;
        pending.is_valid = key >= load_at.view.first_key && key < load_at.view.context;
        pending.page = -1;
        if (pending.is_valid) pending.page = args.block_tables[load_at.seq * args.block_table_stride + block];
    }

    __device__ void load_chunk(int stage)
    {
        if (pending.is_valid) pending.page = checked_page(args, pending.page, load_at.seq, plan.bad_id);
        unsigned int mask = __ballot_sync(~0u, pending.is_valid && pending.page >= 0);
        if (lane == 0) shared.key_masks[warp][stage] = mask & 0xffff;
        if (mask == 0) return; /* what the stage holds from before is finite, or gets masked: see compute_chunk */
        int64_t page = pending.page < 0 ? 0 : pending.page;
        int64_t k_row = page * args.k_block_stride + pending.slot * args.k_slot_stride;
        int64_t v_row = page * args.v_block_stride + pending.slot * args.v_slot_stride;
        const char *k_cache = (const char *)args.k_cache + pending.head * args.k_head_stride * Kind::CACHE_BYTES;
        const char *v_cache = (const char *)args.v_cache + pending.head * args.v_head_stride * Kind::CACHE_BYTES;
        uint32_t to = ring + stage * config::STAGE_BYTES;
        int row_bytes = (int)args.head_dim * Kind::CACHE_BYTES;
#pragma unroll
        for (int i = 0; i < CHUNK * config::PIECES / 32; i++) {
            int piece = i * 32 + lane, row = piece / config::PIECES, at = piece % config::PIECES * 16;
            int64_t k_from = __shfl_sync(~0u, k_row, row) * Kind::CACHE_BYTES + at;
            int64_t v_from = __shfl_sync(~0u, v_row, row) * Kind::CACHE_BYTES + at;
            bool is_valid = mask >> row & 1;
            if (at < row_bytes) {
                copy_async_16(to + row * config::ROW_BYTES + at, k_cache + k_from, is_valid);
                copy_async_16(to + config::TILE_BYTES + row * config::ROW_BYTES + at, v_cache + v_from, is_valid);
            }
        }
    }

    __device__ void load_next(int stage)
    {
        if (loads_left > 0) {
            load_chunk(stage);
            if (--loads_left > 0) {
                advance(load_at);
                look_up_pages();
            }
        }
        copy_async_commit();
    }

    // --- computing

    __device__ void load_queries()
    {
        int rows = compute_at.view.num_queries * group();
        float scale = args.softmax_scale * pk_scale_of(args.k_scale, compute_at.seq, compute_at.head);
        bool is_modified = args.softcap > 0 || args.alibi_slopes;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            int row = nt * 8 + quad_row, query = row / group();
            bool is_valid = row < rows;
            int64_t q_head = compute_at.head * group() + row - query * group();
            const uint16_t *from = (const uint16_t *)args.q +
                                   (compute_at.view.first_query + query) * args.q_token_stride +
                                   q_head * args.q_head_stride;
            row_scale[nt][0] = row_scale[nt][1] = is_modified ? scale : scale * PK_LOG2E;
            if constexpr (Kind::IS_FP8) {
                load_queries_as_f16(nt, from, is_valid);
            } else {
#pragma unroll
                for (int k = 0; k < K_STEPS; k++)
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        int dim = k * 16 + half * 8 + quad_col;
                        q[nt][k][half] = is_valid && dim < args.head_dim ? *(const uint32_t *)(from + dim) : 0;
                    }
            }
        }
    }

    /* fp16 has less range than bf16: the row is brought to below 1 by a power of two, which goes into its scale. A lane
     * holds four neighbouring dims where the plain kinds hold two pairs, to match the bytes that ldmatrix gives it. */
    __device__ void load_queries_as_f16(int nt, const uint16_t *from, bool is_valid)
    {
        bool is_bf16 = args.dtype == PK_BF16;
        float largest = 0;
#pragma unroll
        for (int k = 0; k < K_STEPS; k++) {
            int dim = k * 16 + quad_col * 2;
            uint2 raw = is_valid && dim < args.head_dim ? *(const uint2 *)(from + dim) : uint2{};
            q[nt][k][0] = raw.x;
            q[nt][k][1] = raw.y;
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float2 pair = unpack(q[nt][k][half], is_bf16);
                largest = fmaxf(largest, fmaxf(fabsf(pair.x), fabsf(pair.y)));
            }
        }
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        int exponent = largest > 0 && largest < INFINITY ? ilogbf(largest) + 1 : 0;
        exponent = max(exponent, -100); /* keeps both powers of two normal numbers */
#pragma unroll
        for (int k = 0; k < K_STEPS; k++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                float2 pair = unpack(q[nt][k][half], is_bf16);
                q[nt][k][half] = Kind::pack(ldexpf(pair.x, -exponent), ldexpf(pair.y, -exponent));
            }
#pragma unroll
        for (int i = 0; i < 2; i++) row_scale[nt][i] *= ldexpf(1.0f, __shfl_sync(~0u, exponent, (quad_col + i) * 4));
    }

    __device__ static float2 unpack(uint32_t raw, bool is_bf16)
    {
        if (is_bf16) return {__uint_as_float(raw << 16), __uint_as_float(raw & 0xffff0000u)};
        return __half22float2(*(__half2 *)&raw);
    }

    __device__ void start_segment()
    {
        load_queries();
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
#pragma unroll
            for (int i = 0; i < 2; i++) {
                row_max[nt][i] = PK_NO_SCORE;
                row_sum[nt][i] = 0;
            }
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) output[m][nt][i] = 0;
        }
    }

    /* The scores of keys that a row may not see become -inf. Lane: keys quad_row and + 8, rows quad_col and + 1. */
    __device__ void mask_scores(float (&scores)[NT][4], int first_key, unsigned int mask)
    {
        const sequence_view &view = compute_at.view;
        bool is_modified = args.softcap > 0 || args.alibi_slopes;
        int rows = view.num_queries * group();
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = nt * 8 + quad_col + i % 2, query = row / group();
                int in_chunk = quad_row + i / 2 * 8, key = first_key + in_chunk;
                int position = view.context - view.num_queries + query;
                bool is_seen = mask >> in_chunk & 1;
                if (args.window_right >= 0) is_seen = is_seen && key <= position + args.window_right;
                if (args.window_left >= 0) is_seen = is_seen && key >= position - args.window_left;
                if (is_modified) {
                    float slope = 0;
                    if (args.alibi_slopes && row < rows)
                        slope = args.alibi_slopes[compute_at.seq * args.alibi_seq_stride + compute_at.head * group() +
                                                  row - query * group()];
                    scores[nt][i] = modified_score(args, scores[nt][i], row_scale[nt][i % 2], slope, position - key);
                }
                if (!is_seen) scores[nt][i] = -INFINITY;
            }
    }

    __device__ void multiply_keys(float (&scores)[NT][4], uint32_t k_tile)
    {
        uint32_t address = k_tile + lane % 16 * config::ROW_BYTES + lane / 16 * 16;
        float odd[NT][4] = {}; /* two chains of multiplications instead of one */
        if constexpr (Kind::IS_FP8) {
#pragma unroll
            for (int k = 0; k < K_STEPS; k += 2) {
                uint32_t raw[4];
                ldmatrix_x4(raw, address + k * 16);
                uint32_t a[4] = {fp8_pair_to_f16(raw[0]), fp8_pair_to_f16(raw[1]), fp8_pair_to_f16(raw[0] >> 16),
                                 fp8_pair_to_f16(raw[1] >> 16)};
                uint32_t b[4] = {fp8_pair_to_f16(raw[2]), fp8_pair_to_f16(raw[3]), fp8_pair_to_f16(raw[2] >> 16),
                                 fp8_pair_to_f16(raw[3] >> 16)};
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                    Kind::mma(scores[nt], a, q[nt][k][0], q[nt][k][1]);
                    Kind::mma(odd[nt], b, q[nt][k + 1][0], q[nt][k + 1][1]);
                }
            }
        } else {
#pragma unroll
            for (int k = 0; k < K_STEPS; k++) {
                uint32_t a[4];
                ldmatrix_x4(a, address + k * 32);
#pragma unroll
                for (int nt = 0; nt < NT; nt++) Kind::mma(k % 2 ? odd[nt] : scores[nt], a, q[nt][k][0], q[nt][k][1]);
            }
        }
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4; i++) scores[nt][i] += odd[nt][i];
    }

    __device__ void multiply_values(const uint32_t (&p)[NT][2], uint32_t v_tile)
    {
        if constexpr (Kind::IS_FP8) {
            /* A 16-bit column of the transposing load is two dims: byte permutes part them, so that rows 0-7 of the
             * tile are the even dims and rows 8-15 the odd ones. */
            uint32_t address = v_tile + lane % 16 * config::ROW_BYTES + lane / 16 * 16;
#pragma unroll
            for (int m = 0; m < M_TILES; m += 2) {
                uint32_t raw[4];
                ldmatrix_x4_trans(raw, address + m * 16);
#pragma unroll
                for (int i = 0; i < 4; i++) raw[i] = __byte_perm(raw[i], 0, 0x3120);
                uint32_t a[4] = {fp8_pair_to_f16(raw[0]), fp8_pair_to_f16(raw[0] >> 16), fp8_pair_to_f16(raw[1]),
                                 fp8_pair_to_f16(raw[1] >> 16)};
                uint32_t b[4] = {fp8_pair_to_f16(raw[2]), fp8_pair_to_f16(raw[2] >> 16), fp8_pair_to_f16(raw[3]),
                                 fp8_pair_to_f16(raw[3] >> 16)};
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                    Kind::mma(output[m][nt], a, p[nt][0], p[nt][1]);
                    Kind::mma(output[m + 1][nt], b, p[nt][0], p[nt][1]);
                }
            }
        } else {
            uint32_t address = v_tile + (lane % 8 + lane / 16 * 8) * config::ROW_BYTES + lane / 8 % 2 * 16;
#pragma unroll
            for (int m = 0; m < M_TILES; m++) {
                uint32_t a[4];
                ldmatrix_x4_trans(a, address + m * 32);
#pragma unroll
                for (int nt = 0; nt < NT; nt++) Kind::mma(output[m][nt], a, p[nt][0], p[nt][1]);
            }
        }
    }

    /* Follows the largest score of every row, but only when it has grown by more than 2^8: until then the smaller base
     * does no harm in fp32, and most chunks pay one vote instead of reductions and a rescaled output. */
    __device__ void follow_max(const float (&scores)[NT][4])
    {
        bool has_grown = false;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4; i++) has_grown |= scores[nt][i] > row_max[nt][i % 2] + 8;
        if (!__any_sync(~0u, has_grown)) return;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float largest = fmaxf(scores[nt][i], scores[nt][i + 2]);
#pragma unroll
                for (int distance = 4; distance < 32; distance *= 2)
                    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
                largest = fmaxf(largest, row_max[nt][i]);
                float shrink = exp2_fast(row_max[nt][i] - largest);
                row_max[nt][i] = largest;
                row_sum[nt][i] *= shrink;
#pragma unroll
                for (int m = 0; m < M_TILES; m++) {
                    output[m][nt][i] *= shrink;
                    output[m][nt][i + 2] *= shrink;
                }
            }
    }

    __device__ void compute_chunk(int stage)
    {
        unsigned int mask = shared.key_masks[warp][stage];
        if (mask == 0) return;
        const sequence_view &view = compute_at.view;
        uint32_t k_tile = ring + stage * config::STAGE_BYTES;
        float scores[NT][4] = {};
        multiply_keys(scores, k_tile);

        int first_key = compute_at.first_key + compute_at.step * STEP + warp * CHUNK;
        int64_t first_position = view.context - view.num_queries, last_position = view.context - 1;
        bool is_modified = args.softcap > 0 || args.alibi_slopes;
        bool is_cut = mask != 0xffff ||
                      (args.window_right >= 0 && first_key + CHUNK - 1 > first_position + args.window_right) ||
                      (args.window_left >= 0 && first_key < last_position - args.window_left);
        if (!is_modified)
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int i = 0; i < 4; i++) scores[nt][i] *= row_scale[nt][i % 2];
        if (is_cut || is_modified) mask_scores(scores, first_key, mask);
        follow_max(scores);

        uint32_t p[NT][2];
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[nt][i] = exp2_fast(scores[nt][i] - row_max[nt][i % 2]);
                row_sum[nt][i % 2] += scores[nt][i];
            }
            p[nt][0] = transpose_8x8(Kind::pack(scores[nt][0], scores[nt][1]));
            p[nt][1] = transpose_8x8(Kind::pack(scores[nt][2], scores[nt][3]));
        }
        multiply_values(p, k_tile + config::TILE_BYTES);
    }

    // --- finishing a (sequence, head)

    /* Four dims of one row are done: either for good, or as this CTA's part. */
    struct row_result {
        float max, sum;
        float4 output;
    };

    __device__ void write_row(int row, int dim, row_result result)
    {
        int query = row / group();
        int64_t q_head = compute_at.head * group() + row - query * group(), token = compute_at.view.first_query + query;
        if (args.sinks) { /* one more logit, without a value */
            float sink = args.sinks[q_head] * PK_LOG2E, largest = fmaxf(result.max, sink);
            float shrink = exp2f(result.max - largest);
            result.sum = result.sum * shrink + exp2f(sink - largest);
            result.output.x *= shrink, result.output.y *= shrink, result.output.z *= shrink, result.output.w *= shrink;
            result.max = largest;
        }
        float scale = result.sum > 0 ? pk_scale_of(args.v_scale, compute_at.seq, compute_at.head) / result.sum : 0;
        if (result.sum != result.sum) scale = result.sum; /* NaN in an owned key is the caller's, and shows */
        if (dim < args.head_dim) {
            uint16_t *out = (uint16_t *)args.out + token * args.out_token_stride + q_head * args.out_head_stride + dim;
            uint2 packed;
            if (Kind::IS_FP8 && args.dtype == PK_BF16) { /* fp8 caches serve queries of both types */
                packed.x = kind_bf16::pack(result.output.x * scale, result.output.y * scale);
                packed.y = kind_bf16::pack(result.output.z * scale, result.output.w * scale);
            } else {
                packed.x = Kind::pack(result.output.x * scale, result.output.y * scale);
                packed.y = Kind::pack(result.output.z * scale, result.output.w * scale);
            }
            *(uint2 *)out = packed;
        }
        if (args.lse && dim == 0)
            args.lse[q_head * args.lse_head_stride + token] =
                result.sum == 0 ? -INFINITY : result.max * PK_LN2 + logf(result.sum);
    }

    __device__ float *partial(int64_t slot) const { return plan.partials + slot * config::PARTIAL_FLOATS; }

    /* Adds up the warps' outputs. `to`: a partial slot, or NULL for the result itself. */
    __device__ void merge_warps(float *to)
    {
        int rows = compute_at.view.num_queries * group();
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float sum = row_sum[nt][i];
#pragma unroll
                for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
                if (quad_row == 0) {
                    shared.max[warp][nt * 8 + quad_col + i] = row_max[nt][i];
                    shared.sum[warp][nt * 8 + quad_col + i] = sum;
                }
            }
#pragma unroll
        for (int pass = 0; pass < D / config::MERGE_DIMS; pass++) {
            __syncthreads();
#pragma unroll
            for (int m = 0; m < config::MERGE_DIMS / 16; m++)
#pragma unroll
                for (int nt = 0; nt < NT; nt++)
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        int dim = m * 16 + (Kind::IS_FP8 ? quad_row * 2 + i / 2 : quad_row + i / 2 * 8);
                        shared.output[warp][nt * 8 + quad_col + i % 2][dim] =
                            output[pass * (config::MERGE_DIMS / 16) + m][nt][i];
                    }
            __syncthreads();
            for (int item = threadIdx.x; item < rows * (config::MERGE_DIMS / 4); item += WARPS * 32) {
                int row = item / (config::MERGE_DIMS / 4), dim = item % (config::MERGE_DIMS / 4) * 4;
                row_result result = {PK_NO_SCORE, 0, {}};
                for (int i = 0; i < WARPS; i++) result.max = fmaxf(result.max, shared.max[i][row]);
                for (int i = 0; i < WARPS; i++)
                    add(result, shared.max[i][row], shared.sum[i][row], *(float4 *)&shared.output[i][row][dim]);
                int in_row = pass * config::MERGE_DIMS + dim;
                if (!to) {
                    write_row(row, in_row, result);
                    continue;
                }
                *(float4 *)(to + 2 * ROWS + row * D + in_row) = result.output;
                if (in_row == 0) {
                    to[row] = result.max;
                    to[ROWS + row] = result.sum;
                }
            }
        }
        __syncthreads();
    }

    __device__ static void add(row_result &result, float max, float sum, float4 output)
    {
        float weight = exp2_fast(max - result.max);
        result.sum += weight * sum;
        result.output.x += weight * output.x;
        result.output.y += weight * output.y;
        result.output.z += weight * output.z;
        result.output.w += weight * output.w;
    }

    /* Part i of the current (sequence, head) lies in slot first for i = 0 and rest + i * stride else. */
    struct part_list {
        int64_t first, rest, stride, mine, arrival;
        int count;
    };

    __device__ part_list list_parts(bool begins_here)
    {
        part_list parts;
        if (plan.num_splits > 0) {
            parts.arrival = blockIdx.x / plan.num_splits;
            parts.first = parts.rest = parts.arrival * plan.num_splits;
            parts.stride = 1;
            parts.mine = blockIdx.x;
            parts.count = plan.num_splits;
        } else { /* a range has at most two cut ones: slot 0 is for what began before it, slot 1 for what goes on */
            int64_t first = ((segment_begin + 1) * num_ranges - 1) / total;
            int64_t last = ((segment_begin + compute_at.num_steps) * num_ranges - 1) / total;
            parts.arrival = first;
            parts.first = 2 * first + 1;
            parts.rest = 2 * first;
            parts.stride = 2;
            parts.mine = 2 * (int64_t)blockIdx.x + (begins_here ? 1 : 0);
            parts.count = (int)(last - first + 1);
        }
        return parts;
    }

    __device__ void merge_parts(const part_list &parts)
    {
        int rows = compute_at.view.num_queries * group();
        for (int item = threadIdx.x; item < rows * (D / 4); item += WARPS * 32) {
            int row = item / (D / 4), dim = item % (D / 4) * 4;
            row_result result = {PK_NO_SCORE, 0, {}};
#pragma unroll 8
            for (int i = 0; i < parts.count; i++)
                result.max = fmaxf(result.max, __ldcg(partial(i ? parts.rest + i * parts.stride : parts.first) + row));
#pragma unroll 4
            for (int i = 0; i < parts.count; i++) {
                const float *part = partial(i ? parts.rest + i * parts.stride : parts.first);
                add(result, __ldcg(part + row), __ldcg(part + ROWS + row),
                    __ldcg((const float4 *)(part + 2 * ROWS + row * D + dim)));
            }
            write_row(row, dim, result);
        }
    }

    __device__ void finish_segment(int first_step)
    {
        bool is_whole =
            plan.num_splits > 0 ? plan.num_splits == 1 : first_step == 0 && compute_at.step + 1 == compute_at.num_steps;
        if (is_whole) return merge_warps(nullptr);
        part_list parts = list_parts(first_step == 0);
        merge_warps(partial(parts.mine));
        if (threadIdx.x == 0) {
            __threadfence();
            shared.is_last = atomicAdd(&plan.arrivals[parts.arrival], 1u) + 1 == (unsigned int)parts.count;
            if (shared.is_last) plan.arrivals[parts.arrival] = 0;
            __threadfence();
        }
        __syncthreads();
        if (shared.is_last) merge_parts(parts);
    }

    __device__ void run()
    {
        bool has_work = plan.num_splits > 0 ? find_split(compute_at) : find_range(compute_at);
        if (!has_work) return;
        load_at = compute_at;
        loads_left = num_units;
        if (loads_left > 0) look_up_pages();
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; stage++) load_next(stage);
        start_segment();
        int first_step = compute_at.step, stage = 0;
        for (int unit = 0; unit < num_units; unit++) {
            copy_async_wait<STAGES - 2>();
            __syncwarp();
            load_next(stage == 0 ? STAGES - 1 : stage - 1);
            compute_chunk(stage);
            stage = stage + 1 == STAGES ? 0 : stage + 1;
            if (unit + 1 == num_units) break;
            if (compute_at.step + 1 == compute_at.num_steps) {
                finish_segment(first_step);
                segment_begin += compute_at.num_steps;
                advance(compute_at);
                start_segment();
                first_step = 0;
            } else {
                compute_at.step++;
            }
        }
        finish_segment(first_step);
    }
};

template <typename Kind, int D, int NT>
__global__ void __launch_bounds__(decode_config<Kind, D, NT>::WARPS * 32, decode_config<Kind, D, NT>::CTAS_PER_SM)
    attention_decode_kernel(const __grid_constant__ pk_attention_args args, const __grid_constant__ decode_plan plan)
{
    extern __shared__ __align__(128) char smem[];
    decode_cta<Kind, D, NT>(args, plan, smem).run();
}

// --- launchers

template <typename Kind, int D, int NT>
static pk_status launch_decode(const pk_attention_args *args, decode_plan plan, const pk_cuda_device *device,
                               pk_stream stream, pk_error *err)
{
    using config = decode_config<Kind, D, NT>;
    int64_t num_segments = args->num_seqs * args->num_kv_heads;
    int64_t num_ranges = (int64_t)device->num_sms * config::CTAS_PER_SM;
    bool is_fixed = plan.num_splits > 0;
    int64_t ctas = is_fixed ? num_segments * plan.num_splits : num_ranges;
    int64_t slots = is_fixed ? ctas : 2 * num_ranges, arrivals = is_fixed ? num_segments : num_ranges;
    /* The counters have a place of their own, whatever the shape: they are zero whoever ran before. */
    if (ctas > INT32_MAX || arrivals > MAX_ARRIVALS)
        return pk_fail(err, PK_EUNSUPPORTED, "attention: num_splits is %d but %lld sequences x %lld heads are too many",
                       plan.num_splits, (long long)args->num_seqs, (long long)args->num_kv_heads);
    constexpr size_t COUNTER_BYTES = MAX_ARRIVALS * sizeof(unsigned int);
    void *workspace;
    PK_TRY(
        pk_cuda_workspace(device, stream, COUNTER_BYTES + (size_t)slots * config::PARTIAL_FLOATS * 4, &workspace, err));
    plan.arrivals = (unsigned int *)workspace;
    plan.partials = (float *)((char *)workspace + COUNTER_BYTES);
    static uint64_t done;
    PK_TRY(pk_cuda_allow_smem(err, attention_decode_kernel<Kind, D, NT>, config::SHARED_BYTES, device->index, &done));
    return pk_cuda_launch(err, "attention_decode_kernel", attention_decode_kernel<Kind, D, NT>, dim3((unsigned)ctas),
                          dim3(config::WARPS * 32), config::SHARED_BYTES, stream, *args, plan);
}

/* head_dim is padded to the next of four widths, the rows to 8, 16 or 32. */
template <typename Kind>
static pk_status launch_decode_of_kind(const pk_attention_args *args, const decode_plan &plan,
                                       const pk_cuda_device *device, pk_stream stream, pk_error *err)
{
    int64_t rows = plan.filter.max_rows;
    auto launch = [&](auto d) {
        constexpr int D = decltype(d)::value;
        if (rows <= 8) return launch_decode<Kind, D, 1>(args, plan, device, stream, err);
        if (rows <= 16) return launch_decode<Kind, D, 2>(args, plan, device, stream, err);
        if constexpr (D <= 128) return launch_decode<Kind, D, 4>(args, plan, device, stream, err);
        return pk_fail(err, PK_EUNSUPPORTED, "attention: %lld rows are too many to decode", (long long)rows);
    };
    if (args->head_dim <= 64) return launch(std::integral_constant<int, 64>());
    if (args->head_dim <= 96) return launch(std::integral_constant<int, 96>());
    if (args->head_dim <= 128) return launch(std::integral_constant<int, 128>());
    return launch(std::integral_constant<int, 256>());
}

#endif
