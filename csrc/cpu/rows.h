/* rows.h - the row kernels that exist once per instruction set (rows.inc); pk_cpu_rows() picks this machine's. */
#ifndef PK_CPU_ROWS_H
#define PK_CPU_ROWS_H

#include "cpu/cpu.h"

typedef struct {
    void (*to_f32)(float *dst, const void *src, pk_dtype dtype, int64_t count);
    void (*from_f32)(void *dst, pk_dtype dtype, const float *src, int64_t count);
    void (*silu)(float *x, int64_t count);
} pk_row_kernels;

extern const pk_row_kernels pk_rows_generic, pk_rows_avx2, pk_rows_avx512;

static inline const pk_row_kernels *pk_cpu_rows(void)
{
#ifdef __x86_64__
    if (pk_cpu_isa_level() >= PK_ISA_AVX512) return &pk_rows_avx512;
    if (pk_cpu_isa_level() >= PK_ISA_AVX2) return &pk_rows_avx2;
#endif
    return &pk_rows_generic;
}

#endif
