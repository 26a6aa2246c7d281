/* linear.c - out = x @ weight.T + bias on the CPU: threads, blocks and edges around the kernel of linear.inc, and which
 * numbers of rows are left to a BLAS.
 *
 * Every thread takes blocks of outputs and walks the rows of x in blocks, both small enough to share the L2 cache: the
 * weight comes from memory once, whatever the number of rows, and few rows cost what reading the weight costs.
 */
#include "cpu/cpu.h"
#include "cpu/blas.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    BLOCK_BYTES = 1 << 18, /* of weight rows, and of rows of x: together half of a 1 MiB L2 */
    MAX_BLOCK = 64,        /* rows of either in a block of our own kernels */
    FEW_ROWS = 16,         /* no more than these wait for the weight, or nearly so */
    MAX_OUTPUT_BLOCK = 256,
    BLAS_BLOCK = MAX_OUTPUT_BLOCK, /* the same for a BLAS, which packs both anew for every call */
    PARALLEL_PRODUCTS = 1 << 18,   /* below this many multiplications one thread is done before a second one wakes */
};
static const int64_t NEVER = INT64_MAX; /* of a number of rows */

/* From this many rows on an sgemm beats our kernel (in 16 bits: of weights converted a block at a time). Measured on
 * one Zen 5 core at 4096 x 1024 and 1024 x 3072 with NumPy 2.4's OpenBLAS 0.3.31, GFLOP/s of ours : its
 *
 *   AVX-512   f32, 64 rows 150 : 96, 256 rows 174 : 116 (194 where it is told to take its AVX-512 kernels)
 *   AVX2      f32, 64 rows 85 : 91, 256 rows 109 : 115; bf16, 64 rows 77 : 85, 256 rows 91 : 108
 *   SSE2      f32, 64 rows 37 : 37; bf16, 16 rows 22 : 30; f16, 16 rows 11 : 20
 */
static int64_t min_sgemm_rows(pk_dtype dtype)
{
    switch (pk_cpu_isa_level()) {
        case PK_ISA_AVX512:
            return NEVER;
        case PK_ISA_AVX2:
            return 64;
        default:
            return dtype == PK_F32 ? 64 : 16;
    }
}

/* The same for oneDNN's bf16 matmul. (3.2.0 on the same core: 64 rows 340 : 338, 256 rows 367 : 425.) */
static int64_t min_onednn_rows(pk_dtype dtype)
{
    return dtype == PK_BF16 && pk_cpu_isa_level() >= PK_ISA_AVX512 ? 64 : NEVER;
}

bool pk_cpu_lacks_blas(int64_t num_rows, pk_dtype dtype)
{
    return num_rows >= min_sgemm_rows(dtype) && !pk_cpu_find_sgemm();
}

const char *pk_cpu_blas_name(void)
{
    static _Thread_local char text[800];
    const char *onednn = min_onednn_rows(PK_BF16) < NEVER ? pk_cpu_onednn_name() : NULL;
    const char *sgemm = min_sgemm_rows(PK_F32) < NEVER ? pk_cpu_sgemm_name() : NULL;
    if (onednn)
        snprintf(text, sizeof text, "%s for bfloat16 from %lld rows", onednn, (long long)min_onednn_rows(PK_BF16));
    else if (sgemm)
        snprintf(text, sizeof text, "%s from %lld rows", sgemm, (long long)min_sgemm_rows(PK_F32));
    else
        snprintf(text, sizeof text, "none (own %s kernels for any number of rows)", pk_cpu_isa());
    return text;
}

typedef struct {
    pk_dot_kernel kernel;
    bool takes_x_as_it_is; /* else in fp32 */
    bool is_sgemm;
    int64_t row_block, output_block;
} linear_plan;

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static int64_t block_rows(int64_t row_bytes)
{
    int64_t rows = BLOCK_BYTES / (row_bytes ? row_bytes : 1) / 8 * 8;
    return rows < 8 ? 8 : rows > MAX_BLOCK ? MAX_BLOCK : rows;
}

static linear_plan make_plan(const pk_linear_args *args, int num_threads)
{
    linear_plan plan = {.kernel = pk_dot_generic, .takes_x_as_it_is = args->dtype == PK_F32};
    if (args->num_rows >= min_sgemm_rows(args->dtype) && pk_cpu_find_sgemm()) {
        plan.kernel = pk_dot_sgemm;
        plan.is_sgemm = true;
        plan.row_block = 2 * BLAS_BLOCK, plan.output_block = BLAS_BLOCK;
        return plan;
    }
#ifdef __x86_64__
    bool is_bf16 = args->dtype == PK_BF16;
    plan.takes_x_as_it_is |= is_bf16 && pk_cpu_isa_level() >= PK_ISA_AVX2;
    if (is_bf16 && pk_cpu_has_avx512bf16())
        plan.kernel = pk_dot_avx512bf16;
    else if (pk_cpu_isa_level() >= PK_ISA_AVX512)
        plan.kernel = is_bf16 ? pk_dot_bf16_avx512 : pk_dot_avx512;
    else if (pk_cpu_isa_level() >= PK_ISA_AVX2)
        plan.kernel = is_bf16 ? pk_dot_bf16_avx2 : pk_dot_avx2;
#endif
    int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype);
    plan.output_block = block_rows(args->in_features * bytes);
    if (args->num_rows <= FEW_ROWS) { /* reading is all: the longer, the better, as long as all threads get several */
        int64_t share = args->out_features / (4 * num_threads) / 16 * 16;
        plan.output_block = share < plan.output_block ? plan.output_block : smaller(share, MAX_OUTPUT_BLOCK);
    }
    plan.row_block = block_rows(args->in_features * (plan.takes_x_as_it_is ? bytes : 4));
    return plan;
}

/* Adds the bias, or what out holds, to a block of sums and writes it, rounded to out_dtype. */
static void write_block(const pk_linear_args *args, const pk_dot_args *dot, int64_t first_row, int64_t first_output)
{
    float bias[MAX_OUTPUT_BLOCK];
    int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype), out_bytes = (int64_t)pk_dtype_bytes(args->out_dtype);
    if (args->bias)
        pk_cpu_row_to_f32(bias, (const char *)args->bias + first_output * bytes, args->dtype, dot->num_outputs);
    for (int64_t r = 0; r < dot->num_rows; r++) {
        float *row = dot->sums + r * dot->sums_stride;
        if (args->bias)
            for (int64_t i = 0; i < dot->num_outputs; i++) row[i] += bias[i];
        char *out = (char *)args->out + ((first_row + r) * args->out_stride + first_output) * out_bytes;
        if (args->adds_to_out) {
            float before[MAX_OUTPUT_BLOCK];
            pk_cpu_row_to_f32(before, out, args->out_dtype, dot->num_outputs);
            for (int64_t i = 0; i < dot->num_outputs; i++) row[i] += before[i];
        }
        pk_cpu_row_from_f32(out, args->out_dtype, row, dot->num_outputs);
    }
}

/* x is [num_rows, in_features] as the plan's kernel takes it; scratch is for each thread a block of sums, then weights.
 */
static void run_blocks(const pk_linear_args *args, const linear_plan *plan, const char *x, int64_t x_stride,
                       float *scratch, int64_t thread_floats, int num_threads)
{
    int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype), x_bytes = plan->takes_x_as_it_is ? bytes : 4;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int64_t first = 0; first < args->out_features; first += plan->output_block) {
        float *sums = scratch + omp_get_thread_num() * thread_floats;
        pk_dot_args dot = {
            .weight = (const char *)args->weight + first * args->weight_stride * bytes,
            .sums = sums,
            .num_outputs = smaller(plan->output_block, args->out_features - first),
            .size = args->in_features,
            .x_stride = x_stride,
            .weight_stride = args->weight_stride,
            .sums_stride = plan->output_block,
            .dtype = args->dtype,
            .scratch = sums + plan->row_block * plan->output_block,
        };
        for (int64_t row = 0; row < args->num_rows; row += plan->row_block) {
            dot.x = x + row * x_stride * x_bytes;
            dot.num_rows = smaller(plan->row_block, args->num_rows - row);
            plan->kernel(&dot);
            write_block(args, &dot, row, first);
        }
    }
}

pk_status pk_cpu_linear(pk_device device, const pk_linear_args *args, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    int64_t size = args->in_features, num_rows = args->num_rows;
    if (num_rows == 0) return PK_OK; /* of however many outputs */
    if (num_rows >= min_onednn_rows(args->dtype) && pk_cpu_onednn_linear(args)) return PK_OK;
    int num_threads = num_rows * args->out_features * size > PARALLEL_PRODUCTS ? pk_cpu_num_threads() : 1;
    linear_plan plan = make_plan(args, num_threads);
    if (plan.is_sgemm) num_threads = (int)smaller(num_threads, 64); /* OpenBLAS has buffers for a fixed number */
    int64_t thread_floats = plan.row_block * plan.output_block;
    if (plan.is_sgemm && args->dtype != PK_F32) thread_floats += plan.output_block * size;
    int64_t x_floats = plan.takes_x_as_it_is ? 0 : num_rows * size;
    float *scratch = malloc((size_t)(num_threads * thread_floats + x_floats) * sizeof *scratch);
    if (!scratch)
        return pk_fail(err, PK_ENOMEM, "linear: cannot allocate scratch for %lld x %lld", (long long)num_rows,
                       (long long)size);
    const char *x = args->x;
    int64_t x_stride = args->x_stride;
    if (!plan.takes_x_as_it_is) {
        float *converted = scratch + num_threads * thread_floats;
        int64_t row_bytes = x_stride * (int64_t)pk_dtype_bytes(args->dtype);
        for (int64_t r = 0; r < num_rows; r++)
            pk_cpu_row_to_f32(converted + r * size, x + r * row_bytes, args->dtype, size);
        x = (const char *)converted, x_stride = size;
    }
    if (plan.is_sgemm) pk_cpu_sgemm_begin();
    run_blocks(args, &plan, x, x_stride, scratch, thread_floats, num_threads);
    if (plan.is_sgemm) pk_cpu_sgemm_end();
    free(scratch);
    return PK_OK;
}
