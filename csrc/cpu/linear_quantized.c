/* linear_quantized.c - few rows of x by a quantised weight on the CPU: threads and blocks around the products of
 * weights.inc. x is float32 there whatever it was. */
#include "cpu/linear.h"
#include "cpu/weights.h"

#include <omp.h>
#include <stdlib.h>

enum { OUTPUTS = 64 /* of a block */, CACHE_LINE = 64 };

bool pk_cpu_is_quantized_few(const pk_linear_args *args)
{
    return args->weight.scales && args->x.num_rows <= pk_cpu_weights()->most_rows;
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

pk_status pk_cpu_linear_quantized(const pk_linear_args *args, int num_threads, pk_error *err)
{
    const pk_weight_kernels *kernels = pk_cpu_weights();
    const pk_weight *weight = &args->weight;
    const int64_t size = weight->in_features, num_rows = args->x.num_rows;
    const int64_t stride = weight->dtype == PK_U8 ? kernels->int4_row_floats(size) : size;
    const int64_t x_floats = pk_cpu_round_up(num_rows * stride, CACHE_LINE);
    const int64_t thread_floats = pk_cpu_round_up(OUTPUTS * num_rows, CACHE_LINE);
    const int64_t floats = x_floats + pk_cpu_round_up(size, CACHE_LINE) + num_threads * thread_floats;
    float *x = aligned_alloc(CACHE_LINE, (size_t)floats * sizeof *x);
    if (!x)
        return pk_fail(err, PK_ENOMEM, "linear: cannot allocate scratch for %lld x %lld", (long long)num_rows,
                       (long long)size);
    float *row = x + x_floats, *scratch = row + pk_cpu_round_up(size, CACHE_LINE);
    arrange_x(args, x, stride, row);
#pragma omp parallel for schedule(dynamic) num_threads(num_threads)
    for (int64_t first = 0; first < weight->out_features; first += OUTPUTS) {
        float *sums = scratch + omp_get_thread_num() * thread_floats;
        const int64_t left = weight->out_features - first, count = left < OUTPUTS ? left : OUTPUTS;
        const pk_weight_dot dot = {weight, first, count, x, sums, num_rows, stride, OUTPUTS};
        kernels->dot(&dot);
        pk_cpu_write_sums(
            args, &(pk_dot_args){.sums = sums, .num_rows = num_rows, .num_outputs = count, .sums_stride = OUTPUTS}, 0,
            first);
    }
    free(x);
    return PK_OK;
}
