/* cpu.h - what the files of the CPU backend share: the entries of its table. */
#ifndef PK_CPU_H
#define PK_CPU_H

#include "pk.h"

/* --- convert.c: rows of a float dtype (fp8 too) to and from fp32 */
void pk_cpu_row_to_f32(float *dst, const void *src, pk_dtype dtype, int64_t count);
void pk_cpu_row_from_f32(void *dst, pk_dtype dtype, const float *src, int64_t count);
/* One token's row of one head into the cache: copied, or src / scale rounded to fp8. */
void pk_cpu_store_row(void *dst, pk_dtype cache_dtype, const void *src, pk_dtype dtype, int64_t head_dim, float scale);

static inline float pk_cpu_scale_at(const pk_scale_arg *scale, int64_t seq, int64_t head)
{
    return scale->data ? scale->data[seq * scale->seq_stride + head * scale->head_stride] : scale->value;
}

/* --- dense.c: shared with rope.c. `row` holds values of dtype in fp32; both round to dtype. */
void pk_cpu_round_row(float *row, pk_dtype dtype, int64_t count);
void pk_cpu_rms_norm_row(float *row, const float *weight, int64_t count, float eps, pk_dtype dtype);

/* --- entries of the backend's table */
pk_status pk_cpu_gather(const pk_gather_args *args, pk_stream stream, pk_error *err);
pk_status pk_cpu_rms_norm(const pk_rms_norm_args *args, pk_stream stream, pk_error *err);
pk_status pk_cpu_silu_and_mul(const pk_silu_args *args, pk_stream stream, pk_error *err);
pk_status pk_cpu_qk_norm_rope_store(const pk_qk_norm_rope_store_args *args, pk_stream stream, pk_error *err);
pk_status pk_cpu_linear(const pk_linear_args *args, pk_stream stream, pk_error *err);
pk_status pk_cpu_sample(const pk_sample_args *args, pk_stream stream, pk_error *err);

#endif
