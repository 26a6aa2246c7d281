/* convert.c - rows of any float dtype to and from fp32 (the loops are in rows.inc), and the one writer of a row of the
 * KV cache. */
#include "cpu/rows.h"

#include <string.h>

void pk_cpu_row_to_f32(float *dst, const void *src, pk_dtype dtype, int64_t count)
{
    pk_cpu_rows()->to_f32(dst, src, dtype, count);
}

void pk_cpu_row_from_f32(void *dst, pk_dtype dtype, const float *src, int64_t count)
{
    pk_cpu_rows()->from_f32(dst, dtype, src, count);
}

void pk_cpu_store_row(void *dst, pk_dtype cache_dtype, const void *src, pk_dtype dtype, int64_t head_dim, float scale)
{
    if (cache_dtype == dtype) {
        memcpy(dst, src, (size_t)head_dim * pk_dtype_bytes(dtype));
        return;
    }
    enum { CHUNK = 64 }; /* cache_dtype is fp8 */
    for (int64_t at = 0; at < head_dim; at += CHUNK) {
        float values[CHUNK];
        int64_t count = pk_min(head_dim - at, CHUNK);
        pk_cpu_row_to_f32(values, (const char *)src + (size_t)at * pk_dtype_bytes(dtype), dtype, count);
        for (int64_t i = 0; i < count; i++) values[i] /= scale;
        pk_cpu_row_from_f32((uint8_t *)dst + at, cache_dtype, values, count);
    }
}
