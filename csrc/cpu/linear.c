/* linear.c - out = x @ weight.T + bias on the CPU. */
#include "cpu/cpu.h"

#include <omp.h>
#include <stdlib.h>

pk_status pk_cpu_linear(const pk_linear_args *args, pk_stream stream, pk_error *err)
{
    (void)stream;
    int64_t k = args->in_features, n = args->out_features, rows = args->num_rows;
    int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype), out_bytes = (int64_t)pk_dtype_bytes(args->out_dtype);
    float *x = malloc((size_t)(rows * k + (k + 1) * omp_get_max_threads() + 1) * sizeof *x);
    if (!x) return pk_fail(err, PK_ENOMEM, "linear: cannot allocate scratch");
    for (int64_t t = 0; t < rows; t++)
        pk_cpu_row_to_f32(x + t * k, (const char *)args->x + t * args->x_stride * bytes, args->dtype, k);
#pragma omp parallel for schedule(static) if (rows * n * k > 65536)
    for (int64_t j = 0; j < n; j++) {
        float *weight = x + rows * k + (k + 1) * omp_get_thread_num(), bias = 0;
        pk_cpu_row_to_f32(weight, (const char *)args->weight + j * args->weight_stride * bytes, args->dtype, k);
        if (args->bias) pk_cpu_row_to_f32(&bias, (const char *)args->bias + j * bytes, args->dtype, 1);
        for (int64_t t = 0; t < rows; t++) {
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < k; i++) sum += x[t * k + i] * weight[i];
            sum += bias;
            pk_cpu_row_from_f32((char *)args->out + (t * args->out_stride + j) * out_bytes, args->out_dtype, &sum, 1);
        }
    }
    free(x);
    return PK_OK;
}
