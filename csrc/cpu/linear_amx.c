/* linear_amx.c - the kernel of `linear` for bf16 on AMX: sums of 32 rows of the weight by 32 or 16 rows of x.
 *
 * A tile register is 16 lines of 64 bytes. TDPBF16PS multiplies operand A, 16 lines of 32 bf16, by operand B, whose line
 * p has elements 2p and 2p + 1 of 16 columns, and adds to 16 x 16 sums in fp32 (Intel's Instruction Set Extensions
 * Programming Reference, "TDPBF16PS"). A weight's rows are operand A as they lie in memory, so the weight is read once
 * and written nowhere; the rows of x, which are far fewer, are put in the order of operand B before. The sums come out
 * with a line for each weight row, and are transposed.
 *
 * Every sum is formed in the same order whatever the tile: a row's result does not depend on the rows beside it.
 */
#include "cpu/linear.h"

#if defined(__AMX_BF16__) || defined(__AMXBF16__) /* GCC, and Clang 14 */
#include "cpu/amx.h"

#include <string.h>

enum {
    LINES = PK_AMX_LINES, /* of a tile: rows of the weight, or of x */
    PAIR = PK_AMX_ROWS,   /* rows of the weight, and of x, that are multiplied at a time */
    STEP = PK_AMX_STEP,   /* elements of each row in a tile */
    LINE_BYTES = 2 * STEP,
    TILE_BYTES = LINES * LINE_BYTES,
    AHEAD = 8, /* steps that are fetched before their turn */
};

typedef uint32_t v16 __attribute__((vector_size(64)));

/* Lines of 16 elements of 32 bits. Round `bit` swaps, in every pair of lines that are `bit` apart, the upper elements of
 * the first with the lower ones of the second: those whose index has the bit, and has it not. (vf_transpose of simd.h is
 * as wide only where AVX-512 is compiled for; the test of this file compiles without.) */
static inline void transpose(v16 lines[LINES])
{
    const v16 lane = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
#pragma GCC unroll 4
    for (uint32_t bit = 1; bit < LINES; bit *= 2) {
        const v16 set = (v16)((lane & bit) != 0), low = lane + (set & (LINES - bit)), high = low + bit;
#pragma GCC unroll 16
        for (uint32_t i = 0; i < LINES; i++) {
            if (i & bit) continue;
            const __m512i a = (__m512i)lines[i], b = (__m512i)lines[i | bit];
            lines[i] = (v16)_mm512_permutex2var_epi32(a, (__m512i)low, b);
            lines[i | bit] = (v16)_mm512_permutex2var_epi32(a, (__m512i)high, b);
        }
    }
}

static int64_t num_steps(int64_t size) { return (size + STEP - 1) / STEP; }

void pk_amx_tiles_of(void *tiles, const void *rows, int64_t num_rows, int64_t row_stride, int64_t size)
{
    const uint16_t *x = rows;
    for (int64_t step = 0; step < num_steps(size); step++) {
        const int64_t left = size - step * STEP, count = pk_min(left, STEP);
        v16 lines[LINES] = {0};
        if (count == STEP)
            for (int64_t r = 0; r < num_rows; r++) memcpy(&lines[r], x + r * row_stride + step * STEP, LINE_BYTES);
        else
            for (int64_t r = 0; r < num_rows; r++)
                memcpy(&lines[r], x + r * row_stride + step * STEP, (size_t)count * sizeof *x);
        transpose(lines);
        memcpy((char *)tiles + step * TILE_BYTES, lines, sizeof lines);
    }
}

/* Tiles 0 to 3 are the sums of two tiles of weight rows by the first, then by the second tile of rows of x. */
static inline void multiply(const char *weight, int64_t weight_row, const char *x, const char *second_x)
{
    _tile_loadd(4, weight, weight_row);
    _tile_loadd(6, x, LINE_BYTES);
    _tile_dpbf16ps(0, 4, 6);
    _tile_loadd(5, weight + LINES * weight_row, weight_row);
    _tile_dpbf16ps(1, 5, 6);
    if (!second_x) return;
    _tile_loadd(7, second_x, LINE_BYTES);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 5, 7);
}

/* The same where fewer than 32 rows or elements are left: of a copy that has zeros behind them. */
static void multiply_rest(const char *weight, int64_t weight_row, int64_t num_rows, int64_t size, const char *x,
                          const char *second_x)
{
    _Alignas(LINE_BYTES) char copy[PAIR * LINE_BYTES] = {0};
    for (int64_t r = 0; r < num_rows; r++)
        memcpy(copy + r * LINE_BYTES, weight + r * weight_row, (size_t)size * sizeof(uint16_t));
    __asm__ volatile("" ::: "memory"); /* GCC's _tile_loadd does not say that it reads memory */
    multiply(copy, LINE_BYTES, x, second_x);
}

/* 16 x 16 sums, to rows of x and columns of outputs. */
static inline void write_sums(float *sums, int64_t stride, v16 tile[LINES])
{
    transpose(tile);
    for (int64_t r = 0; r < LINES; r++) memcpy(sums + r * stride, &tile[r], sizeof *tile);
}

/* Rows of the weight from `output` on by rows of x from `row` on, of which there are more than 16, or not. */
static inline void multiply_rows(const pk_dot_args *args, int64_t output, int64_t row, const bool has_second,
                                 const bool fetches)
{
    const int64_t weight_row = args->weight_stride * (int64_t)sizeof(uint16_t), left = args->num_outputs - output;
    const char *weight = (const char *)args->weight + output * weight_row;
    const char *x = (const char *)args->x + row * args->x_stride * (int64_t)sizeof(uint16_t);
    const char *second_x = has_second ? x + LINES * args->x_stride * (int64_t)sizeof(uint16_t) : NULL;
    const int64_t steps = num_steps(args->size), whole = left < PAIR ? 0 : args->size / STEP;
    const bool has_next = left >= 2 * PAIR; /* not what others read */
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t step = 0; step < whole; step++) {
        const int64_t ahead = step + AHEAD, behind = ahead < whole ? 0 : PAIR * weight_row - whole * LINE_BYTES;
        if (fetches && (ahead < whole || has_next))
#pragma GCC unroll 32
            for (int64_t r = 0; r < PAIR; r++)
                __builtin_prefetch(weight + behind + ahead * LINE_BYTES + r * weight_row, 0, PK_INTO_L2);
        multiply(weight + step * LINE_BYTES, weight_row, x + step * TILE_BYTES,
                 has_second ? second_x + step * TILE_BYTES : NULL);
    }
    for (int64_t step = whole; step < steps; step++) {
        const int64_t size = args->size - step * STEP;
        multiply_rest(weight + step * LINE_BYTES, weight_row, pk_min(left, PAIR), pk_min(size, STEP),
                      x + step * TILE_BYTES, has_second ? second_x + step * TILE_BYTES : NULL);
    }
    v16 tiles[4][LINES];
    _tile_stored(0, tiles[0], LINE_BYTES);
    _tile_stored(1, tiles[1], LINE_BYTES);
    float *sums = args->sums + row * args->sums_stride + output;
    write_sums(sums, args->sums_stride, tiles[0]), write_sums(sums + LINES, args->sums_stride, tiles[1]);
    if (!has_second) return;
    _tile_stored(2, tiles[2], LINE_BYTES);
    _tile_stored(3, tiles[3], LINE_BYTES);
    sums += LINES * args->sums_stride;
    write_sums(sums, args->sums_stride, tiles[2]), write_sums(sums + LINES, args->sums_stride, tiles[3]);
}

void pk_dot_amx(const pk_dot_args *args)
{
    pk_amx_begin();
    for (int64_t output = 0; output < args->num_outputs; output += PAIR) {
        for (int64_t row = 0; row < args->num_rows; row += PAIR)
            if (args->num_rows - row <= LINES)
                multiply_rows(args, output, row, false, row == 0);
            else
                multiply_rows(args, output, row, true, row == 0);
    }
    _tile_release();
}
#endif
