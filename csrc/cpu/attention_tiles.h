/* attention_tiles.h - the product of attention_many_rows.h over pairs, by AMX: 32 rows by 32 columns at a time.
 *
 * Rows of the left matrix are operand A as they lie; a line of operand B is 16 columns of one row of pairs, which is how
 * attention_pairs.h packs K and V (linear_amx.c says what TDPBF16PS does).
 */
#ifndef PK_CPU_ATTENTION_TILES_H
#define PK_CPU_ATTENTION_TILES_H

#include "cpu/amx.h"

#include <stdbool.h>

enum { TILE_LINES = 16, TILE_WORDS = 16 /* of a line */, WORD = 4 /* bytes */ };

/* Tiles 0 and 1 are the sums of 16 rows by two times 16 columns, 2 and 3 those of the next 16 rows, if there are any. */
static inline void multiply_tiles(const bool is_sum, const bool has_more, const float *a, int64_t a_stride,
                                  const float *b, int64_t b_stride, float *c, int64_t c_stride, int64_t depth)
{
    const float *more_a = a + TILE_LINES * a_stride;
    float *more_c = c + TILE_LINES * c_stride;
    if (is_sum) {
        _tile_loadd(0, c, c_stride * WORD);
        _tile_loadd(1, c + TILE_WORDS, c_stride * WORD);
        if (has_more) {
            _tile_loadd(2, more_c, c_stride * WORD);
            _tile_loadd(3, more_c + TILE_WORDS, c_stride * WORD);
        }
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t k = 0; k < depth; k += TILE_WORDS) {
        _tile_loadd(4, a + k, a_stride * WORD);
        _tile_loadd(6, b + k * b_stride, b_stride * WORD);
        _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + k * b_stride + TILE_WORDS, b_stride * WORD);
        _tile_dpbf16ps(1, 4, 7);
        if (!has_more) continue;
        _tile_loadd(5, more_a + k, a_stride * WORD);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, c_stride * WORD);
    _tile_stored(1, c + TILE_WORDS, c_stride * WORD);
    if (!has_more) return;
    _tile_stored(2, more_c, c_stride * WORD);
    _tile_stored(3, more_c + TILE_WORDS, c_stride * WORD);
}

/* c[rows, columns] = or += a[rows, depth] * b[depth, columns]; rows and depth are multiples of 16, columns of 32 */
static void multiply(const bool is_sum, const float *a, int64_t a_stride, const float *b, int64_t b_stride, float *c,
                     int64_t c_stride, int64_t rows, int64_t columns, int64_t depth)
{
    pk_amx_begin();
    __asm__ volatile("" ::: "memory"); /* GCC's _tile_loadd does not say that it reads memory */
    for (int64_t column = 0; column < columns; column += 2 * TILE_WORDS) {
        int64_t row = 0;
        for (; row + 2 * TILE_LINES <= rows; row += 2 * TILE_LINES)
            multiply_tiles(is_sum, true, a + row * a_stride, a_stride, b + column, b_stride,
                           c + row * c_stride + column, c_stride, depth);
        if (row < rows)
            multiply_tiles(is_sum, false, a + row * a_stride, a_stride, b + column, b_stride,
                           c + row * c_stride + column, c_stride, depth);
    }
    __asm__ volatile("" ::: "memory"); /* nor _tile_stored that it writes */
    _tile_release();
}

#endif
