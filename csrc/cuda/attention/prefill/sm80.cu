/* sm80.cu - paged attention with many query tokens per sequence, on every GPU from sm_80 on: mma.sync
 * and cp.async. Hopper has a faster one (sm90.cu), which takes fewer kinds of caches and shapes.
 *
 * Each of four warps owns 32 of an item's 128 rows (16 of 64 where head_dim is above 128): with 16 the tensor cores
 * would wait for shared memory, since every warp reads every tile of K and V. Queries lie in shared memory in the order
 * in which lanes read them, S and O in registers, and P becomes an operand where it is.
 *
 * Tiles of 64 keys (32) go through a ring of three slots: K, V, K, V, ... While one is multiplied the next two arrive,
 * and the pages of the one after are looked up. Two CTAs per SM, where its shared memory has room for them: the softmax
 * of one lies under the products of the other. Tiles run from the last visible key to the first; only those that not all rows of a warp see are masked.
 *
 * The softmax looks for no maxima: a row's offset is the greatest score of its first tile and stays. Any offset gives
 * the same quotient as long as nothing overflows; where a lane's exponentials of a row sum to so much that fp16 may
 * overflow, the warp multiplies the tile again and raises the offset of that row. A row's arithmetic depends on its own
 * sequence alone.
 *
 * Attempts: benchmarks/lab/prefill/NOTES.md.
 */
#include "cuda/attention/prefill/sm80_loader.h"

// --- kernels

template <typename Kind, int D>
struct prefill_sm80_cta : prefill_sm80_loader<Kind, D> {
    using loader = prefill_sm80_loader<Kind, D>;
    using loader::args, loader::batch, loader::shared, loader::item, loader::warp, loader::lane, loader::slot,
        loader::first_slot;
    using loader::diagonal_of, loader::is_row, loader::token_of, loader::kv_head, loader::q_head_of;
    using loader::look_up_pages;
    using loader::M_TILES, loader::WARP_ROWS, loader::KEYS, loader::WARP_KEYS;
    using typename loader::tile;
    static constexpr float MOST_OF_A_TILE = 8192; /* of the exponentials that one lane sums up for a row */
    using tile_scores = float[M_TILES][KEYS / 8][4];
    using tile_weights = uint32_t[M_TILES][KEYS / 16][4]; /* P */

    bool is_first, is_modified;                /* no tile multiplied yet; scores are not just scaled */
    float row_scale[M_TILES][2];               /* of scores; only with fp8 do rows differ */
    float offset[M_TILES][2], sum[M_TILES][2]; /* of the softmax; the sum is of this lane's columns */
    float output[M_TILES][D / 8][4];

    /* A lane has the rows (m, r): r * 8 + lane / 4 of the m-th 16 of its warp. */

    template <typename Body>
    __device__ static void each_row(Body body)
    {
#pragma unroll
        for (int i = 0; i < M_TILES * 2; i++) body(i / 2, i % 2);
    }
    __device__ int row_of(int m, int r) const { return warp * WARP_ROWS + m * 16 + r * 8 + lane / 4; }
    __device__ float scale_of(int m, int r) const { return is_modified ? 1 : row_scale[m][r]; }

    __device__ void load_queries()
    {
        float scale = args.softmax_scale * pk_scale_of(args.k_scale, item.seq, kv_head()) * PK_LOG2E;
        is_modified = args.softcap > 0 || args.alibi_slopes || !(scale > 0);
        is_first = true;
#pragma unroll
        for (int m = 0; m < M_TILES; m++) {
            uint32_t q[2][D / 16][2];
#pragma unroll
            for (int r = 0; r < 2; r++) {
                int row = row_of(m, r);
                const uint16_t *from = (const uint16_t *)args.q + token_of(row) * args.q_token_stride +
                                       q_head_of(row) * args.q_head_stride;
                float factor = load_query_row<Kind, D>(q[r], is_row(row) ? from : nullptr, (int)args.head_dim,
                                                       args.dtype == PK_BF16, lane);
                row_scale[m][r] = scale * factor;
                offset[m][r] = PK_NO_SCORE;
                sum[m][r] = 0;
            }
            for (int k = 0; k < D / 16; k++)
                shared.queries[warp][m][k][lane] = {q[0][k][0], q[1][k][0], q[0][k][1], q[1][k][1]};
        }
        memset(output, 0, sizeof(output));
        __syncwarp();
    }

    __device__ void multiply_keys(tile_scores &scores, uint32_t k_tile)
    {
        memset(scores, 0, sizeof(scores));
#pragma unroll
        for (int k = 0; k < D / 16; k += 2) {
            uint32_t q[M_TILES][2][4];
            each_row([&](int m, int h) { *(uint4 *)q[m][h] = shared.queries[warp][m][k + h][lane]; });
#pragma unroll
            for (int j = 0; j < KEYS / 16; j++) {
                uint32_t b[2][4];
                tile::template load_keys<true>(b, k_tile, j * 16, k, lane);
                each_row([&](int m, int h) {
                    Kind::mma(scores[m][2 * j], q[m][h], {b[h][0], b[h][1]});
                    Kind::mma(scores[m][2 * j + 1], q[m][h], {b[h][2], b[h][3]});
                });
            }
        }
    }

    __device__ void multiply_values(const tile_weights &p, uint32_t v_tile)
    {
#pragma unroll
        for (int j = 0; j < KEYS / 16; j++)
#pragma unroll
            for (int d = 0; d < D / 16; d += 2) {
                uint32_t b[2][4];
                tile::template load_values<true>(b, v_tile, j * 16, d, lane);
                each_row([&](int m, int h) {
                    Kind::mma(output[m][2 * (d + h)], p[m][j], {b[h][0], b[h][1]});
                    Kind::mma(output[m][2 * (d + h) + 1], p[m][j], {b[h][2], b[h][3]});
                });
            }
    }

    /* The scores of keys that a row may not see become -inf. */
    __device__ void modify_and_mask(tile_scores &scores, int n, const unsigned int *key_masks)
    {
        each_row([&](int m, int r) {
            int row = row_of(m, r), diagonal = diagonal_of(row), first_key = n * KEYS + lane % 4 * 2;
            int begin = visible_begin(batch, diagonal) - first_key;
            int end = visible_end(batch, diagonal, item.context_len) - first_key;
            float scale = row_scale[m][r] * PK_LN2;
            float slope = args.alibi_slopes ? args.alibi_slopes[item.seq * args.alibi_seq_stride + q_head_of(row)] : 0;
            for (int i = 0; i < KEYS / 4; i++) {
                int column = i / 2 * 8 + i % 2, in_tile = column + lane % 4 * 2;
                float &score = scores[m][i / 2][2 * r + i % 2];
                if (is_modified) score = modified_score(args, score, scale, slope, diagonal - first_key - column);
                bool is_there = key_masks[in_tile / WARP_KEYS] >> in_tile % WARP_KEYS & 1;
                if (column < begin || column >= end || !is_there) score = -INFINITY;
            }
        });
    }

    /* Moves the offsets of some rows up to the greatest score of the tile, and what was summed before with them. */
    __device__ void raise_offsets(const tile_scores &scores, const bool (&is_wanted)[M_TILES][2])
    {
        each_row([&](int m, int r) {
            float top = PK_NO_SCORE;
            for (int i = 0; i < KEYS / 4; i++) top = fmaxf(top, scores[m][i / 2][2 * r + i % 2] * scale_of(m, r));
            top = fmaxf(quad_max(top), offset[m][r]);
            if (!is_wanted[m][r]) return;
            float shrink = exp2_fast(offset[m][r] - top);
            offset[m][r] = top;
            sum[m][r] *= shrink;
            for (int i = 0; i < D / 4; i++) output[m][i / 2][2 * r + i % 2] *= shrink;
        });
    }

    /* P of a tile. Where exponentials of some rows sum to too much for their offsets it is multiplied once more, and
     * those offsets are raised. */
    __device__ void softmax(tile_weights &p, uint32_t k_tile, int n, const unsigned int *key_masks)
    {
        unsigned int all = key_masks[0] & key_masks[1] & key_masks[2] & key_masks[3];
        int2 wholly_seen = shared.wholly_seen[warp];
        bool is_cut = n * KEYS < wholly_seen.x || (n + 1) * KEYS > wholly_seen.y || all != (1u << WARP_KEYS) - 1;
        bool is_wanted[M_TILES][2];
        each_row([&](int m, int r) { is_wanted[m][r] = is_first; });
        tile_scores scores;
        float tile_sum[M_TILES][2];
#pragma unroll 1
        for (bool must_raise = is_first;; must_raise = true) {
            multiply_keys(scores, k_tile);
            if (is_cut || is_modified) modify_and_mask(scores, n, key_masks);
            if (must_raise) raise_offsets(scores, is_wanted);
            bool is_over = false;
            each_row([&](int m, int r) {
                float scale = scale_of(m, r);
                tile_sum[m][r] = 0;
                for (int i = 0; i < KEYS / 4; i++) {
                    float &score = scores[m][i / 2][2 * r + i % 2];
                    score = exp2_fast(__fmaf_rn(score, scale, -offset[m][r])); /* the compiler would part it */
                    tile_sum[m][r] += score;
                }
                is_over |= !(tile_sum[m][r] <= MOST_OF_A_TILE); /* NaN too */
            });
            if (must_raise || !__any_sync(~0u, is_over)) break;
            /* A row decides for itself. */
            each_row([&](int m, int r) { is_wanted[m][r] = quad_any(!(tile_sum[m][r] <= MOST_OF_A_TILE)); });
        }
        is_first = false;
        each_row([&](int m, int r) {
            sum[m][r] += tile_sum[m][r];
            for (int i = 0; i < KEYS / 8; i++)
                p[m][i / 2][i % 2 * 2 + r] = Kind::pack(scores[m][i][2 * r], scores[m][i][2 * r + 1]);
        });
    }

    __device__ void store()
    {
        each_row([&](int m, int r) {
            int row = row_of(m, r);
            float total = quad_sum(sum[m][r]);
            if (!is_row(row)) return;
            int64_t token = token_of(row), q_head = q_head_of(row);
            const float v_scale = pk_scale_of(args.v_scale, item.seq, kv_head());
            const row_end end = finish_row(args, q_head, offset[m][r], total, v_scale);
            if (args.lse && lane % 4 == 0) args.lse[q_head * args.lse_head_stride + token] = end.lse;
            uint16_t *out = (uint16_t *)args.out + token * args.out_token_stride + q_head * args.out_head_stride;
#pragma unroll D / 8                          /* without a count nvcc gives up at 32, and O goes to local memory */
            for (int i = 0; i < D / 8; i++) { /* neighbours in an fp8 fragment come from two tiles: see cache_tile */
                const float(*o)[4] = &output[m][i & ~1];
                float low = Kind::IS_FP8 ? o[0][2 * r + i % 2] : o[i % 2][2 * r];
                float high = Kind::IS_FP8 ? o[1][2 * r + i % 2] : o[i % 2][2 * r + 1];
                int dim = tile::query_dim(i / 2, i % 2, lane);
                if (dim < args.head_dim)
                    *(uint32_t *)(out + dim) =
                        pack_output<Kind>(low * end.scale, high * end.scale, args.dtype == PK_BF16);
            }
        });
    }

    __device__ void run()
    {
        if (warp == 0) shared.schedules[lane].start(batch);
        while (this->enter_item()) {
            int n = (item.end + KEYS - 1) / KEYS - 1;
            slot = 0;
            first_slot = (int)first_slot_of(args, item.seq); /* if it is nowhere, there are no keys */
            look_up_pages(n);
            this->template load_tile<false>(n, 0);
            this->template load_tile<true>(n, 1);
            load_queries();
            for (; (n + 1) * KEYS > item.begin; n--) {
                tile_weights p;
                const unsigned int *key_masks = shared.key_masks[slot];
                softmax(p, this->template next_tile<false>(n), n, key_masks);
                multiply_values(p, this->template next_tile<true>(n));
            }
            copy_async_wait<0>();
            store();
        }
    }
};

template <typename Kind, int D>
__global__ void __launch_bounds__(prefill_sm80_cta<Kind, D>::THREADS, prefill_sm80_cta<Kind, D>::CTAS_PER_SM)
    attention_prefill_sm80_kernel(const __grid_constant__ prefill_batch batch)
{
    extern __shared__ __align__(1024) char smem[];
    using cta = prefill_sm80_cta<Kind, D>;
    cta{{batch, *(typename cta::shared_memory *)smem}}.run();
}

// --- launchers

template <typename Kind, int D>
static pk_status launch_prefill(const prefill_batch &batch, const pk_cuda_call &call)
{
    using cta = prefill_sm80_cta<Kind, D>;
    static uint64_t done;
    auto kernel = attention_prefill_sm80_kernel<Kind, D>;
    constexpr size_t smem_bytes = sizeof(typename cta::shared_memory);
    /* No more than start at once: those that came later would have been dealt the next longest items. */
    const int places = pk_cuda_ctas_at_once(call.device->card, cta::THREADS, (int)smem_bytes);
    int64_t num_ctas = (int64_t)call.device->num_sms * (places < cta::CTAS_PER_SM ? places : cta::CTAS_PER_SM);
    if (most_items(batch) < num_ctas) num_ctas = most_items(batch);
    PK_TRY(pk_cuda_allow_smem(call, kernel, smem_bytes, &done));
    return pk_cuda_launch(call, "attention_prefill_sm80_kernel", kernel, dim3((unsigned)num_ctas), dim3(cta::THREADS),
                          smem_bytes, batch);
}

template <typename Kind, int D>
static constexpr prefill_instance instance = {
    {"attention_prefill_sm80_kernel", "", Kind::MULTIPLIES, Kind::READS, D, prefill_sm80_cta<Kind, D>::ROWS,
     prefill_sm80_cta<Kind, D>::THREADS, pk_cuda_smem_of_cards([](const pk_cuda_card &) {
         return (int)sizeof(typename prefill_sm80_cta<Kind, D>::shared_memory);
     })},
    launch_prefill<Kind, D>};

/* The first whose head_dim is large enough is taken. */
static constexpr prefill_instance INSTANCES[] = {
    instance<kind_bf16, 64>, instance<kind_bf16, 128>, instance<kind_bf16, 256>,
    instance<kind_f16, 64>,  instance<kind_f16, 128>,  instance<kind_f16, 256>,
    instance<kind_fp8, 64>,  instance<kind_fp8, 128>,  instance<kind_fp8, 256>,
};
const pk_cuda_kernel_table pk_cuda_attention_prefill_sm80_kernels = pk_cuda_table(INSTANCES);

pk_status pk_cuda_attention_prefill_sm80(const pk_attention_args *args, row_filter filter, const pk_cuda_call &call)
{
    prefill_batch batch;
    for (const prefill_instance &each : INSTANCES)
        if (each.shown.reads == args->cache_dtype && each.shown.head_dim >= args->head_dim) {
            PK_TRY(make_prefill_batch(args, filter, call, each.shown.rows, false, &batch));
            return each.launch(batch, call);
        }
    return pk_cuda_no_instance(call, "attention_prefill_sm80_kernel");
}
