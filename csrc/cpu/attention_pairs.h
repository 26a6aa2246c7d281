/* attention_pairs.h - products of numbers that stay bf16. Two that are neighbours in the sum are a pair, which takes
 * the place of one float: a row of q or of K is made of such pairs as it lies in memory. What attention_many_rows.h packs
 * has half as many rows then:
 *
 *   K   [row_size / 2, KEY_TILE]: dimensions 2d and 2d + 1 of a key
 *   V   [KEY_TILE / 2, row_size]: a dimension of keys 2k and 2k + 1
 *
 * An AVX512_BF16 register holds 16 such pairs, and so does a line of an AMX tile.
 */
#ifndef PK_CPU_ATTENTION_PAIRS_H
#define PK_CPU_ATTENTION_PAIRS_H

#include "cpu/attention_walk.h"

#if IN_PAIRS

/* sum + the products of 16 pairs */
PK_INLINE vf dot_pairs(vf a, vf b, vf sum) { return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b); }

PK_INLINE void store_bf16(uint16_t *to, vf x) { _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(x)); }

/* 16 pairs of a row that has `left` elements from here on; zeros behind them. */
PK_INLINE vf load_pairs(const char *row, int64_t left)
{
    if (left >= STEP) return _mm512_loadu_ps(row);
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16((1u << left) - 1, row));
}

/* 16 elements, each in the upper half of a float; zeros behind those that are left, if any are. */
PK_INLINE vf load_16(const char *row, int64_t left)
{
    return left > 0 ? load_part_as(row, PK_BF16, left >= VW) : vf_set1(0.0f);
}

static void pack(const tile_walk *walk, const char *const *keys, const char *const *values, int64_t count)
{
    for (int64_t key = 0; key < pk_cpu_round_up(count, STEP); key += VW) {
        for (int64_t d = 0; d < walk->row_size; d += STEP) {
            vf rows[VW];
#pragma GCC unroll 16
            for (int i = 0; i < VW; i++) rows[i] = load_pairs(keys[key + i] + 2 * d, walk->head_dim - d);
            vf_transpose(rows);
            for (int64_t i = 0; i < VW; i++) vf_store(walk->packed_keys + (d / 2 + i) * KEY_TILE + key, rows[i]);
        }
    }
    for (int64_t key = 0; key < pk_cpu_round_up(count, STEP); key += 2) {
        for (int64_t d = 0; d < walk->row_size; d += VW) {
            __m512i even = _mm512_castps_si512(load_16(values[key] + 2 * d, walk->head_dim - d));
            __m512i odd = _mm512_castps_si512(load_16(values[key + 1] + 2 * d, walk->head_dim - d));
            vf_store(walk->packed_values + key / 2 * walk->row_size + d,
                     _mm512_castsi512_ps(_mm512_or_si512(_mm512_srli_epi32(even, 16), odd)));
        }
    }
}

#else

PK_INLINE vf dot_pairs(vf a, vf b, vf sum) { return (void)a, (void)b, sum; }
PK_INLINE vf load_pairs(const char *row, int64_t left) { return (void)row, (void)left, vf_set1(0.0f); }
PK_INLINE void store_bf16(uint16_t *to, vf x) { (void)to, (void)x; }

#endif
#endif
