/* attention_values.h - values that are inf or NaN and that not every row of a tile sees.
 *
 * A row that does not see a key has weight 0 for it, and 0 * inf is NaN. So such a key is a row of zeros in the product,
 * and is then added, by itself, to the rows that see it. Looking for it costs a pass over V, in the tiles at the edges of
 * what the rows see.
 */
#ifndef PK_CPU_ATTENTION_VALUES_H
#define PK_CPU_ATTENTION_VALUES_H

#include "cpu/attention_walk.h"

/* Whether some of the rows do not see some of the tile's keys. */
static bool is_at_an_edge(const tile_walk *walk, int64_t first_row, int64_t end_row)
{
    const key_tile *tile = walk->tile;
    if (end_row <= first_row) return false;
    pk_key_range least = pk_visible_keys(walk->args, walk->seq, walk->first_query + first_row / walk->group);
    pk_key_range most = pk_visible_keys(walk->args, walk->seq, walk->first_query + (end_row - 1) / walk->group);
    return least.end < tile->first + tile->count || most.first > tile->first;
}

static bool is_finite(const float *row, int64_t count)
{
    uint32_t most = 0; /* inf and NaN have the greatest exponent */
#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < count; i++) {
        uint32_t bits;
        memcpy(&bits, row + i, sizeof bits);
        bits &= 0x7f800000;
        most = bits > most ? bits : most;
    }
    return most < 0x7f800000;
}

/* Puts zeros in the place of such values; set_aside[key] is where they are, or NULL. False: there are none. */
static bool set_aside_values(const tile_walk *walk, const char **values, const char **set_aside)
{
    bool is_any = false;
    for (int64_t key = 0; key < walk->tile->count; key++) {
        float row[MAX_DIM];
        pk_cpu_row_to_f32(row, values[key], walk->args->cache_dtype, walk->head_dim);
        const bool is_usual = is_finite(row, walk->head_dim);
        set_aside[key] = is_usual ? NULL : values[key];
        if (is_usual) continue;
        values[key] = (const char *)zero_row;
        is_any = true;
    }
    return is_any;
}

/* A weight as softmax_row left it. */
static float weight_of(const tile_walk *walk, int64_t row, int64_t key)
{
    const float *weights = walk->scores + row * KEY_TILE;
    float weight = weights[key];
    if (IN_PAIRS && !is_few(walk)) pk_cpu_row_to_f32(&weight, (const uint16_t *)weights + key, PK_BF16, 1);
    return weight;
}

static void add_set_aside(const tile_walk *walk, const char *const *set_aside, int64_t first_row, int64_t end_row,
                          float *accumulated)
{
    for (int64_t key = 0; key < walk->tile->count; key++) {
        float value[MAX_DIM];
        if (!set_aside[key]) continue;
        pk_cpu_row_to_f32(value, set_aside[key], walk->args->cache_dtype, walk->head_dim);
        for (int64_t row = first_row; row < end_row; row++) {
            pk_key_range seen = pk_visible_keys(walk->args, walk->seq, walk->first_query + row / walk->group);
            int64_t at = walk->tile->first + key;
            if (at < seen.first || at >= seen.end) continue;
            float weight = weight_of(walk, row, key);
            for (int64_t d = 0; d < walk->head_dim; d++) accumulated[row * walk->row_size + d] += weight * value[d];
        }
    }
}

#endif
