/* attention_many_rows.h - a tile of keys against many rows (prefill), which is bound by arithmetic.
 *
 * A tile of K is packed transposed and a tile of V as it is, both in fp32 or in pairs of bf16 (attention_pairs.h). Scores
 * and output are then two calls of one register-blocked matrix product, whose elements are words: floats or pairs.
 */
#ifndef PK_CPU_ATTENTION_MANY_ROWS_H
#define PK_CPU_ATTENTION_MANY_ROWS_H

#include "cpu/attention_pairs.h"

enum { BLOCK_VECTORS = VW == 16 ? 4 : 2 }; /* columns of a block: with BLOCK_ROWS, what fits the registers */

#if !IN_PAIRS
// --- packing

PK_INLINE void pack_keys_as(const pk_dtype dtype, const tile_walk *walk, const char *const *keys, int64_t count)
{
    const int bytes = dtype_bytes(dtype);
    for (int64_t key = 0; key < pk_cpu_round_up(count, VW); key += VW) {
        for (int64_t d = 0; d < walk->head_dim; d += VW) {
            vf rows[VW];
            int64_t dims = pk_min(walk->head_dim - d, VW);
#pragma GCC unroll 16
            for (int i = 0; i < VW; i++) rows[i] = load_part_as(keys[key + i] + d * bytes, dtype, dims == VW);
            vf_transpose(rows);
            for (int64_t i = 0; i < dims; i++) vf_store(walk->packed_keys + (d + i) * KEY_TILE + key, rows[i]);
        }
    }
}

PK_INLINE void pack_values_as(const pk_dtype dtype, const tile_walk *walk, const char *const *values, int64_t count)
{
    const int bytes = dtype_bytes(dtype);
    for (int64_t key = 0; key < count; key++)
        for (int64_t d = 0; d < walk->head_dim; d += VW)
            vf_store(walk->packed_values + key * walk->row_size + d,
                     load_part_as(values[key] + d * bytes, dtype, walk->head_dim - d >= VW));
}

static void pack(const tile_walk *walk, const char *const *keys, const char *const *values, int64_t count)
{
#define PACK(dtype) pack_keys_as(dtype, walk, keys, count), pack_values_as(dtype, walk, values, count)
    PK_WITH_DTYPE(walk->args->cache_dtype, PACK)
}

#endif

// --- the matrix product

#ifdef IN_TILES
#include "cpu/attention_tiles.h"
#else

/* c[BLOCK_ROWS, V * VW] = or += a[BLOCK_ROWS, depth] * b[depth, V * VW] */
PK_INLINE void multiply_block(const int V, const bool is_sum, const float *a, int64_t a_stride, const float *b,
                              int64_t b_stride, float *c, int64_t c_stride, int64_t depth)
{
    vf sums[BLOCK_ROWS * BLOCK_VECTORS];
#pragma GCC unroll 24
    for (int i = 0; i < BLOCK_ROWS * V; i++)
        sums[i] = is_sum ? vf_load(c + (i / V) * c_stride + (i % V) * VW) : vf_set1(0);
    for (int64_t k = 0; k < depth; k++) {
        vf x[BLOCK_VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < V; v++) x[v] = vf_load(b + k * b_stride + v * VW);
#pragma GCC unroll 6
        for (int r = 0; r < BLOCK_ROWS; r++) {
            vf y = vf_set1(a[r * a_stride + k]);
#pragma GCC unroll 4
            for (int v = 0; v < V; v++)
                sums[r * V + v] = IN_PAIRS ? dot_pairs(y, x[v], sums[r * V + v]) : vf_fma(y, x[v], sums[r * V + v]);
        }
    }
#pragma GCC unroll 24
    for (int i = 0; i < BLOCK_ROWS * V; i++) vf_store(c + (i / V) * c_stride + (i % V) * VW, sums[i]);
}

/* c[rows, columns] = or += a[rows, depth] * b[depth, columns]; rows is a multiple of BLOCK_ROWS, columns of VW */
PK_INLINE void multiply(const bool is_sum, const float *a, int64_t a_stride, const float *b, int64_t b_stride, float *c,
                        int64_t c_stride, int64_t rows, int64_t columns, int64_t depth)
{
    int64_t column = 0;
    for (; column + BLOCK_VECTORS * VW <= columns; column += BLOCK_VECTORS * VW)
        for (int64_t row = 0; row < rows; row += BLOCK_ROWS)
            multiply_block(BLOCK_VECTORS, is_sum, a + row * a_stride, a_stride, b + column, b_stride,
                           c + row * c_stride + column, c_stride, depth);
    for (; column < columns; column += VW)
        for (int64_t row = 0; row < rows; row += BLOCK_ROWS)
            multiply_block(1, is_sum, a + row * a_stride, a_stride, b + column, b_stride, c + row * c_stride + column,
                           c_stride, depth);
}

#endif
#endif
