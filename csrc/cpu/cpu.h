/* cpu.h - what the files of the CPU backend share: the entries of its table. */
#ifndef PK_CPU_H
#define PK_CPU_H

#include "pk.h"

/* --- convert.c: rows of a float dtype (fp8 too) to and from fp32 */
void pk_cpu_row_to_f32(float *dst, const void *src, pk_dtype dtype, int64_t count);
void pk_cpu_row_from_f32(void *dst, pk_dtype dtype, const float *src, int64_t count);
/* One token's row of one head into the cache: copied, or src / scale rounded to fp8. */
void pk_cpu_store_row(void *dst, pk_dtype cache_dtype, const void *src, pk_dtype dtype, int64_t head_dim, float scale);

#endif
