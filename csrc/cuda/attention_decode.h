/* attention_decode.h - attention of a few query rows over a long, paged KV cache. Bound by reading the cache.
 *
 * Rows. The queries of one sequence that share a KV head (group * queries, at most 32) are the columns of the tensor
 * core's tile and the keys its rows: S^T = K Q^T, then O^T = V^T P^T with m16n8k16. A tile of 8 rows is enough for most
 * models, against 16 or 64 for the other way round: half the multiplications, exponentials and registers, and registers
 * and power are what a decode kernel at full bandwidth is short of. P^T comes from S^T by one movmatrix a register.
 *
 * Split. Work is counted in steps of WARPS * 16 keys of one (sequence, KV head), all in one list, and cut into equal
 * ranges, one a CTA of a grid that fills the machine once. Every CTA finds its range from context_lens (one scan; no
 * plan kernel, no host). A (sequence, head) that is cut leaves partial results in the workspace; the last CTA to arrive
 * adds them in the order of the keys. With num_splits the borders depend on the sequence alone: then a row's bits do
 * not depend on its batch. (Finer pieces for the slower SMs were tried and lost: a border costs 5 us.)
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
    int group;       /* query heads of a KV head */
    int max_tiles;   /* of one sequence and head */
    int num_splits;  /* 0: pieces; else CTA = (sequence, head, split) */
    int block_shift; /* log2(block_size), or -1 */
};

enum { MAX_ARRIVALS = 1 << 20 };

/* The list of steps cut into equal ranges, one a CTA. 32 bits: 2^31 steps are terabytes of keys. */
struct decode_ranges {
    int count, length, num_longer; /* the first num_longer ranges have one more step */

    __device__ void cut(int steps, int num_ctas)
    {
        count = min(num_ctas, steps);
        length = count ? steps / count : 0;
        num_longer = steps - length * count;
    }

    __device__ int begin(int range) const { return range * length + min(range, num_longer); }

    /* The range that holds a step. */
    __device__ int at(int step) const
    {
        int in_longer = num_longer * (length + 1);
        return step < in_longer ? step / (length + 1) : num_longer + (step - in_longer) / length;
    }
};

// --- kernels

template <typename Kind, int D, int NT, int WARPS_>
struct decode_config {
    static constexpr int WARPS = WARPS_, CHUNK = 16, STEP = WARPS * CHUNK, ROWS = 8 * NT;
    /* Query fragments: in registers, or, where those are short, in shared memory in the order in which lanes read them.
     */
    static constexpr bool ARE_QUERIES_SHARED = NT * D >= 384;
    static constexpr int CTAS_PER_SM = (D * Kind::CACHE_BYTES > 256 ? 4 : 8) / WARPS;
    static constexpr int STAGES = D * Kind::CACHE_BYTES <= 128 ? 5 : 3;
    using tile = cache_tile<Kind, D>;
    static constexpr int TILE_BYTES = CHUNK * tile::ROW_BYTES, STAGE_BYTES = 2 * TILE_BYTES;
    /* Warps meet at the end of a (sequence, head); their outputs pass through shared memory MERGE_DIMS at a time. */
    static constexpr int MERGE_DIMS = D % (64 / NT) == 0 ? 64 / NT : 32 / NT;
    static constexpr int MERGE_STRIDE = MERGE_DIMS + (NT < 4 ? 4 : 0);
    static constexpr int PARTIAL_FLOATS = ROWS * (D + 2);

    struct shared {
        float max[WARPS][ROWS], sum[WARPS][ROWS];
        union { /* the queries of a (sequence, head) have been used when its outputs are merged */
            float output[WARPS][ROWS][MERGE_STRIDE];
            uint2 queries[ARE_QUERIES_SHARED ? D / 16 : 1][NT][32];
        };
        decode_ranges ranges;
        int steps_before[WARPS * 32 + 1]; /* of the sequences that a thread looks after */
        int warp_steps[WARPS];
        int first_seq, first_unit; /* where the range begins: steps into first_seq */
        unsigned int key_masks[WARPS][STAGES];
        bool is_last;
    };
    static constexpr int SHARED_BYTES = WARPS * STAGES * STAGE_BYTES + (int)sizeof(shared);
    static_assert(CTAS_PER_SM * (SHARED_BYTES + 1024) <= 228 * 1024, "fewer CTAs than the grid counts on");
};

template <typename Kind, int D, int NT, int WARPS_>
struct decode_cta {
    using config = decode_config<Kind, D, NT, WARPS_>;
    using tile = typename config::tile;
    static constexpr int WARPS = config::WARPS, CHUNK = config::CHUNK, STEP = config::STEP, ROWS = config::ROWS;
    static constexpr bool ARE_REGISTERS_SHORT = config::ARE_QUERIES_SHARED;
    static constexpr int STAGES = config::STAGES, K_STEPS = D / 16, M_TILES = D / 16;

    const pk_attention_args &args;
    const decode_plan &plan;
    typename config::shared &shared;
    uint32_t ring;                      /* this warp's stages, as a shared address */
    int warp, lane, quad_row, quad_col; /* quad_row = lane / 4, quad_col = lane % 4 * 2 */

    /* Where a walk over the flat list of steps stands. */
    struct cursor {
        int seq, head, tile, step; /* a tile: ROWS query rows of the sequence and head */
        int num_tiles, num_steps, first_key;
        int first_position, last_position; /* of the tile's queries */
        sequence_view view;
    };
    struct pages { /* of a chunk that is about to be loaded: lane i looks after key i */
        int seq, head, page, slot;
        bool is_valid;
    };

    cursor load_at, compute_at;
    pages pending, upcoming; /* the next chunk to load and the one after: a table entry may have to come from afar */
    int num_units, loads_left, lookups_left;
    int segment_begin; /* of the current (sequence, head) in the list of steps */

    uint32_t q[config::ARE_QUERIES_SHARED ? 1 : NT][K_STEPS][2];
    float row_scale[Kind::IS_FP8 ? NT : 1][2]; /* of scores; only queries that were scaled to fp16 differ in it */
    float row_max[NT][2], row_sum[NT][2];
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

    // --- the flat list of steps

    /* Steps of one KV head of a sequence; 0 where this kernel does not take it. One without keys has a step, too: its
     * rows are written. */
    __device__ int count_steps(const sequence_view &view) const
    {
        int64_t rows = (int64_t)view.num_queries * plan.group;
        if (rows <= plan.filter.min_rows || rows > plan.filter.max_rows) return 0;
        int keys = view.context - (view.first_key & ~(CHUNK - 1));
        return keys <= 0 ? 1 : (keys + STEP - 1) / STEP;
    }

    __device__ int count_tiles(const sequence_view &view) const
    {
        return (view.num_queries * plan.group + ROWS - 1) / ROWS;
    }

    /* Of a whole sequence, all heads and tiles. */
    __device__ int count_all_steps(int seq, bool is_recorder) const
    {
        sequence_view view = view_sequence(args, seq, plan.bad_id, is_recorder);
        return count_steps(view) * count_tiles(view) * (int)args.num_kv_heads;
    }

    __device__ void enter_sequence(cursor &at, int seq)
    {
        at.seq = seq;
        at.view = view_sequence(args, seq, plan.bad_id, false);
        at.num_steps = count_steps(at.view);
        at.num_tiles = count_tiles(at.view);
        at.first_key = at.view.first_key & ~(CHUNK - 1);
    }

    __device__ void enter_tile(cursor &at) const
    {
        int base = at.view.context - at.view.num_queries;
        at.first_position = base + query_of(at, 0);
        at.last_position = base + min(at.view.num_queries - 1, query_of(at, ROWS - 1));
    }

    /* True where another (sequence, head, tile) begins. */
    __device__ bool advance(cursor &at)
    {
        if (++at.step < at.num_steps) return false;
        at.step = 0;
        if (++at.tile == at.num_tiles) {
            at.tile = 0;
            if (++at.head == args.num_kv_heads) {
                at.head = 0;
                do enter_sequence(at, at.seq + 1);
                while (at.num_steps == 0); /* the caller's range ends before the sequences do */
            }
        }
        enter_tile(at);
        return true;
    }

    __device__ int sequences_per_thread() const { return ((int)args.num_seqs + WARPS * 32 - 1) / (WARPS * 32); }

    __device__ void cut_work()
    {
        int first = min((int)threadIdx.x * sequences_per_thread(), (int)args.num_seqs);
        int last = min(first + sequences_per_thread(), (int)args.num_seqs);
        int steps = 0;
        for (int seq = first; seq < last; seq++) steps += count_all_steps(seq, blockIdx.x == 0);
        for (int distance = 1; distance < 32; distance *= 2) {
            int other = __shfl_up_sync(~0u, steps, distance);
            if (lane >= distance) steps += other;
        }
        if (lane == 31) shared.warp_steps[warp] = steps;
        __syncthreads();
        for (int i = 0; i < warp; i++) steps += shared.warp_steps[i];
        shared.steps_before[threadIdx.x + 1] = steps;
        if (threadIdx.x == 0) shared.steps_before[0] = 0;
        if (threadIdx.x == WARPS * 32 - 1) shared.ranges.cut(steps, gridDim.x);
        __syncthreads();
    }

    __device__ void enter_range()
    {
        int begin = shared.ranges.begin(blockIdx.x);
        num_units = shared.ranges.begin(blockIdx.x + 1) - begin;
        if (begin >= shared.steps_before[threadIdx.x] && begin < shared.steps_before[threadIdx.x + 1]) {
            int rest = begin - shared.steps_before[threadIdx.x];
            for (int seq = threadIdx.x * sequences_per_thread();; seq++) {
                int steps = count_all_steps(seq, false);
                if (rest < steps) {
                    shared.first_seq = seq;
                    shared.first_unit = rest;
                    break;
                }
                rest -= steps;
            }
        }
        __syncthreads();
        enter_sequence(compute_at, shared.first_seq);
        int segment = shared.first_unit / compute_at.num_steps;
        compute_at.step = shared.first_unit - segment * compute_at.num_steps;
        compute_at.head = segment / compute_at.num_tiles;
        compute_at.tile = segment - compute_at.head * compute_at.num_tiles;
        segment_begin = begin - compute_at.step;
        enter_tile(compute_at);
    }

    /* The same where the borders are fixed: CTA = (sequence, head, split). */
    __device__ bool enter_split()
    {
        cursor &at = compute_at;
        int segment = blockIdx.x / plan.num_splits, split = blockIdx.x - segment * plan.num_splits;
        int head = segment / plan.max_tiles, seq = head / (int)args.num_kv_heads;
        enter_sequence(at, seq);
        at.head = head - seq * (int)args.num_kv_heads;
        at.tile = segment - head * plan.max_tiles;
        enter_tile(at);
        at.step = (int)((int64_t)at.num_steps * split / plan.num_splits);
        num_units = (int)((int64_t)at.num_steps * (split + 1) / plan.num_splits) - at.step;
        return at.num_steps > 0 && at.tile < at.num_tiles;
    }

    /* The current tile: its rows, and a row's place among all of the sequence's. */
    __device__ int num_rows() const
    {
        return min(ROWS, compute_at.view.num_queries * plan.group - compute_at.tile * ROWS);
    }
    __device__ int query_of(const cursor &at, int row) const { return (at.tile * ROWS + row) / plan.group; }
    __device__ int q_head_of(int row) const
    {
        return compute_at.head * plan.group + (compute_at.tile * ROWS + row) % plan.group;
    }

    // --- loading

    __device__ void look_up_pages()
    {
        pending = upcoming;
        if (lookups_left == 0) return;
        if (lookups_left-- < num_units) advance(load_at);
        int first_key = load_at.first_key + load_at.step * STEP + warp * CHUNK, key = first_key + lane % CHUNK;
        int block_size = (int)args.block_size;
        int block = plan.block_shift >= 0 ? key >> plan.block_shift : key / block_size;
        upcoming.seq = load_at.seq;
        upcoming.head = load_at.head;
        upcoming.slot = key - block * block_size;
        upcoming.is_valid = key < load_at.view.context &&
                            (args.window_left < 0 || key >= load_at.first_position - args.window_left) &&
                            (args.window_right < 0 || key <= load_at.last_position + args.window_right);
        upcoming.page = -1;
        if (upcoming.is_valid) upcoming.page = args.block_tables[load_at.seq * args.block_table_stride + block];
    }

    __device__ void load_chunk(int stage)
    {
        if (pending.is_valid) pending.page = checked_page(args, pending.page, pending.seq, plan.bad_id);
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
#pragma unroll(ARE_REGISTERS_SHORT ? 2 : 4)
        for (int i = 0; i < CHUNK * tile::PIECES / 32; i++) {
            int row = (i * 32 + lane) / tile::PIECES, piece = (i * 32 + lane) % tile::PIECES;
            int64_t k_from = __shfl_sync(~0u, k_row, row) * Kind::CACHE_BYTES + piece * 16;
            int64_t v_from = __shfl_sync(~0u, v_row, row) * Kind::CACHE_BYTES + piece * 16;
            bool is_valid = mask >> row & 1;
            if (piece * 16 < row_bytes) {
                copy_async_16(to + tile::offset(row, piece), k_cache + k_from, is_valid);
                copy_async_16(to + config::TILE_BYTES + tile::offset(row, piece), v_cache + v_from, is_valid);
            }
        }
    }

    __device__ void load_next(int stage)
    {
        if (loads_left > 0) {
            loads_left--;
            load_chunk(stage);
            look_up_pages();
        }
        copy_async_commit();
    }

    // --- computing

    __device__ void load_queries()
    {
        int rows = num_rows();
        float scale = args.softmax_scale * pk_scale_of(args.k_scale, compute_at.seq, compute_at.head);
        bool is_modified = args.softcap > 0 || args.alibi_slopes;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            uint32_t(&fragments)[K_STEPS][2] = q[config::ARE_QUERIES_SHARED ? 0 : nt];
            float(&scales)[2] = row_scale[Kind::IS_FP8 ? nt : 0];
            int row = nt * 8 + quad_row, token = compute_at.view.first_query + query_of(compute_at, row);
            const uint16_t *from =
                (const uint16_t *)args.q + token * args.q_token_stride + q_head_of(row) * args.q_head_stride;
            float factor = load_query_row<Kind, D>(fragments, row < rows ? from : nullptr, (int)args.head_dim,
                                                   args.dtype == PK_BF16, lane);
            scales[0] = scales[1] = is_modified ? scale : scale * PK_LOG2E;
            if constexpr (Kind::IS_FP8) { /* a lane's rows as query and as score are not the same */
                scales[0] *= __shfl_sync(~0u, factor, quad_col * 4);
                scales[1] *= __shfl_sync(~0u, factor, quad_col * 4 + 4);
            }
            if (config::ARE_QUERIES_SHARED && warp == nt % WARPS)
#pragma unroll
                for (int k = 0; k < K_STEPS; k++) shared.queries[k][nt][lane] = {fragments[k][0], fragments[k][1]};
        }
        if (config::ARE_QUERIES_SHARED) __syncthreads();
    }

    __device__ uint2 query_fragment(int nt, int k) const
    {
        if constexpr (config::ARE_QUERIES_SHARED) return shared.queries[k][nt][lane];
        return {q[nt][k][0], q[nt][k][1]};
    }

    __device__ float scale_of(int nt, int i) const { return Kind::IS_FP8 ? row_scale[nt][i] : row_scale[0][0]; }

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
        int rows = num_rows();
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int row = nt * 8 + quad_col + i % 2;
                int in_chunk = quad_row + i / 2 * 8, key = first_key + in_chunk;
                int position = view.context - view.num_queries + query_of(compute_at, row);
                bool is_seen = mask >> in_chunk & 1;
                if (args.window_right >= 0) is_seen = is_seen && key <= position + args.window_right;
                if (args.window_left >= 0) is_seen = is_seen && key >= position - args.window_left;
                if (is_modified) {
                    float slope = 0;
                    if (args.alibi_slopes && row < rows)
                        slope = args.alibi_slopes[compute_at.seq * args.alibi_seq_stride + q_head_of(row)];
                    scores[nt][i] = modified_score(args, scores[nt][i], scale_of(nt, i % 2), slope, position - key);
                }
                if (!is_seen) scores[nt][i] = -INFINITY;
            }
    }

    __device__ void multiply_keys(float (&scores)[NT][4], uint32_t k_tile)
    {
        constexpr bool IS_SPLIT = NT == 1; /* two chains of multiplications instead of one */
        float odd[NT][4] = {};
#pragma unroll
        for (int k = 0; k < K_STEPS; k += 2) {
            uint32_t a[2][4];
            tile::load_keys(a, k_tile, 0, k, lane);
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                Kind::mma(scores[nt], a[0], query_fragment(nt, k));
                Kind::mma(IS_SPLIT ? odd[nt] : scores[nt], a[1], query_fragment(nt, k + 1));
            }
        }
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4 && IS_SPLIT; i++) scores[nt][i] += odd[nt][i];
    }

    __device__ void multiply_values(const uint2 (&p)[NT], uint32_t v_tile)
    {
#pragma unroll
        for (int m = 0; m < M_TILES; m += 2) {
            uint32_t a[2][4];
            tile::load_values(a, v_tile, 0, m, lane);
#pragma unroll
            for (int nt = 0; nt < NT; nt++) {
                Kind::mma(output[m][nt], a[0], p[nt]);
                Kind::mma(output[m + 1][nt], a[1], p[nt]);
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
        uint32_t k_tile = ring + stage * config::STAGE_BYTES;
        float scores[NT][4] = {};
        multiply_keys(scores, k_tile);

        int first_key = compute_at.first_key + compute_at.step * STEP + warp * CHUNK;
        bool is_modified = args.softcap > 0 || args.alibi_slopes;
        bool is_cut =
            mask != 0xffff ||
            (args.window_right >= 0 && first_key + CHUNK - 1 > compute_at.first_position + args.window_right) ||
            (args.window_left >= 0 && first_key < compute_at.last_position - args.window_left);
        if (!is_modified)
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int i = 0; i < 4; i++) scores[nt][i] *= scale_of(nt, i % 2);
        if (is_cut || is_modified) mask_scores(scores, first_key, mask);
        follow_max(scores);

        uint2 p[NT];
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
#pragma unroll
            for (int i = 0; i < 4; i++) {
                scores[nt][i] = exp2_fast(scores[nt][i] - row_max[nt][i % 2]);
                row_sum[nt][i % 2] += scores[nt][i];
            }
            p[nt].x = transpose_8x8(Kind::pack(scores[nt][0], scores[nt][1]));
            p[nt].y = transpose_8x8(Kind::pack(scores[nt][2], scores[nt][3]));
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
        int64_t q_head = q_head_of(row), token = compute_at.view.first_query + query_of(compute_at, row);
        if (args.sinks) { /* one more logit, without a value */
            float sink = args.sinks[q_head] * PK_LOG2E;
            rebase(result, fmaxf(result.max, sink));
            result.sum += exp2f(sink - result.max);
        }
        float scale = result.sum > 0 ? pk_scale_of(args.v_scale, compute_at.seq, compute_at.head) / result.sum : 0;
        if (result.sum != result.sum) scale = result.sum; /* NaN in an owned key is the caller's, and shows */
        if (dim < args.head_dim) {
            uint16_t *out = (uint16_t *)args.out + token * args.out_token_stride + q_head * args.out_head_stride + dim;
            bool is_bf16 = args.dtype == PK_BF16;
            uint2 packed = {pack_output<Kind>(result.output.x * scale, result.output.y * scale, is_bf16),
                            pack_output<Kind>(result.output.z * scale, result.output.w * scale, is_bf16)};
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
        int rows = num_rows();
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
                        int dim = m * 16 + tile::value_dim(quad_row, i / 2);
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

    __device__ static void rebase(row_result &result, float max)
    {
        float shrink = exp2_fast(result.max - max);
        result.max = max;
        result.sum *= shrink;
        result.output.x *= shrink, result.output.y *= shrink, result.output.z *= shrink, result.output.w *= shrink;
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
        int first, rest, stride, mine, arrival, count;
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
            int first = shared.ranges.at(segment_begin),
                last = shared.ranges.at(segment_begin + compute_at.num_steps - 1);
            parts.arrival = first;
            parts.first = 2 * first + 1;
            parts.rest = 2 * first;
            parts.stride = 2;
            parts.mine = 2 * (int)blockIdx.x + (begins_here ? 1 : 0);
            parts.count = last - first + 1;
        }
        return parts;
    }

    /* Every `step`-th part from `first_part` on; the loads of a batch are all under way before the first is used. */
    __device__ row_result add_parts(const part_list &parts, int first_part, int step, int row, int dim)
    {
        constexpr int BATCH = 8;
        row_result result = {PK_NO_SCORE, 0, {}};
        for (int begin = first_part; begin < parts.count; begin += BATCH * step) {
            float max[BATCH], sum[BATCH], largest = result.max;
            float4 output[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; i++) {
                int at = begin + i * step;
                max[i] = PK_NO_SCORE, sum[i] = 0, output[i] = float4{};
                if (at >= parts.count) continue;
                const float *part = partial(at ? parts.rest + at * parts.stride : parts.first);
                max[i] = __ldcg(part + row);
                sum[i] = __ldcg(part + ROWS + row);
                output[i] = __ldcg((const float4 *)(part + 2 * ROWS + row * D + dim));
            }
#pragma unroll
            for (int i = 0; i < BATCH; i++) largest = fmaxf(largest, max[i]);
            rebase(result, largest);
#pragma unroll
            for (int i = 0; i < BATCH; i++) add(result, max[i], sum[i], output[i]);
        }
        return result;
    }

    __device__ void merge_parts(const part_list &parts)
    {
        int items = num_rows() * (D / 4);
        int turns = max(1, WARPS * 32 / items); /* threads that share the parts of an item */
        row_result *results = (row_result *)shared.output;
        for (int at = threadIdx.x; at < items * turns; at += WARPS * 32) {
            int turn = at / items, item = at - turn * items, row = item / (D / 4), dim = item % (D / 4) * 4;
            row_result result = add_parts(parts, turn, turns, row, dim);
            if (turns == 1)
                write_row(row, dim, result);
            else
                results[at] = result;
        }
        if (turns == 1) return;
        __syncthreads();
        if (threadIdx.x < items) {
            row_result result = results[threadIdx.x];
            for (int turn = 1; turn < turns; turn++) {
                row_result other = results[turn * items + threadIdx.x];
                rebase(result, fmaxf(result.max, other.max));
                add(result, other.max, other.sum, other.output);
            }
            write_row(threadIdx.x / (D / 4), threadIdx.x % (D / 4) * 4, result);
        }
        __syncthreads();
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
            if (shared.is_last) {
                plan.arrivals[parts.arrival] = 0;
                __threadfence();
            }
        }
        __syncthreads();
        if (shared.is_last) merge_parts(parts);
    }

    /* num_units steps from compute_at on. */
    __device__ void run_range()
    {
        load_at = compute_at;
        loads_left = lookups_left = num_units;
        look_up_pages();
        look_up_pages();
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

    __device__ void run()
    {
        if (plan.num_splits > 0) {
            if (enter_split()) run_range();
            return;
        }
        cut_work();
        if (blockIdx.x >= shared.ranges.count) return;
        enter_range();
        run_range();
    }
};

template <typename Kind, int D, int NT, int WARPS_>
__global__ void __launch_bounds__(decode_config<Kind, D, NT, WARPS_>::WARPS * 32,
                                  decode_config<Kind, D, NT, WARPS_>::CTAS_PER_SM)
    attention_decode_kernel(const __grid_constant__ pk_attention_args args, const __grid_constant__ decode_plan plan)
{
    extern __shared__ __align__(128) char smem[];
    decode_cta<Kind, D, NT, WARPS_>(args, plan, smem).run();
}

// --- launchers

template <typename Kind, int D, int NT, int WARPS_>
static pk_status launch_decode(const pk_attention_args *args, decode_plan plan, const pk_cuda_device *device,
                               pk_stream stream, pk_error *err)
{
    using config = decode_config<Kind, D, NT, WARPS_>;
    int64_t most_rows = args->max_seqlen_q * plan.group;
    plan.max_tiles =
        (int)pk_ceil_div(most_rows < plan.filter.max_rows ? most_rows : plan.filter.max_rows, config::ROWS);
    int64_t num_segments = args->num_seqs * args->num_kv_heads * plan.max_tiles;
    bool is_fixed = plan.num_splits > 0;
    int64_t ctas = is_fixed ? num_segments * plan.num_splits : (int64_t)device->num_sms * config::CTAS_PER_SM;
    int64_t slots = is_fixed ? ctas : 2 * ctas, arrivals = is_fixed ? num_segments : ctas;
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
    PK_TRY(pk_cuda_allow_smem(err, attention_decode_kernel<Kind, D, NT, WARPS_>, config::SHARED_BYTES, device->index,
                              &done));
    return pk_cuda_launch(err, "attention_decode_kernel", attention_decode_kernel<Kind, D, NT, WARPS_>,
                          dim3((unsigned)ctas), dim3(config::WARPS * 32), config::SHARED_BYTES, stream, *args, plan);
}

/* head_dim is padded to the next of four widths, the rows to 8, 16 or 32; more rows are more tiles. Large batches of
 * few rows run as small CTAs, which lose less where a (sequence, head) ends; elsewhere fewer CTAs mean fewer parts. */
template <typename Kind>
static pk_status launch_decode_of_kind(const pk_attention_args *args, const decode_plan &plan,
                                       const pk_cuda_device *device, pk_stream stream, pk_error *err)
{
    int64_t most_rows = args->max_seqlen_q * plan.group;
    int64_t rows = most_rows < plan.filter.max_rows ? most_rows : plan.filter.max_rows;
    bool is_large_batch = args->num_seqs * args->num_kv_heads >= 4 * device->num_sms;
    auto launch = [&](auto d) {
        constexpr int D = decltype(d)::value;
        if (rows <= 8 && is_large_batch) return launch_decode<Kind, D, 1, 2>(args, plan, device, stream, err);
        if (rows <= 8) return launch_decode<Kind, D, 1, 4>(args, plan, device, stream, err);
        if (rows <= 16 || D > 128) return launch_decode<Kind, D, 2, 4>(args, plan, device, stream, err);
        return launch_decode < Kind, D, D <= 128 ? 4 : 2, 4 > (args, plan, device, stream, err);
    };
    if (args->head_dim <= 64) return launch(std::integral_constant<int, 64>());
    if (args->head_dim <= 96) return launch(std::integral_constant<int, 96>());
    if (args->head_dim <= 128) return launch(std::integral_constant<int, 128>());
    return launch(std::integral_constant<int, 256>());
}

#endif
