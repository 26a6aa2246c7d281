/* linear_quantized.c - few rows of x by a quantised weight on the CPU: threads and blocks around the products of
 * weights.inc. x is float32 there whatever it was. */
#include "cpu/linear.h"
#include "cpu/weights.h"

#include <omp.h>
#include <stdlib.h>

enum { OUTPUTS = 64 /* of a block */, CACHE_LINE = 64 };

bool pk_cpu_is_quantized_few(const pk_linear_args *args)
{
    return args->weight.scales && !args->is_batch_invariant && args->x.num_rows <= pk_cpu_weights()->most_rows;
}

/* The rows of x, `stride` floats apart, as the kernels take them. */
static void arrange_x(const pk_linear_args *args, float *to, int64_t stride, float *row)
{
    const int64_t bytes = (int64_t)pk_dtype_bytes(args->x.dtype), size = args->weight.in_features;
    for (int64_t r = 0; r < args->x.num_rows && size > 0; r++) {
        const char *x = (const char *)args->x.data + r * args->x.stride * bytes;
        const bool is_int4 = args->weight.dtype == PK_U8;
        pk_cpu_row_to_f32(is_int4 ? row : to + r * stride, x, args->x.dtype, size);
        if (is_int4) pk_cpu_weights()->int4_row(to + r * stride, row, size);
    }
}

/* One block of outputs of a product, whose rows of x lie `stride` floats apart. */
static void run_block(const pk_linear_args *args, int64_t first, const float *x, int64_t stride, float *sums)
{
    const int64_t left = args->weight.out_features - first, count = pk_min(left, OUTPUTS);
    const pk_weight_dot dot = {&args->weight, first, count, x, sums, args->x.num_rows, stride, OUTPUTS};
    pk_cpu_weights()->dot(&dot);
    const pk_dot_args done = {.sums = sums, .num_rows = args->x.num_rows, .num_outputs = count, .sums_stride = OUTPUTS};
    pk_cpu_write_sums(args, &done, 0, first);
}

pk_status pk_cpu_multiply_quantized(const pk_linear_args *each, int64_t count, int num_threads, pk_error *err)
{
    const pk_weight_kernels *kernels = pk_cpu_weights();
    const int64_t size = each->weight.in_features, blocks = (each->weight.out_features + OUTPUTS - 1) / OUTPUTS;
    const int64_t stride = each->weight.dtype == PK_U8 ? kernels->int4_row_floats(size) : size;
    const int64_t most_floats = pk_cpu_round_up(kernels->most_rows * stride, CACHE_LINE); /* of a product's x */
    const int64_t thread_floats = pk_cpu_round_up(OUTPUTS * kernels->most_rows, CACHE_LINE);
    const int64_t floats = count * most_floats + pk_cpu_round_up(size, CACHE_LINE) + num_threads * thread_floats;
    float *x = aligned_alloc(CACHE_LINE, (size_t)floats * sizeof *x);
    if (!x)
        return pk_fail(err, PK_ENOMEM, "linear: cannot allocate scratch for %lld x %lld x %lld", (long long)count,
                       (long long)kernels->most_rows, (long long)size);
    float *row = x + count * most_floats, *scratch = row + pk_cpu_round_up(size, CACHE_LINE);
    for (int64_t i = 0; i < count; i++) arrange_x(&each[i], x + i * most_floats, stride, row);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int64_t i = 0; i < count * blocks; i++)
        run_block(&each[i / blocks], i % blocks * OUTPUTS, x + i / blocks * most_floats, stride,
                  scratch + omp_get_thread_num() * thread_floats);
    free(x);
    return PK_OK;
}
