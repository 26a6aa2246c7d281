/* copy.c - dst = src between any strides, with conversion between float dtypes. */
#include "ops/copy.h"

#include "cpu/cpu.h"

#include <string.h>

enum { CHUNK = 256 }; /* elements of a row in fp32 at a time */

/* One row. Strides count elements. */
static void copy_row(char *dst, int64_t dst_stride, pk_dtype dst_dtype, const char *src, int64_t src_stride,
                     pk_dtype src_dtype, int64_t count)
{
    int64_t dst_bytes = (int64_t)pk_dtype_bytes(dst_dtype), src_bytes = (int64_t)pk_dtype_bytes(src_dtype);
    if (src_dtype == dst_dtype) {
        if (dst_stride == 1 && src_stride == 1) {
            memmove(dst, src, (size_t)(count * dst_bytes)); /* src may be dst itself */
            return;
        }
        for (int64_t i = 0; i < count; i++)
            memmove(dst + i * dst_stride * dst_bytes, src + i * src_stride * src_bytes, (size_t)dst_bytes);
        return;
    }
    for (int64_t at = 0; at < count; at += CHUNK) {
        float values[CHUNK];
        int64_t some = pk_min(count - at, CHUNK);
        const char *from = src + at * src_stride * src_bytes;
        char *to = dst + at * dst_stride * dst_bytes;
        if (src_stride == 1)
            pk_cpu_row_to_f32(values, from, src_dtype, some);
        else
            for (int64_t i = 0; i < some; i++)
                pk_cpu_row_to_f32(values + i, from + i * src_stride * src_bytes, src_dtype, 1);
        if (dst_stride == 1)
            pk_cpu_row_from_f32(to, dst_dtype, values, some);
        else
            for (int64_t i = 0; i < some; i++)
                pk_cpu_row_from_f32(to + i * dst_stride * dst_bytes, dst_dtype, values + i, 1);
    }
}

/* Fuses dimensions that follow each other in both tensors, so that a contiguous pair is one row. */
static int fuse(const pk_view *src, const pk_view *dst, int64_t *shape, int64_t *src_stride, int64_t *dst_stride)
{
    int count = 0;
    for (int i = 0; i < src->ndim; i++) {
        if (src->shape[i] == 1) continue;
        int last = count - 1;
        if (count && src_stride[last] == src->stride[i] * src->shape[i] &&
            dst_stride[last] == dst->stride[i] * src->shape[i]) {
            shape[last] *= src->shape[i];
        } else {
            last = count++;
            shape[last] = src->shape[i];
        }
        src_stride[last] = src->stride[i];
        dst_stride[last] = dst->stride[i];
    }
    return count;
}

pk_status pk_cpu_copy(pk_device device, const pk_copy_args *args, pk_stream stream, pk_error *err)
{
    (void)device, (void)stream, (void)err;
    int64_t shape[PK_MAX_DIMS] = {1}, src_stride[PK_MAX_DIMS] = {1}, dst_stride[PK_MAX_DIMS] = {1};
    int ndim = fuse(&args->src, &args->dst, shape, src_stride, dst_stride);
    if (ndim == 0) ndim = 1;
    int64_t num_rows = 1;
    for (int i = 0; i < ndim - 1; i++) num_rows *= shape[i];
    int64_t src_bytes = (int64_t)pk_dtype_bytes(args->src.dtype), dst_bytes = (int64_t)pk_dtype_bytes(args->dst.dtype);

#pragma omp parallel for schedule(static) if (num_rows > 1 && num_rows * shape[ndim - 1] > PK_CPU_PARALLEL)
    for (int64_t row = 0; row < num_rows; row++) {
        int64_t src_at = 0, dst_at = 0, rest = row;
        for (int i = ndim - 2; i >= 0; i--) {
            src_at += rest % shape[i] * src_stride[i];
            dst_at += rest % shape[i] * dst_stride[i];
            rest /= shape[i];
        }
        copy_row((char *)args->dst.data + dst_at * dst_bytes, dst_stride[ndim - 1], args->dst.dtype,
                 (const char *)args->src.data + src_at * src_bytes, src_stride[ndim - 1], args->src.dtype,
                 shape[ndim - 1]);
    }
    return PK_OK;
}
