/* linear_panels_avx512.c - the kernel of `linear` for eight rows of bf16 and more with AVX-512, where the CPU multiplies
 * fp32 faster than pairs of bf16.
 *
 * A vector of the weight becomes two of fp32, the even elements and the odd ones, once for PK_PANEL_ROWS rows of x. Such
 * rows are a panel: they were made fp32 before, and what all of them have for a vector of the weight lies side by side.
 * A slice of a panel stays in L1 while a group of outputs is walked, and the weight, which comes from L2 for all
 * panels but the first, is fetched a group ahead.
 *
 * Every sum is formed in the order of linear.inc with BF16_PAIRS: a row's result does not depend on the rows beside it.
 */
#ifdef __AVX512F__
#include "cpu/linear.h"
#include "cpu/simd.h"

#include <string.h>

enum {
    ROWS = PK_PANEL_ROWS,
    OUTPUTS = 2,   /* of a tile */
    STEP = 2 * VW, /* elements of a vector of the weight */
    GROUP = 16,    /* outputs */
    SLICE = PK_PANEL_SLICE,
    W_BYTES = 2,
};

void pk_panel_of(float *panel, const void *rows, int64_t num_rows, int64_t row_stride, int64_t size)
{
    const int64_t whole = size - size % STEP, rest = size - whole;
    if (num_rows < ROWS) memset(panel, 0, (size_t)(ROWS * size) * sizeof *panel);
    for (int64_t r = 0; r < num_rows; r++) {
        const uint16_t *row = (const uint16_t *)rows + r * row_stride;
        for (int64_t i = 0; i < whole; i += STEP)
            for (int part = 0; part < 2; part++)
                vf_store(panel + i * ROWS + (part * ROWS + r) * VW, vf_load_bf16_part(row + i, part));
        for (int64_t i = 0; i < rest; i++) panel[whole * ROWS + r * rest + i] = pk_bf16_to_f32(row[whole + i]);
    }
}

/* The elements behind the last whole vector. */
static void add_rest(float *sums, const float *panel, const char *w, int64_t w_row, int64_t rest, int num_outputs)
{
    for (int r = 0; r < ROWS; r++)
        for (int c = 0; c < num_outputs; c++)
            for (int64_t i = 0; i < rest; i++)
                sums[r * OUTPUTS + c] +=
                    panel[r * rest + i] * pk_bf16_to_f32(*(const uint16_t *)(w + c * w_row + i * W_BYTES));
}

/* Elements [from, to) of a panel by one or two rows of the weight, where further rows are fetched from. */
PK_INLINE void dot_tile(const pk_dot_args *args, const float *panel, int64_t from, int64_t to, int64_t row,
                        int64_t output, const char *ahead, const int num_outputs, const int num_ahead)
{
    const int64_t w_row = args->weight_stride * W_BYTES, whole = to - (to - from) % STEP;
    const char *w = (const char *)args->weight + output * w_row;
    vf acc[ROWS * OUTPUTS];
#pragma GCC unroll 16
    for (int sum = 0; sum < ROWS * OUTPUTS; sum++) acc[sum] = vf_set1(0.0f);
    for (int64_t i = from; i < whole; i += STEP) {
#pragma GCC unroll 2
        for (int c = 0; c < num_ahead; c++) __builtin_prefetch(ahead + c * w_row + i * W_BYTES, 0, PK_INTO_L2);
#pragma GCC unroll 2
        for (int c = 0; c < num_outputs; c++) /* the next tile's, into L1 */
            __builtin_prefetch(w + (OUTPUTS + c) * w_row + i * W_BYTES, 0, PK_INTO_L1);
#pragma GCC unroll 2
        for (int part = 0; part < 2; part++) {
            vf weights[OUTPUTS];
            if (part > 0) __asm__ volatile("" ::: "memory"); /* loads again what there are no registers to keep in */
#pragma GCC unroll 2
            for (int c = 0; c < num_outputs; c++) weights[c] = vf_load_bf16_part(w + c * w_row + i * W_BYTES, part);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; r++) {
                vf values = vf_load(panel + i * ROWS + (part * ROWS + r) * VW);
                __asm__("" : "+v"(values)); /* loaded once, not by each multiplication */
#pragma GCC unroll 2
                for (int c = 0; c < num_outputs; c++)
                    acc[r * OUTPUTS + c] = vf_fma(values, weights[c], acc[r * OUTPUTS + c]);
            }
        }
    }
    float sums[ROWS * OUTPUTS];
    vf_store(sums, vf_sums(acc));
    if (whole < to) add_rest(sums, panel + whole * ROWS, w + whole * W_BYTES, w_row, to - whole, num_outputs);
#pragma GCC unroll 8
    for (int r = 0; r < ROWS; r++) {
        float *results = args->sums + (row + r) * args->sums_stride + output;
        if (from == 0)
            memcpy(results, sums + r * OUTPUTS, (size_t)num_outputs * sizeof *results);
        else
            for (int c = 0; c < num_outputs; c++) results[c] += sums[r * OUTPUTS + c];
    }
}

/* A slice of the panel that begins with `row` by a group of outputs. Rows of the next group are fetched, where there is
 * one: all by the only panel, or each second one by either of the first two. */
PK_INLINE void dot_group(const pk_dot_args *args, int64_t from, int64_t to, int64_t row, int64_t first, int64_t end,
                         const int num_ahead)
{
    const int64_t w_row = args->weight_stride * W_BYTES;
    const float *panel = (const float *)args->x + row * args->x_stride;
    const char *ahead = (const char *)args->weight + (first + GROUP + (num_ahead == 1 ? row / ROWS : 0)) * w_row;
    int64_t output = first;
    for (; output + OUTPUTS <= end; output += OUTPUTS, ahead += OUTPUTS * w_row)
        dot_tile(args, panel, from, to, row, output, ahead, OUTPUTS, num_ahead);
    if (output < end) dot_tile(args, panel, from, to, row, output, ahead, 1, 0);
}

void pk_dot_panels_avx512(const pk_dot_args *args)
{
    for (int64_t from = 0; from == 0 || from < args->size; from += SLICE)
        for (int64_t first = 0; first < args->num_outputs; first += GROUP) {
            const int64_t to = args->size - from > SLICE ? from + SLICE : args->size;
            const int64_t end = args->num_outputs - first > GROUP ? first + GROUP : args->num_outputs;
            const bool is_next = first + 2 * GROUP <= args->num_outputs; /* a whole group */
            for (int64_t row = 0; row < args->num_rows; row += ROWS)
                if (is_next && args->num_rows <= ROWS)
                    dot_group(args, from, to, row, first, end, OUTPUTS);
                else if (is_next && row < OUTPUTS * ROWS)
                    dot_group(args, from, to, row, first, end, 1);
                else
                    dot_group(args, from, to, row, first, end, 0);
        }
}
#endif
