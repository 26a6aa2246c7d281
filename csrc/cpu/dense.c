/* dense.c - the row-wise operations on the CPU: gather, rms_norm (and scale_columns), silu_and_mul.
 *
 * Every row is converted to fp32, worked on, and rounded where transformers' modules round, so that bf16 and f16 follow
 * the same casts as a model that runs there. A row is independent of the others, whatever the batch and the threads.
 */
#include "cpu/rows.h"

#include <math.h>
#include <omp.h>
#include <stdlib.h>
#include <string.h>

enum { CHUNK = 256 }; /* elements of a row in fp32 at a time, where it need not be there as a whole */

pk_status pk_cpu_gather_rows(pk_device device, const pk_gather_args *given, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    pk_gather_args own_args = *given, *args = &own_args;
    PK_CPU_NUMBERS(own);
    const int64_t limit = args->is_part ? INT64_MAX : args->num_rows;
    PK_CPU_OWN_IDS(&own, args->ids_name, args->ids, args->ids_are_int64, args->num_ids, limit, err);
    int64_t bytes = (int64_t)pk_dtype_bytes(args->dtype), row_bytes = args->row_size * bytes;
    if (row_bytes == 0) return PK_OK; /* of however many rows, and nothing may have no address */
#pragma omp parallel for schedule(static) if (args->num_ids * args->row_size > PK_CPU_PARALLEL)
    for (int64_t t = 0; t < args->num_ids; t++) {
        int64_t row = pk_cpu_id_at(args->ids, args->ids_are_int64, t) - args->first_row;
        char *out = (char *)args->out + t * args->out_stride * bytes;
        if (row < 0 || row >= args->num_rows) /* of another part of the table */
            memset(out, 0, (size_t)row_bytes);
        else
            memmove(out, (const char *)args->table + row * args->table_stride * bytes, (size_t)row_bytes);
    }
    return PK_OK;
}

/* Rounds to dtype and back: the value that a tensor of that dtype would hold. */
void pk_cpu_round_row(float *row, pk_dtype dtype, int64_t count)
{
    uint16_t rounded[CHUNK];
    if (dtype == PK_F32) return;
    for (int64_t at = 0; at < count; at += CHUNK) {
        int64_t n = pk_min(count - at, CHUNK);
        pk_cpu_row_from_f32(rounded, dtype, row + at, n);
        pk_cpu_row_to_f32(row + at, rounded, dtype, n);
    }
}

static float sum_of_squares(const float *row, int64_t count)
{
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) sum += row[i] * row[i];
    return sum;
}

void pk_cpu_rms_norm_row(float *row, const float *weight, int64_t count, float eps, pk_dtype dtype)
{
    float scale = 1.0f / sqrtf(sum_of_squares(row, count) / (float)count + eps);
    for (int64_t i = 0; i < count; i++) row[i] *= scale;
    pk_cpu_round_row(row, dtype, count); /* as Qwen3RMSNorm: cast to the input's dtype, then multiply by the weight */
    for (int64_t i = 0; i < count; i++) row[i] *= weight[i];
    pk_cpu_round_row(row, dtype, count);
}

float pk_cpu_rms_scale(const pk_rms_arg *rms, int64_t row, pk_dtype dtype)
{
    if (!rms->x) return 1;
    int64_t bytes = (int64_t)pk_dtype_bytes(dtype);
    const char *x = (const char *)rms->x + row * rms->stride * bytes;
    float values[CHUNK], sum = 0;
    for (int64_t at = 0; at < rms->row_size; at += CHUNK) {
        int64_t count = pk_min(rms->row_size - at, CHUNK);
        pk_cpu_row_to_f32(values, x + at * bytes, dtype, count);
        sum += sum_of_squares(values, count);
    }
    return 1.0f / sqrtf(sum / (float)rms->row_size + rms->eps);
}

pk_status pk_cpu_rms_norm(pk_device device, const pk_rms_norm_args *args, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream;
    int64_t size = args->row_size, bytes = (int64_t)pk_dtype_bytes(args->dtype);
    if (size == 0) return PK_OK; /* of however many rows */
    int num_threads = args->num_rows * size > PK_CPU_PARALLEL ? pk_cpu_num_threads() : 1;
    /* the weights in fp32, then two rows of scratch a thread */
    float *scratch = malloc((size_t)(size * (1 + 2 * num_threads) + 1) * sizeof *scratch);
    if (!scratch) return pk_fail(err, PK_ENOMEM, "rms_norm: cannot allocate scratch for rows of %lld", (long long)size);
    pk_cpu_row_to_f32(scratch, args->weight, args->dtype, size);
#pragma omp parallel num_threads(num_threads)
    {
        float *row = scratch + size * (1 + 2 * omp_get_thread_num()), *addend = row + size;
#pragma omp for schedule(static)
        for (int64_t t = 0; t < args->num_rows; t++) {
            pk_cpu_row_to_f32(row, (const char *)args->x + t * args->x_stride * bytes, args->dtype, size);
            if (args->residual) {
                char *residual = (char *)args->residual + t * args->residual_stride * bytes;
                pk_cpu_row_to_f32(addend, residual, args->dtype, size);
                for (int64_t i = 0; i < size; i++) row[i] += addend[i];
                pk_cpu_row_from_f32(residual, args->dtype, row, size);
                pk_cpu_row_to_f32(row, residual, args->dtype, size);
            }
            if (args->divides)
                pk_cpu_rms_norm_row(row, scratch, size, args->eps, args->dtype);
            else
                for (int64_t i = 0; i < size; i++) row[i] *= scratch[i];
            pk_cpu_row_from_f32((char *)args->out + t * args->out_stride * bytes, args->dtype, row, size);
        }
    }
    free(scratch);
    return PK_OK;
}

pk_status pk_cpu_silu_and_mul(pk_device device, const pk_silu_args *args, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream, (void)err;
    int64_t size = args->row_size, bytes = (int64_t)pk_dtype_bytes(args->dtype);
    if (size == 0) return PK_OK;
#pragma omp parallel for schedule(static) if (args->num_rows * size > PK_CPU_PARALLEL / 4)
    for (int64_t t = 0; t < args->num_rows; t++) {
        const char *x = (const char *)args->x + t * args->x_stride * bytes;
        char *out = (char *)args->out + t * args->out_stride * bytes;
        float scale = pk_cpu_rms_scale(&args->rms, t, args->dtype);
        for (int64_t at = 0; at < size; at += CHUNK) {
            float gate[CHUNK], up[CHUNK];
            int64_t count = pk_min(size - at, CHUNK);
            pk_cpu_row_to_f32(gate, x + at * bytes, args->dtype, count);
            pk_cpu_row_to_f32(up, x + (size + at) * bytes, args->dtype, count);
            for (int64_t i = 0; i < count; i++) gate[i] *= scale, up[i] *= scale;
            pk_cpu_rows()->silu(gate, count);
            pk_cpu_round_row(gate, args->dtype, count); /* the activation is a tensor of its own in transformers' MLP */
            for (int64_t i = 0; i < count; i++) gate[i] *= up[i];
            pk_cpu_row_from_f32(out + at * bytes, args->dtype, gate, count);
        }
    }
    return PK_OK;
}
