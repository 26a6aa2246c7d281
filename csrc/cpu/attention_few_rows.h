/* attention_few_rows.h - a tile of keys against few rows (decode), which is bound by memory bandwidth.
 *
 * Each K row is multiplied where it lies in its page: VW / R keys times R rows at once. That gives VW accumulators,
 * which vf_sums folds into one vector. All KV heads of an item take turns on a short tile. For every line that a head
 * loads, it prefetches one line of its share of the next tile, so the pages are read nearly in the order of their
 * addresses, into L2, because L1 is smaller than a tile. (16 sequences of about 1,000 keys, 8 KV heads, pages of 16, bf16,
 * two Zen 4 cores, whose plain read is 33 GB/s: into L1 14.3 GB/s, into L2 24.3.)
 */
#ifndef PK_CPU_ATTENTION_FEW_ROWS_H
#define PK_CPU_ATTENTION_FEW_ROWS_H

#include "cpu/attention_pairs.h"

enum { FEW_ACCUMULATORS = VW == 16 ? 16 : 8 }; /* vectors of a block of outputs */

// --- prefetch

/* What head number `head` of the item prefetches of the next tile while it works: FEW_TILE rows of K, then of V. All
 * heads together cover the tile, key by key; the heads of a key lie side by side. */
static void find_ahead(const tile_walk *walk, int64_t head, int64_t bytes, const char *ahead[2 * FEW_TILE])
{
    const pk_attention_args *args = walk->args;
    const key_tile *tile = walk->next_tile;
    int64_t key = head * tile->count / walk->num_heads, h = head * tile->count % walk->num_heads;
    for (int64_t i = 0; i < FEW_TILE; i++) {
        ahead[i] = ahead[FEW_TILE + i] = (const char *)zero_row;
        if (i >= tile->count) continue;
        if (tile->k_offsets[key] != MASKED) {
            int64_t kv_head = walk->first_head + h;
            ahead[i] = (const char *)args->k_cache + (tile->k_offsets[key] + kv_head * args->k_strides.head) * bytes;
            ahead[FEW_TILE + i] =
                (const char *)args->v_cache + (tile->v_offsets[key] + kv_head * args->v_strides.head) * bytes;
        }
        if (++h == walk->num_heads) h = 0, key++;
    }
}

/* Fetches a cache line of a row ahead if one begins at the offset `at`. */
PK_INLINE void prefetch_line(const char *row, int64_t at)
{
    if (at % 64 == 0) __builtin_prefetch(row + at, 0, PK_INTO_L2);
}

// --- scores

/* Adds the STEP dimensions from d on, of which `left` are in a row, to the scores of VW / R keys with R rows. */
PK_INLINE void score_step(const int R, const pk_dtype dtype, const int64_t left, const float *queries, int64_t words,
                          const char *const *keys, const char *const *ahead, int64_t d, vf sums[VW])
{
#pragma GCC unroll 16
    for (int k = 0; k < VW / R; k++) {
        const char *key = keys[k] + d * dtype_bytes(dtype);
        vf x = IN_PAIRS ? load_pairs(key, left) : load_part_as(key, dtype, left >= VW);
        if (ahead) prefetch_line(ahead[k], d * dtype_bytes(dtype));
#pragma GCC unroll 4
        for (int r = 0; r < R; r++) {
            vf *sum = &sums[r * (VW / R) + k], q = vf_load(queries + r * words + d / WORD_SIZE);
            *sum = IN_PAIRS ? dot_pairs(q, x, *sum) : vf_fma(q, x, *sum);
        }
    }
}

/* scores[r][key] = queries[r] . keys[key] for R rows. R * keys_at_once = VW accumulators. */
PK_INLINE void score_rows(const int R, const pk_dtype dtype, const float *queries, int64_t words,
                          const char *const *keys, const char *const *ahead, int64_t count, int64_t head_dim,
                          float *scores)
{
    const int keys_at_once = VW / R;
    for (int64_t key = 0; key < count; key += keys_at_once) {
        vf sums[VW];
#pragma GCC unroll 16
        for (int i = 0; i < VW; i++) sums[i] = vf_set1(0);
        int64_t d = 0;
        for (; d + STEP <= head_dim; d += STEP)
            score_step(R, dtype, STEP, queries, words, keys + key, ahead ? ahead + key : NULL, d, sums);
        if (d < head_dim)
            score_step(R, dtype, head_dim - d, queries, words, keys + key, ahead ? ahead + key : NULL, d, sums);
        float lanes[VW];
        vf_store(lanes, vf_sums(sums));
#pragma GCC unroll 4
        for (int r = 0; r < R; r++)
            memcpy(scores + r * KEY_TILE + key, lanes + r * keys_at_once, (size_t)keys_at_once * sizeof(float));
    }
}

/* Blocks of 4, 2 and 1 rows: whatever shapes the registers is a constant. The first block prefetches. */
PK_INLINE void score_all_rows(const pk_dtype dtype, const tile_walk *walk, const float *queries,
                              const char *const *keys, const char *const *ahead)
{
    int64_t row = 0, words = walk->row_size / WORD_SIZE, dim = walk->head_dim, count = walk->tile->count;
    for (; row + 4 <= walk->num_rows; row += 4)
        score_rows(4, dtype, queries + row * words, words, keys, row ? NULL : ahead, count, dim,
                   walk->scores + row * KEY_TILE);
    for (; row + 2 <= walk->num_rows; row += 2)
        score_rows(2, dtype, queries + row * words, words, keys, row ? NULL : ahead, count, dim,
                   walk->scores + row * KEY_TILE);
    for (; row < walk->num_rows; row++)
        score_rows(1, dtype, queries + row * words, words, keys, row ? NULL : ahead, count, dim,
                   walk->scores + row * KEY_TILE);
}

static void score_few(const tile_walk *walk, const float *queries, const char *const *keys, const char *const *ahead){
#define SCORE(dtype) score_all_rows(dtype, walk, queries, keys, ahead)
    PK_WITH_DTYPE(walk->args->cache_dtype, SCORE)}

// --- values

/* accumulated[r][d .. d + B * VW) += sum over keys of weights[r][key] * values[key][d ..] */
PK_INLINE void add_values_block(const int R, const int B, const bool is_whole, const pk_dtype dtype,
                                const float *weights, const char *const *values, const char *const *ahead,
                                int64_t count, int64_t d, float *accumulated, int64_t row_size)
{
    const int bytes = dtype_bytes(dtype);
    vf sums[FEW_ACCUMULATORS];
#pragma GCC unroll 16
    for (int i = 0; i < R * B; i++) sums[i] = vf_load(accumulated + (i / B) * row_size + d + (i % B) * VW);
    for (int64_t key = 0; key < count; key++) {
#pragma GCC unroll 8
        for (int b = 0; b < B; b++) {
            vf x = load_part_as(values[key] + (d + b * VW) * bytes, dtype, is_whole);
            if (ahead) prefetch_line(ahead[key], (d + b * VW) * bytes);
#pragma GCC unroll 4
            for (int r = 0; r < R; r++)
                sums[r * B + b] = vf_fma(vf_set1(weights[r * KEY_TILE + key]), x, sums[r * B + b]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < R * B; i++) vf_store(accumulated + (i / B) * row_size + d + (i % B) * VW, sums[i]);
}

/* The same for the whole head_dim, in blocks that fit the registers. */
PK_INLINE void add_values(const int R, const pk_dtype dtype, const float *weights, const char *const *values,
                          const char *const *ahead, int64_t count, int64_t head_dim, float *accumulated,
                          int64_t row_size)
{
    enum { MOST = 8 }; /* as add_values_block unrolls */
    const int B = FEW_ACCUMULATORS / R < MOST ? FEW_ACCUMULATORS / R : MOST;
    int64_t d = 0;
    for (; d + B * VW <= head_dim; d += B * VW)
        add_values_block(R, B, true, dtype, weights, values, ahead, count, d, accumulated, row_size);
    for (; d + VW <= head_dim; d += VW)
        add_values_block(R, 1, true, dtype, weights, values, ahead, count, d, accumulated, row_size);
    if (d < head_dim) add_values_block(R, 1, false, dtype, weights, values, ahead, count, d, accumulated, row_size);
}

/* Blocks of rows as in score_all_rows. */
PK_INLINE void add_all_values(const pk_dtype dtype, const tile_walk *walk, const char *const *values,
                              const char *const *ahead, float *accumulated)
{
    int64_t row = 0, size = walk->row_size, dim = walk->head_dim, count = walk->tile->count;
    for (; row + 4 <= walk->num_rows; row += 4)
        add_values(4, dtype, walk->scores + row * KEY_TILE, values, row ? NULL : ahead, count, dim,
                   accumulated + row * size, size);
    for (; row + 2 <= walk->num_rows; row += 2)
        add_values(2, dtype, walk->scores + row * KEY_TILE, values, row ? NULL : ahead, count, dim,
                   accumulated + row * size, size);
    for (; row < walk->num_rows; row++)
        add_values(1, dtype, walk->scores + row * KEY_TILE, values, row ? NULL : ahead, count, dim,
                   accumulated + row * size, size);
}

static void add_few(const tile_walk *walk, const char *const *values, const char *const *ahead, float *accumulated)
{
#define ADD(dtype) add_all_values(dtype, walk, values, ahead, accumulated)
    PK_WITH_DTYPE(walk->args->cache_dtype, ADD)
}

#endif
