/* linear.c - out = x @ weight.T + bias on the CPU: threads, blocks and edges around the kernel of linear.inc, and which
 * numbers of rows are left to a BLAS.
 *
 * Every thread takes blocks of outputs and walks the rows of x in blocks, both small enough to share the L2 cache: the
 * weight comes from memory once, whatever the number of rows, and few rows cost what reading the weight costs.
 *
 * Our own kernels form each sum in one order, whatever rows are beside it. So batch_invariant leaves nothing to a BLAS, nor to
 * the kernels of few rows by a quantised weight.
 */
#include "cpu/cpu.h"
#include "cpu/blas.h"
#include "cpu/weights.h"

#include <omp.h>
#include <stdio.h>
#include <stdlib.h>

enum {
    BLOCK_BYTES = 1 << 18,     /* of weight rows, and of rows of x: together half of a 1 MiB L2 */
    MAX_BLOCK = 64,            /* rows of either in a block of our own kernels */
    AMX_BLOCK_BYTES = 1 << 19, /* CPUs with AMX have 2 MiB and more of L2 */
    MAX_AMX_BLOCK = 128,
    CACHE_LINE = 64,
    FEW_ROWS = 16,                    /* no more than these wait for the weight, or nearly so */
    BLAS_BLOCK = PK_MAX_OUTPUT_BLOCK, /* the same for a BLAS, which packs both anew for every call */
    PARALLEL_PRODUCTS = 1 << 18,      /* below this many multiplications one thread is done before a second one wakes */
};
static const int64_t NEVER = INT64_MAX; /* of a number of rows */

/* From this many rows on an sgemm beats our kernel (in 16 bits: of weights converted a block at a time). Measured on
 * one Zen 5 core at 4096 x 1024 and 1024 x 3072 with NumPy 2.4's OpenBLAS 0.3.31, GFLOP/s of ours : its. The row "on
 * Intel" is two cores of a Xeon with AVX-512 at the four products of a layer of 0.6B.
 *
 *   AVX-512   f32, 64 rows 150 : 96, 256 rows 174 : 116 (194 where it is told to take its AVX-512 kernels)
 *   on Intel  f32, 64 rows 149 : 156, 256 rows 185 : 242, 512 rows 159 : 260
 *   AVX2      f32, 64 rows 85 : 91, 256 rows 109 : 115; bf16, 64 rows 77 : 85, 256 rows 91 : 108
 *   SSE2      f32, 64 rows 37 : 37; bf16, 16 rows 22 : 30; f16, 16 rows 11 : 20
 */
static int64_t min_sgemm_rows(pk_dtype dtype)
{
    switch (pk_cpu_isa_level()) {
        case PK_ISA_AVX512:
            return dtype == PK_F32 && pk_cpu_is_intel() ? 64 : NEVER;
        case PK_ISA_AVX2:
            return 64;
        default:
            return dtype == PK_F32 ? 64 : 16;
    }
}

/* The same for oneDNN's bf16 matmul. (3.2.0 on the same core: 64 rows 340 : 338, 256 rows 367 : 425.) On Intel's CPUs
 * ours are as fast or faster. A layer's four products of 0.6B, 28 times, by two cores, 64 and 512 rows: with AMX 117 and
 * 750 ms : 146 and 859, without it 241 and 1,910 : 381 and 2,706. */
static int64_t min_onednn_rows(pk_dtype dtype) { return dtype == PK_BF16 && pk_cpu_has_fast_avx512bf16() ? 64 : NEVER; }

/* What a library can be told: rows of `size` elements that lie one after the other, within 32 bits. It need not notice
 * anything else: an sgemm that refuses its arguments writes nothing and returns as ever. */
static bool are_rows_apart(int64_t size, int64_t stride) { return size > 0 && stride >= size && stride <= INT32_MAX; }

/* Not expanded, reversed or overlapping rows, nor rows of nothing. What is not float32 is converted. */
static bool fits_sgemm(const pk_linear_args *args)
{
    const int64_t size = args->weight.in_features;
    return are_rows_apart(size, args->x.dtype == PK_F32 ? args->x.stride : size) &&
           are_rows_apart(size, args->weight.dtype == PK_F32 ? args->weight.stride : size);
}

static bool fits_onednn(const pk_linear_args *args)
{
    return !args->weight.scales && are_rows_apart(args->weight.in_features, args->x.stride) &&
           are_rows_apart(args->weight.in_features, args->weight.stride) &&
           are_rows_apart(args->weight.out_features, args->epilogue.out_stride);
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
        snprintf(text, sizeof text, "%s%s from %lld rows", sgemm, min_sgemm_rows(PK_BF16) < NEVER ? "" : " for float32",
                 (long long)min_sgemm_rows(PK_F32));
    else
        snprintf(text, sizeof text, "none (own %s kernels for any number of rows)",
                 pk_cpu_has_amx() ? "AMX" : pk_cpu_isa());
    return text;
}

typedef enum { X_AS_IT_IS, X_IN_F32, X_IN_TILES } x_order;

typedef struct {
    pk_dot_kernel kernel;
    x_order x_order;       /* that the kernel takes */
    pk_dtype weight_dtype; /* the same: the weight's, or what a quantised one is decoded to, a block at a time */
    bool is_sgemm;
    int64_t row_block, output_block;
} linear_plan;

static int64_t block_rows(int64_t row_bytes)
{
    return pk_max(8, pk_min(MAX_BLOCK, BLOCK_BYTES / pk_max(1, row_bytes) / 8 * 8));
}

static void choose_own_kernel(linear_plan *plan, const pk_linear_args *args)
{
    plan->kernel = pk_dot_generic;
    plan->x_order = args->x.dtype == PK_F32 ? X_AS_IT_IS : X_IN_F32;
    plan->weight_dtype = args->weight.scales ? PK_F32 : args->weight.dtype;
#ifdef __x86_64__
    bool is_bf16 = args->x.dtype == PK_BF16 && pk_cpu_isa_level() >= PK_ISA_AVX2;
    if (is_bf16) plan->weight_dtype = PK_BF16, plan->x_order = X_AS_IT_IS;
    if (is_bf16 && pk_cpu_has_amx())
        plan->kernel = pk_dot_amx, plan->x_order = X_IN_TILES;
    else if (is_bf16 && pk_cpu_has_fast_avx512bf16())
        plan->kernel = pk_dot_avx512bf16;
    else if (pk_cpu_isa_level() >= PK_ISA_AVX512)
        plan->kernel = is_bf16 ? pk_dot_bf16_avx512 : pk_dot_avx512;
    else if (pk_cpu_isa_level() >= PK_ISA_AVX2)
        plan->kernel = is_bf16 ? pk_dot_bf16_avx2 : pk_dot_avx2;
#endif
}

static int64_t x_bytes(const linear_plan *plan, pk_dtype dtype)
{
    return plan->x_order == X_IN_F32 ? 4 : (int64_t)pk_dtype_bytes(dtype);
}

static linear_plan make_plan(const pk_linear_args *args, int num_threads)
{
    const bool may_be_sgemms = !args->is_batch_invariant && args->x.num_rows >= min_sgemm_rows(args->x.dtype);
    if (may_be_sgemms && fits_sgemm(args) && pk_cpu_find_sgemm())
        return (linear_plan){.kernel = pk_dot_sgemm,
                             .weight_dtype = args->weight.scales ? PK_F32 : args->weight.dtype,
                             .x_order = args->x.dtype == PK_F32 ? X_AS_IT_IS : X_IN_F32,
                             .is_sgemm = true,
                             .row_block = 2 * BLAS_BLOCK,
                             .output_block = BLAS_BLOCK};
    linear_plan plan = {0};
    choose_own_kernel(&plan, args);
    const bool only_reads = args->x.num_rows <= FEW_ROWS && !args->weight.scales;
    int64_t weight_bytes = args->weight.in_features * (int64_t)pk_dtype_bytes(plan.weight_dtype);
    int64_t share = args->weight.out_features / (4 * num_threads); /* of a thread that gets several blocks */
    if (plan.x_order == X_IN_TILES) {
        int64_t most = AMX_BLOCK_BYTES / pk_max(1, weight_bytes);
        most = only_reads ? PK_MAX_OUTPUT_BLOCK : pk_min(MAX_AMX_BLOCK, most);
        plan.output_block = pk_max(PK_AMX_ROWS, pk_min(share, most) / PK_AMX_ROWS * PK_AMX_ROWS);
        plan.row_block = MAX_BLOCK;
        return plan;
    }
    plan.output_block = block_rows(weight_bytes);
    if (only_reads) /* which is all: the longer, the better */
        plan.output_block = pk_max(plan.output_block, pk_min(share / 16 * 16, PK_MAX_OUTPUT_BLOCK));
    plan.row_block = block_rows(args->weight.in_features * x_bytes(&plan, args->x.dtype));
    return plan;
}

/* Writes x in the plan's order, to rows that are x_stride elements apart. */
static void convert_x(const pk_linear_args *args, const linear_plan *plan, char *to, int64_t x_stride, int num_threads)
{
    int64_t row_bytes = args->x.stride * (int64_t)pk_dtype_bytes(args->x.dtype);
#pragma omp parallel for num_threads(num_threads) if (args->x.num_rows > PK_AMX_LINES)
    for (int64_t first = 0; first < args->x.num_rows; first += PK_AMX_LINES) {
        int64_t count = pk_min(PK_AMX_LINES, args->x.num_rows - first);
        const char *x = (const char *)args->x.data + first * row_bytes;
        char *rows = to + first * x_stride * x_bytes(plan, args->x.dtype);
#ifdef __x86_64__
        if (plan->x_order == X_IN_TILES) {
            pk_amx_tiles_of(rows, x, count, args->x.stride, args->weight.in_features);
            continue;
        }
#endif
        for (int64_t r = 0; r < count; r++)
            pk_cpu_row_to_f32((float *)rows + r * x_stride, x + r * row_bytes, args->x.dtype, args->weight.in_features);
    }
}

/* A block of outputs, from the first on, of all rows; x is as the plan's kernel takes it. */
static void run_block(const pk_linear_args *args, const linear_plan *plan, int64_t first, float *sums)
{
    const pk_weight *weight = &args->weight;
    pk_dot_args dot = {
        .weight = (const char *)weight->data + first * weight->stride * (int64_t)pk_dtype_bytes(weight->dtype),
        .sums = sums,
        .num_outputs = pk_min(plan->output_block, weight->out_features - first),
        .size = weight->in_features,
        .x_stride = args->x.stride,
        .weight_stride = weight->stride,
        .sums_stride = plan->output_block,
        .dtype = plan->weight_dtype,
        .scratch = sums + plan->row_block * plan->output_block,
    };
    if (args->x.num_rows > 0 && weight->scales) {
        pk_cpu_weights()->decode(dot.scratch, dot.dtype, weight, first, dot.num_outputs);
        dot.weight = dot.scratch, dot.weight_stride = dot.size;
    }
    for (int64_t row = 0; row < args->x.num_rows; row += plan->row_block) {
        dot.x = (const char *)args->x.data + row * args->x.stride * x_bytes(plan, args->x.dtype);
        dot.num_rows = pk_min(plan->row_block, args->x.num_rows - row);
        plan->kernel(&dot);
        pk_cpu_write_sums(args, &dot, row, first);
    }
}

/* `scratch` is for each thread a block of sums, then weights. */
static void run_blocks(const pk_linear_args *each, int64_t count, const linear_plan *plan, float *scratch,
                       int64_t thread_floats, int num_threads)
{
    const int64_t blocks = (each->weight.out_features + plan->output_block - 1) / plan->output_block;
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int64_t i = 0; i < count * blocks; i++)
        run_block(&each[i / blocks], plan, i % blocks * plan->output_block,
                  scratch + omp_get_thread_num() * thread_floats);
}

/* Elements of x, converted to the plan's order; 0 where it is read as it is. */
static int64_t converted_x(const pk_linear_args *args, const linear_plan *plan, int64_t *x_stride)
{
    const int64_t size = args->weight.in_features;
    *x_stride = plan->x_order == X_IN_TILES ? pk_cpu_round_up(size, PK_AMX_STEP) : size;
    if (plan->x_order == X_AS_IT_IS) return 0;
    return *x_stride *
           (plan->x_order == X_IN_TILES ? pk_cpu_round_up(args->x.num_rows, PK_AMX_LINES) : args->x.num_rows);
}

static pk_status multiply_by_plan(const pk_linear_args *each, int64_t count, const linear_plan *plan, int num_threads,
                                  pk_error *err)
{
    const int64_t size = each->weight.in_features, bytes = x_bytes(plan, each->x.dtype);
    int64_t thread_floats = plan->row_block * plan->output_block, converted = 0, x_stride, num_rows = 0;
    if (each->weight.scales || (plan->is_sgemm && each->x.dtype != PK_F32)) thread_floats += plan->output_block * size;
    for (int64_t i = 0; i < count; i++) {
        converted += pk_cpu_round_up(converted_x(&each[i], plan, &x_stride) * bytes, CACHE_LINE);
        num_rows += each[i].x.num_rows;
    }
    const int64_t args_bytes = pk_cpu_round_up(count * (int64_t)sizeof *each, CACHE_LINE);
    const int64_t scratch_bytes = args_bytes + converted + num_threads * thread_floats * 4;
    char *scratch = aligned_alloc(CACHE_LINE, (size_t)pk_cpu_round_up(scratch_bytes, CACHE_LINE));
    if (!scratch)
        return pk_fail(err, PK_ENOMEM, "linear: cannot allocate scratch for %lld x %lld", (long long)num_rows,
                       (long long)size);
    pk_linear_args *args = (pk_linear_args *)scratch; /* with x in the plan's order */
    char *x = scratch + args_bytes; /* begins with a cache line, or each line of a tile would lie in two */
    for (int64_t i = 0; i < count; i++) {
        args[i] = each[i];
        const int64_t elements = converted_x(&each[i], plan, &x_stride);
        if (elements == 0) continue;
        convert_x(&each[i], plan, x, x_stride, num_threads);
        args[i].x.data = x, args[i].x.stride = x_stride;
        x += pk_cpu_round_up(elements * bytes, CACHE_LINE);
    }
    if (plan->is_sgemm) pk_cpu_sgemm_begin();
    run_blocks(args, count, plan, (float *)(scratch + args_bytes + converted), thread_floats, num_threads);
    if (plan->is_sgemm) pk_cpu_sgemm_end();
    free(scratch);
    return PK_OK;
}

pk_status pk_cpu_multiply_each(const pk_linear_args *each, int64_t count, pk_error *err)
{
    int64_t num_rows = 0;
    const pk_linear_args *most = each; /* of rows: the plan is good for these */
    for (int64_t i = 0; i < count; i++) {
        num_rows += each[i].x.num_rows;
        if (each[i].x.num_rows > most->x.num_rows) most = &each[i];
    }
    if (num_rows == 0) return PK_OK; /* of however many outputs */
    const bool is_onednns =
        count == 1 && !each->is_batch_invariant && num_rows >= min_onednn_rows(each->x.dtype) && fits_onednn(each);
    if (is_onednns && pk_cpu_onednn_linear(each)) return PK_OK;
    const int64_t products = num_rows * each->weight.out_features * each->weight.in_features;
    int num_threads = products > PARALLEL_PRODUCTS ? pk_cpu_num_threads() : 1;
    if (pk_cpu_is_quantized_few(most)) return pk_cpu_multiply_quantized(each, count, num_threads, err);
    linear_plan plan = make_plan(most, num_threads);
    if (plan.is_sgemm) num_threads = (int)pk_min(num_threads, 64); /* OpenBLAS has buffers for a fixed number */
    return multiply_by_plan(each, count, &plan, num_threads, err);
}

pk_status pk_cpu_linear(pk_device device, const pk_linear_args *args, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    PK_TRY(pk_cpu_multiply_each(args, 1, err));
    if (args->epilogue.squares) pk_cpu_leave_squares(args);
    return PK_OK;
}
