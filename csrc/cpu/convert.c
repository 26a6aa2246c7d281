/* convert.c - rows of any float dtype to and from fp32, and the one writer of a row of the KV cache. */
#include "cpu/cpu.h"
#include "cpu/convert.h"

void pk_cpu_row_to_f32(float *dst, const void *src, pk_dtype dtype, int64_t count)
{
    const uint16_t *halves = src;
    const uint8_t *bytes = src;
    switch (dtype) {
        case PK_BF16:
            for (int64_t i = 0; i < count; i++) dst[i] = pk_bf16_to_f32(halves[i]);
            return;
        case PK_F16:
            for (int64_t i = 0; i < count; i++) dst[i] = pk_f16_to_f32(halves[i]);
            return;
        case PK_F8E4M3:
            for (int64_t i = 0; i < count; i++) dst[i] = pk_f8e4m3_to_f32(bytes[i]);
            return;
        default:
            memcpy(dst, src, (size_t)count * sizeof *dst);
    }
}

void pk_cpu_row_from_f32(void *dst, pk_dtype dtype, const float *src, int64_t count)
{
    uint16_t *halves = dst;
    uint8_t *bytes = dst;
    switch (dtype) {
        case PK_BF16:
            for (int64_t i = 0; i < count; i++) halves[i] = pk_f32_to_bf16(src[i]);
            return;
        case PK_F16:
            for (int64_t i = 0; i < count; i++) halves[i] = pk_f32_to_f16(src[i]);
            return;
        case PK_F8E4M3:
            for (int64_t i = 0; i < count; i++) bytes[i] = pk_f32_to_f8e4m3(src[i]);
            return;
        default:
            memcpy(dst, src, (size_t)count * sizeof *src);
    }
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
        int64_t count = head_dim - at < CHUNK ? head_dim - at : CHUNK;
        pk_cpu_row_to_f32(values, (const char *)src + (size_t)at * pk_dtype_bytes(dtype), dtype, count);
        for (int64_t i = 0; i < count; i++) values[i] /= scale;
        pk_cpu_row_from_f32((uint8_t *)dst + at, cache_dtype, values, count);
    }
}
