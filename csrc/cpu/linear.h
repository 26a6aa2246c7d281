/* linear.h - what the files of `linear` share: the kernel's arguments and its variants. */
#ifndef PK_CPU_LINEAR_H
#define PK_CPU_LINEAR_H

#include "cpu/cpu.h"
#include "ops/linear.h"

/* sums[r, c] = dot(x[r], weight[c]) in fp32 */
typedef struct {
    const void *x;      /* [num_rows, size]: fp32, the weight's dtype, or tiles (see below) */
    const void *weight; /* [num_outputs, size] */
    float *sums;        /* [num_rows, num_outputs] */
    int64_t num_rows, num_outputs, size, x_stride, weight_stride, sums_stride;
    pk_dtype dtype; /* of weight */
    float *scratch; /* [num_outputs, size], only for pk_dot_sgemm with weights that are not fp32 */
} pk_dot_args;

typedef void (*pk_dot_kernel)(const pk_dot_args *args);

/* x in fp32, weights of any float dtype (linear.inc) */
void pk_dot_generic(const pk_dot_args *args);
void pk_dot_avx2(const pk_dot_args *args);
void pk_dot_avx512(const pk_dot_args *args);
/* x and weights in bfloat16 */
void pk_dot_bf16_avx2(const pk_dot_args *args);
void pk_dot_bf16_avx512(const pk_dot_args *args);
void pk_dot_avx512bf16(const pk_dot_args *args);
/* x in tiles of PK_AMX_LINES rows, x_stride elements a row. Writes sums for rows and outputs up to the next multiples of
 * PK_AMX_ROWS. */
enum { PK_AMX_LINES = 16, PK_AMX_ROWS = 32, PK_AMX_STEP = 32 /* x_stride is size, rounded up to it */ };
void pk_dot_amx(const pk_dot_args *args);
/* Rows of bf16, up to PK_AMX_LINES of them, to one such tile row; zeros where there are none. */
void pk_amx_tiles_of(void *tiles, const void *rows, int64_t num_rows, int64_t row_stride, int64_t size);

/* linear.c: out = x @ weight.T + bias of each of some products that differ in x, its number of rows, the weight's addresses
 * and out alone, by one plan. No squares are left. */
pk_status pk_cpu_multiply_each(const pk_linear_args *each, int64_t count, pk_error *err);

/* linear_epilogue.c. A block of sums, with the bias, or what out holds, added, and rounded to out_dtype; then the squares
 * of all that was written. */
enum { PK_MAX_OUTPUT_BLOCK = 256 };
void pk_cpu_write_sums(const pk_linear_args *args, const pk_dot_args *dot, int64_t first_row, int64_t first_output);
void pk_cpu_leave_squares(const pk_linear_args *args);

/* linear_quantized.c: whether few rows of x are multiplied with a quantised weight as it is, in an order that depends on how
 * many they are; else a block of it is decoded before it is multiplied. */
bool pk_cpu_is_quantized_few(const pk_linear_args *args);
/* As pk_cpu_multiply_each, of few rows each. */
pk_status pk_cpu_multiply_quantized(const pk_linear_args *each, int64_t count, int num_threads, pk_error *err);

#endif
