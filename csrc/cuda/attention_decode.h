/* attention_decode.h - attention of a few query rows over a long, paged KV cache. Bound by reading the cache.
 *
 * Rows. The queries of one sequence that share a KV head (group * queries) are the columns of the tensor core's tile
 * and the keys its rows: S^T = K Q^T, then O^T = V^T P^T with m16n8k16. A tile of 8 rows is enough for most models,
 * against 16 or 64 for the other way round: half the multiplications, exponentials and registers, and registers and
 * power are what a decode kernel at full bandwidth is short of. P^T comes from S^T by one movmatrix a register. More
 * rows than 16 are more tiles, whose CTAs read the keys from L2 at about the same time.
 *
 * Split. A CTA is one unit of attention_plan.h for one head. Large batches run as CTAs of two warps, four an SM: where
 * one starts or ends, the others keep the memory busy. Smaller ones run as larger CTAs: fewer parts to merge.
 *
 * Pipeline. A warp takes every WARPS-th chunk of 16 or 32 keys through its own ring of three stages in shared memory,
 * filled by cp.async, so the loop has no CTA barrier: a warp waits only for its own bytes. 8 warps an SM with two or
 * three 8 KB stages under way keep 128 KB in flight and more; 34 KB would cover the latency. The warps' results meet in
 * attention_merge.h.
 */
#ifndef PK_CUDA_ATTENTION_DECODE_H
#define PK_CUDA_ATTENTION_DECODE_H

#include "cuda/attention_merge.h"

// --- kernels

template <typename Kind, int D, int NT, int CTAS_PER_SM_>
struct decode_config {
    static constexpr int CTAS_PER_SM = CTAS_PER_SM_, WARPS = decode_warps_per_sm(D, Kind::CACHE_BYTES) / CTAS_PER_SM;
    static constexpr int CHUNK = decode_chunk(D, Kind::CACHE_BYTES), KEY_TILES = CHUNK / 16, ROWS = 8 * NT, STAGES = 3;
    /* Query fragments: in registers, or, where those are short, in shared memory in the order in which lanes read them.
     */
    static constexpr bool ARE_QUERIES_SHARED = NT * D >= 512;
    using tile = cache_tile<Kind, D>;
    static constexpr int TILE_BYTES = CHUNK * tile::ROW_BYTES, STAGE_BYTES = 2 * TILE_BYTES;
    static constexpr int RING_BYTES = STAGES * STAGE_BYTES; /* of a warp; its results take the same place at the end */
    static constexpr int OUTPUT_STRIDE = D + 4;
    static_assert(ROWS * (2 + OUTPUT_STRIDE) * 4 <= RING_BYTES, "results fit where the keys were");

    struct shared {
        uint2 queries[ARE_QUERIES_SHARED ? D / 16 : 1][NT][32];
        unsigned int key_masks[WARPS][STAGES];
    };
    static constexpr int SHARED_BYTES = WARPS * RING_BYTES + (int)sizeof(shared);
    static_assert(ARE_QUERIES_SHARED || CTAS_PER_SM * (SHARED_BYTES + 1024 + 16) <= 228 * 1024,
                  "fewer CTAs than the plan counts on");
};

template <typename Kind, int D, int NT, int CTAS_PER_SM_>
struct decode_cta {
    using config = decode_config<Kind, D, NT, CTAS_PER_SM_>;
    using tile = typename config::tile;
    static constexpr int WARPS = config::WARPS, CHUNK = config::CHUNK, ROWS = config::ROWS;
    static constexpr int STAGES = config::STAGES, KEY_TILES = config::KEY_TILES, K_STEPS = D / 16, M_TILES = D / 16;
    static constexpr unsigned int ALL_KEYS = CHUNK == 32 ? ~0u : 0xffff;

    const pk_attention_args &args;
    const decode_params &params;
    decode_tile rows;
    typename config::shared &shared;
    char *smem;
    uint32_t ring;                      /* this warp's stages, as a shared address */
    int warp, lane, quad_row, quad_col; /* quad_row = lane / 4, quad_col = lane % 4 * 2 */
    int first_position, last_position;  /* of the unit's queries */

    int lookup_key, load_key, end_key; /* of this warp's chunks: where it looks up next, loads next, and ends */
    int upcoming_page;                 /* of the chunk to load next: a table entry may have to come from afar */

    uint32_t q[config::ARE_QUERIES_SHARED ? 1 : NT][K_STEPS][2];
    float row_scale[Kind::IS_FP8 ? NT : 1][2]; /* of scores; only queries that were scaled to fp16 differ in it */
    float row_max[NT][2], row_sum[NT][2];
    float output[M_TILES][NT][4];

    __device__ decode_cta(const pk_attention_args &args, const decode_params &params, char *smem)
        : args(args),
          params(params),
          rows{args, params, {}, 0, ROWS},
          shared(*(typename config::shared *)(smem + WARPS * config::RING_BYTES)),
          smem(smem)
    {
        warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        quad_row = lane / 4;
        quad_col = lane % 4 * 2;
        ring = smem_address(smem) + warp * config::RING_BYTES;
        if (args.head_dim < D) { /* the columns behind head_dim are never loaded and must not be NaN */
            for (int i = lane; i < config::RING_BYTES / 16; i += 32)
                ((uint4 *)(smem + warp * config::RING_BYTES))[i] = uint4{};
            __syncwarp();
        }
    }

    /* The unit of this CTA, or false. A plan is only memory: what it says is checked before anything hangs on it. */
    __device__ bool read_unit(int unit_index)
    {
        attention_unit &unit = rows.unit;
        const int4 *from = (const int4 *)(params.units + unit_index);
        *(int4 *)&unit.signature = __ldcg(from);
        *(int4 *)&unit.num_queries = __ldcg(from + 1);
        *(int4 *)&unit.part = __ldcg(from + 2);
        if (unit.signature == 0) return false;
        int slot = unit_index - unit.part;
        bool is_sound = unit.signature == params.signature && (unsigned)unit.seq < args.num_seqs && unit.context >= 0 &&
                        unit.context <= args.max_blocks_per_seq * args.block_size && unit.first_query >= 0 &&
                        unit.num_queries > 0 && unit.tile >= 0 && unit.first_step >= 0 &&
                        (int64_t)unit.first_query + unit.num_queries <= args.num_tokens &&
                        (int64_t)unit.tile * ROWS < (int64_t)unit.num_queries * params.group &&
                        (unsigned)unit.part < (unsigned)unit.num_parts &&
                        (unit.num_parts == 1 || (slot >= 0 && (int64_t)slot + unit.num_parts <= params.max_slots));
        if (is_sound) {
            int first_key = decode_first_key(args, unit.context, unit.num_queries, CHUNK);
            int num_steps = decode_num_steps(unit.context, first_key, WARPS * CHUNK);
            is_sound = unit.first_step < unit.end_step && unit.end_step <= num_steps;
            lookup_key = load_key = first_key + (unit.first_step * WARPS + warp) * CHUNK;
            end_key = first_key + unit.end_step * WARPS * CHUNK;
        }
        if (!is_sound && threadIdx.x == 0)
            pk_record_bad_id(params.bad_id, PK_BAD_PLAN, unit_index, unit.signature, params.signature);
        return is_sound;
    }

    // --- loading

    /* The next chunk's page, or -1: lane i looks after key i. Only entries of keys that some query sees are read. */
    __device__ int look_up_page()
    {
        int key = lookup_key + lane % CHUNK;
        bool is_seen = lookup_key < end_key && key < rows.unit.context &&
                       (args.window_left < 0 || key >= first_position - args.window_left) &&
                       (args.window_right < 0 || key <= last_position + args.window_right);
        lookup_key += WARPS * CHUNK;
        return is_seen ? args.block_tables[rows.unit.seq * args.block_table_stride + block_of(key)] : -1;
    }

    __device__ int block_of(int key) const
    {
        return params.block_shift >= 0 ? key >> params.block_shift : key / (int)args.block_size;
    }

    __device__ void load_chunk(int stage, int page)
    {
        if (page >= 0) page = checked_page(args, page, rows.unit.seq, params.bad_id);
        unsigned int mask = __ballot_sync(~0u, page >= 0) & ALL_KEYS;
        if (lane == 0) shared.key_masks[warp][stage] = mask;
        int key = load_key + lane % CHUNK, slot = key - block_of(key) * (int)args.block_size;
        load_key += WARPS * CHUNK;
        if (mask == 0) return; /* what the stage holds from before is finite, or gets masked: see compute_chunk */
        constexpr int PIECES = tile::PIECES, BYTES = Kind::CACHE_BYTES, ROWS_AT_ONCE = 32 / PIECES;
        int in_row = lane / PIECES, piece = lane % PIECES;
        if (piece * 16 >= (int)args.head_dim * BYTES) in_row = CHUNK; /* no row of this chunk */
        const char *k_cache = (const char *)args.k_cache + (rows.head * args.k_head_stride) * BYTES + piece * 16;
        const char *v_cache = (const char *)args.v_cache + (rows.head * args.v_head_stride) * BYTES + piece * 16;
        uint32_t to = ring + stage * config::STAGE_BYTES;
        if (mask == ALL_KEYS && params.are_chunks_in_a_page) {
            int64_t first = slot - lane % CHUNK + in_row;
            const char *k_from = k_cache + (page * args.k_block_stride + first * args.k_slot_stride) * BYTES;
            const char *v_from = v_cache + (page * args.v_block_stride + first * args.v_slot_stride) * BYTES;
            int64_t k_step = ROWS_AT_ONCE * args.k_slot_stride * BYTES,
                    v_step = ROWS_AT_ONCE * args.v_slot_stride * BYTES;
            if (in_row == CHUNK) return;
#pragma unroll
            for (int row = 0; row < CHUNK; row += ROWS_AT_ONCE, k_from += k_step, v_from += v_step) {
                copy_async_16(to + tile::offset(row + in_row, piece), k_from);
                copy_async_16(to + config::TILE_BYTES + tile::offset(row + in_row, piece), v_from);
            }
            return;
        }
        int64_t k_row = max(page, 0) * args.k_block_stride + slot * args.k_slot_stride;
        int64_t v_row = max(page, 0) * args.v_block_stride + slot * args.v_slot_stride;
#pragma unroll 2
        for (int row = 0; row < CHUNK; row += ROWS_AT_ONCE) {
            int64_t k_from = __shfl_sync(~0u, k_row, row + lane / PIECES) * BYTES;
            int64_t v_from = __shfl_sync(~0u, v_row, row + lane / PIECES) * BYTES;
            bool is_valid = mask >> (row + lane / PIECES) & 1;
            if (in_row == CHUNK) continue;
            copy_async_16(to + tile::offset(row + in_row, piece), k_cache + k_from, is_valid ? 16 : 0);
            copy_async_16(to + config::TILE_BYTES + tile::offset(row + in_row, piece), v_cache + v_from,
                          is_valid ? 16 : 0);
        }
    }

    __device__ void load_next(int stage, int page)
    {
        if (load_key < end_key) load_chunk(stage, page);
        copy_async_commit();
    }

    // --- computing

    __device__ void load_queries()
    {
        int num_rows = rows.num_rows();
        float scale = args.softmax_scale * pk_scale_of(args.k_scale, rows.unit.seq, rows.head);
        bool is_modified = args.softcap > 0 || args.alibi_slopes;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            uint32_t(&fragments)[K_STEPS][2] = q[config::ARE_QUERIES_SHARED ? 0 : nt];
            float(&scales)[2] = row_scale[Kind::IS_FP8 ? nt : 0];
            int row = nt * 8 + quad_row;
            int64_t token = rows.unit.first_query + rows.query_of(row), q_head = rows.q_head_of(row);
            const uint16_t *from = (const uint16_t *)args.q + token * args.q_token_stride + q_head * args.q_head_stride;
            float factor = load_query_row<Kind, D>(fragments, row < num_rows ? from : nullptr, (int)args.head_dim,
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

    using chunk_scores = float[KEY_TILES][NT][4]; /* lane: keys quad_row and + 8 of a tile, rows quad_col and + 1 */

    /* The scores of keys that a row may not see become -inf. */
    __device__ void mask_scores(chunk_scores &scores, int first_key, unsigned int mask)
    {
        bool is_modified = args.softcap > 0 || args.alibi_slopes;
        int num_rows = rows.num_rows();
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4 * KEY_TILES; i++) {
                float &score = scores[i / 4][nt][i % 4];
                int row = nt * 8 + quad_col + i % 2, position = rows.position_of(row);
                int in_chunk = quad_row + i / 2 * 8, key = first_key + in_chunk;
                bool is_seen = mask >> in_chunk & 1;
                if (args.window_right >= 0) is_seen = is_seen && key <= position + args.window_right;
                if (args.window_left >= 0) is_seen = is_seen && key >= position - args.window_left;
                if (is_modified) {
                    float slope = 0;
                    if (args.alibi_slopes && row < num_rows)
                        slope = args.alibi_slopes[rows.unit.seq * args.alibi_seq_stride + rows.q_head_of(row)];
                    score = modified_score(args, score, scale_of(nt, i % 2), slope, position - key);
                }
                if (!is_seen) score = -INFINITY;
            }
    }

    __device__ void multiply_keys(chunk_scores &scores, uint32_t k_tile)
    {
        constexpr bool IS_SPLIT = KEY_TILES == 1; /* two chains of multiplications instead of one */
        float odd[NT][4] = {};
#pragma unroll
        for (int k = 0; k < K_STEPS; k += 2)
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++) {
                uint32_t a[2][4];
                tile::load_keys(a, k_tile, t * 16, k, lane);
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                    Kind::mma(scores[t][nt], a[0], query_fragment(nt, k));
                    Kind::mma(IS_SPLIT ? odd[nt] : scores[t][nt], a[1], query_fragment(nt, k + 1));
                }
            }
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4 && IS_SPLIT; i++) scores[0][nt][i] += odd[nt][i];
    }

    __device__ void multiply_values(const uint2 (&p)[KEY_TILES][NT], uint32_t v_tile)
    {
#pragma unroll
        for (int m = 0; m < M_TILES; m += 2)
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++) {
                uint32_t a[2][4];
                tile::load_values(a, v_tile, t * 16, m, lane);
#pragma unroll
                for (int nt = 0; nt < NT; nt++) {
                    Kind::mma(output[m][nt], a[0], p[t][nt]);
                    Kind::mma(output[m + 1][nt], a[1], p[t][nt]);
                }
            }
    }

    /* Follows the largest score of every row, but only when it has grown by more than 2^8: until then the smaller base
     * does no harm in fp32, and most chunks pay one vote instead of reductions and a rescaled output. */
    __device__ void follow_max(const chunk_scores &scores)
    {
        bool has_grown = false;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 4 * KEY_TILES; i++) has_grown |= scores[i / 4][nt][i % 4] > row_max[nt][i % 2] + 8;
        if (!__any_sync(~0u, has_grown)) return;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float largest = row_max[nt][i];
#pragma unroll
                for (int t = 0; t < KEY_TILES; t++)
                    largest = fmaxf(largest, fmaxf(scores[t][nt][i], scores[t][nt][i + 2]));
#pragma unroll
                for (int distance = 4; distance < 32; distance *= 2)
                    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
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

    __device__ void compute_chunk(int stage, int first_key)
    {
        unsigned int mask = shared.key_masks[warp][stage];
        if (mask == 0) return;
        uint32_t k_tile = ring + stage * config::STAGE_BYTES;
        chunk_scores scores = {};
        multiply_keys(scores, k_tile);

        bool is_modified = args.softcap > 0 || args.alibi_slopes;
        bool is_cut = mask != ALL_KEYS ||
                      (args.window_right >= 0 && first_key + CHUNK - 1 > first_position + args.window_right) ||
                      (args.window_left >= 0 && first_key < last_position - args.window_left);
        if (!is_modified)
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int i = 0; i < 4 * KEY_TILES; i++) scores[i / 4][nt][i % 4] *= scale_of(nt, i % 2);
        if (is_cut || is_modified) mask_scores(scores, first_key, mask);
        follow_max(scores);

        uint2 p[KEY_TILES][NT];
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int t = 0; t < KEY_TILES; t++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    scores[t][nt][i] = exp2_fast(scores[t][nt][i] - row_max[nt][i % 2]);
                    row_sum[nt][i % 2] += scores[t][nt][i];
                }
                p[t][nt].x = transpose_8x8(Kind::pack(scores[t][nt][0], scores[t][nt][1]));
                p[t][nt].y = transpose_8x8(Kind::pack(scores[t][nt][2], scores[t][nt][3]));
            }
        multiply_values(p, k_tile + config::TILE_BYTES);
    }

    // --- the unit

    /* This warp's results, where its keys were. */
    __device__ void leave_results()
    {
        partial_rows<ROWS> to = {(float *)(smem + warp * config::RING_BYTES), config::OUTPUT_STRIDE};
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int row = nt * 8 + quad_col + i;
                float sum = row_sum[nt][i];
#pragma unroll
                for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
                if (quad_row == 0) to.max()[row] = row_max[nt][i], to.sum()[row] = sum;
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        to.output(row)[m * 16 + tile::value_dim(quad_row, half)] = output[m][nt][half * 2 + i];
            }
    }

    __device__ void run()
    {
        int unit_index = blockIdx.x / (int)args.num_kv_heads;
        rows.head = blockIdx.x - unit_index * (int)args.num_kv_heads;
        pk_wait_for_previous_kernel();
        pk_let_next_kernel_start();
        if (!read_unit(unit_index)) return;
        first_position = rows.position_of(0);
        last_position = min(rows.unit.context - 1, rows.position_of(ROWS - 1));
        int planned_context = rows.unit.context, context = args.context_lens[rows.unit.seq];

        int pages[STAGES];
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) pages[stage] = look_up_page();
        upcoming_page = look_up_page();
        int first_key = load_key;
#pragma unroll
        for (int stage = 0; stage < STAGES; stage++) load_next(stage, pages[stage]);
        load_queries();
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            row_max[nt][0] = row_max[nt][1] = PK_NO_SCORE;
            row_sum[nt][0] = row_sum[nt][1] = 0;
#pragma unroll
            for (int m = 0; m < M_TILES; m++)
#pragma unroll
                for (int i = 0; i < 4; i++) output[m][nt][i] = 0;
        }
        for (int stage = 0; first_key < end_key; first_key += WARPS * CHUNK) {
            copy_async_wait<STAGES - 1>();
            __syncwarp();
            compute_chunk(stage, first_key);
            __syncwarp(); /* every lane has read what comes to be overwritten */
            load_next(stage, upcoming_page);
            upcoming_page = look_up_page();
            stage = stage + 1 == STAGES ? 0 : stage + 1;
        }
        copy_async_wait<0>();
        __syncwarp();
        leave_results();
        __syncthreads();
        merge_unit<Kind, D, ROWS, WARPS>(rows, unit_index, (float *)smem, config::RING_BYTES / 4,
                                         config::OUTPUT_STRIDE);
        if (threadIdx.x == 0 && context != planned_context)
            pk_record_bad_id(params.bad_id, PK_STALE_PLAN, rows.unit.seq, planned_context, context);
    }
};

template <typename Kind, int D, int NT, int CTAS_PER_SM_>
__global__ void __launch_bounds__(decode_config<Kind, D, NT, CTAS_PER_SM_>::WARPS * 32,
                                  decode_config<Kind, D, NT, CTAS_PER_SM_>::CTAS_PER_SM)
    attention_decode_kernel(const __grid_constant__ pk_attention_args args,
                            const __grid_constant__ decode_params params)
{
    extern __shared__ __align__(128) char smem[];
    decode_cta<Kind, D, NT, CTAS_PER_SM_>(args, params, smem).run();
}

// --- launchers

template <typename Kind>
pk_status pk_cuda_launch_decode(const pk_attention_args *args, const decode_shape &shape, const decode_params &params,
                                const pk_cuda_device *device, pk_stream stream, pk_error *err)
{
    auto launch = [&](auto d, auto nt, auto ctas_per_sm) {
        constexpr int D = decltype(d)::value, NT = decltype(nt)::value, CTAS = decltype(ctas_per_sm)::value;
        using config = decode_config<Kind, D, NT, CTAS>;
        auto kernel = attention_decode_kernel<Kind, D, NT, CTAS>;
        static uint64_t done;
        PK_TRY(pk_cuda_allow_smem(err, kernel, config::SHARED_BYTES, device->index, &done));
        return pk_cuda_launch_early(err, "attention_decode_kernel", kernel, device,
                                    dim3((unsigned)(shape.num_units * args->num_kv_heads)), dim3(config::WARPS * 32),
                                    config::SHARED_BYTES, stream, *args, params);
    };
    std::integral_constant<int, 1> one;
    std::integral_constant<int, 2> two;
    auto launch_of_rows = [&](auto d, auto nt) {
        constexpr int MOST_CTAS = decode_warps_per_sm(decltype(d)::value, Kind::CACHE_BYTES) / DECODE_FEWEST_WARPS;
        if (shape.ctas_per_sm == 1) return launch(d, nt, one);
        if (shape.ctas_per_sm == 2) return launch(d, nt, two);
        return launch(d, nt, std::integral_constant<int, MOST_CTAS>());
    };
    auto launch_of_dim = [&](auto d) { return shape.rows == 8 ? launch_of_rows(d, one) : launch_of_rows(d, two); };
    if (shape.head_dim == 64) return launch_of_dim(std::integral_constant<int, 64>());
    if (shape.head_dim == 128) return launch_of_dim(std::integral_constant<int, 128>());
    return launch_of_dim(std::integral_constant<int, 256>());
}

#endif
