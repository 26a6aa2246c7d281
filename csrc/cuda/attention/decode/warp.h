/* warp.h - what a warp of decode.cu computes, in registers: the scores of its chunks of
 * keys, the rows' maxima and sums, and their outputs.
 */
#ifndef PK_CUDA_ATTENTION_DECODE_WARP_H
#define PK_CUDA_ATTENTION_DECODE_WARP_H

#include "cuda/attention/decode/merge.h"

template <typename Kind, int D, int NT>
struct decode_warp {
    using tile = cache_tile<Kind, D>;
    static constexpr int CHUNK = decode_chunk(D, Kind::CACHE_BYTES), KEY_TILES = CHUNK / 16, ROWS = 8 * NT;
    static constexpr int K_STEPS = D / 16, M_TILES = D / 16, TILE_BYTES = CHUNK * tile::ROW_BYTES;
    static constexpr int QUERY_STRIDE = D + 8; /* in shared memory, in rows of different banks */
    static constexpr unsigned int ALL_KEYS = CHUNK == 32 ? ~0u : 0xffff;

    const pk_attention_args &args;
    decode_tile rows;
    int warp, lane, quad_row, quad_col; /* quad_row = lane / 4, quad_col = lane % 4 * 2 */
    int first_common, end_common;       /* keys that all of the unit's queries see, if they are there */

    uint32_t q[NT][K_STEPS][2];
    float row_scale[Kind::IS_FP8 ? NT : 1][2]; /* of scores; only queries that were scaled to fp16 differ in it */
    float row_max[NT][2], row_sum[NT][2];
    float output[M_TILES][NT][4];

    __device__ decode_warp(const pk_attention_args &args, const decode_params &params)
        : args(args), rows{args, params, {}, 0, ROWS}
    {
        warp = threadIdx.x / 32;
        lane = threadIdx.x % 32;
        quad_row = lane / 4;
        quad_col = lane % 4 * 2;
    }

    /* Queries as scores need them: from memory, or from a CTA's shared memory, where `heads` are in their order. */
    template <bool ARE_IN_SMEM>
    __device__ void load_queries(const char *heads)
    {
        int num_rows = rows.num_rows();
        float scale = args.softmax_scale * pk_scale_of(args.k_scale, rows.unit.seq, rows.head);
        bool is_modified = args.softcap > 0 || args.alibi_slopes;
#pragma unroll
        for (int nt = 0; nt < NT; nt++) {
            float(&scales)[2] = row_scale[Kind::IS_FP8 ? nt : 0];
            int row = nt * 8 + quad_row;
            int64_t token = rows.unit.first_query + rows.query_of(row), q_head = rows.q_head_of(row);
            const uint16_t *from =
                ARE_IN_SMEM ? (const uint16_t *)heads + row * QUERY_STRIDE
                            : (const uint16_t *)args.q + token * args.q_token_stride + q_head * args.q_head_stride;
            float factor = load_query_row<Kind, D>(q[nt], row < num_rows ? from : nullptr, (int)args.head_dim,
                                                   args.dtype == PK_BF16, lane);
            scales[0] = scales[1] = is_modified ? scale : scale * PK_LOG2E;
            if constexpr (Kind::IS_FP8) { /* a lane's rows as query and as score are not the same */
                scales[0] *= __shfl_sync(~0u, factor, quad_col * 4);
                scales[1] *= __shfl_sync(~0u, factor, quad_col * 4 + 4);
            }
        }
        forget_keys();
    }

    /* As before the first key. */
    __device__ void forget_keys()
    {
        for (int nt = 0; nt < NT; nt++)
            row_max[nt][0] = row_max[nt][1] = PK_NO_SCORE, row_sum[nt][0] = row_sum[nt][1] = 0;
#pragma unroll
        for (int i = 0; i < M_TILES * NT * 4; i++) output[i / (NT * 4)][i / 4 % NT][i % 4] = 0;
    }

    __device__ float scale_of(int nt, int i) const { return Kind::IS_FP8 ? row_scale[nt][i] : row_scale[0][0]; }

    using chunk_scores = float[KEY_TILES][NT][4]; /* lane: keys quad_row and + 8 of a tile, rows quad_col and + 1 */

    /* Softcap and ALiBi. */
    __device__ void modify_scores(chunk_scores &scores, int first_key)
    {
#pragma unroll
        for (int i = 0; i < 2 * NT; i++) {
            int row = i / 2 * 8 + quad_col + i % 2, distance = rows.position_of(row) - first_key - quad_row;
            float slope = 0;
            if (args.alibi_slopes && row < rows.num_rows())
                slope = args.alibi_slopes[rows.unit.seq * args.alibi_seq_stride + rows.q_head_of(row)];
#pragma unroll
            for (int j = 0; j < 2 * KEY_TILES; j++) {
                float &score = scores[j / 2][i / 2][j % 2 * 2 + i % 2];
                score = modified_score(args, score, scale_of(i / 2, i % 2), slope, distance - j * 8);
            }
        }
    }

    /* The scores of keys that a row may not see become -inf. */
    __device__ void mask_scores(chunk_scores &scores, int first_key, unsigned int mask)
    {
#pragma unroll
        for (int i = 0; i < 2 * NT; i++) {
            int64_t position = rows.position_of(i / 2 * 8 + quad_col + i % 2) - first_key;
            int first = args.window_left < 0 ? 0 : (int)max((int64_t)0, position - args.window_left);
            int end = args.window_right < 0 ? CHUNK : (int)min((int64_t)CHUNK, position + args.window_right + 1);
#pragma unroll
            for (int j = 0; j < 2 * KEY_TILES; j++) {
                int key = quad_row + j * 8;
                bool is_seen = mask >> key & 1 && key >= first && key < end;
                if (!is_seen) scores[j / 2][i / 2][j % 2 * 2 + i % 2] = -INFINITY;
            }
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
                    Kind::mma(scores[t][nt], a[0], {q[nt][k][0], q[nt][k][1]});
                    Kind::mma(IS_SPLIT ? odd[nt] : scores[t][nt], a[1], {q[nt][k + 1][0], q[nt][k + 1][1]});
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

    /* Follows the largest score of a row, but only when it has grown by more than 2^8: until then the smaller base does
     * no harm in fp32, and most chunks pay one vote instead of reductions and a rescaled output. Each row by itself: its
     * bits do not depend on the rows beside it. */
    __device__ void follow_max(const chunk_scores &scores)
    {
        bool has_grown = false;
        for (int nt = 0; nt < NT; nt++)
            for (int i = 0; i < 4 * KEY_TILES; i++) has_grown |= scores[i / 4][nt][i % 4] > row_max[nt][i % 2] + 8;
        if (!__any_sync(~0u, has_grown)) return;
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                float largest = row_max[nt][i];
                for (int t = 0; t < KEY_TILES; t++)
                    largest = fmaxf(largest, fmaxf(scores[t][nt][i], scores[t][nt][i + 2]));
                for (int distance = 4; distance < 32; distance *= 2)
                    largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, distance));
                largest = largest > row_max[nt][i] + 8 ? largest : row_max[nt][i];
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

    /* Adds a chunk, its values after its keys. Those of the mask are there. */
    __device__ void compute_chunk(uint32_t k_tile, int first_key, unsigned int mask)
    {
        if (mask == 0) return;
        chunk_scores scores = {};
        multiply_keys(scores, k_tile);

        bool is_modified = args.softcap > 0 || args.alibi_slopes;
        bool is_cut = mask != ALL_KEYS || first_key < first_common || first_key + CHUNK > end_common;
        if (is_modified)
            modify_scores(scores, first_key);
        else
#pragma unroll
            for (int nt = 0; nt < NT; nt++)
#pragma unroll
                for (int i = 0; i < 4 * KEY_TILES; i++) scores[i / 4][nt][i % 4] *= scale_of(nt, i % 2);
        if (is_cut) mask_scores(scores, first_key, mask);
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
        multiply_values(p, k_tile + TILE_BYTES);
    }

    __device__ void leave_results(partial_rows to)
    {
#pragma unroll
        for (int nt = 0; nt < NT; nt++)
#pragma unroll
            for (int i = 0; i < 2; i++) {
                int row = nt * 8 + quad_col + i;
                float sum = row_sum[nt][i];
                for (int distance = 4; distance < 32; distance *= 2) sum += __shfl_xor_sync(~0u, sum, distance);
                if (quad_row == 0) to.max()[row] = row_max[nt][i], to.sum()[row] = sum;
#pragma unroll
                for (int m = 0; m < M_TILES; m++)
#pragma unroll
                    for (int half = 0; half < 2; half++)
                        to.output(row)[m * 16 + tile::value_dim(quad_row, half)] = output[m][nt][half * 2 + i];
            }
    }
};

#endif
