/* weights.h - the kernels for quantised weights that exist once per instruction set (weights.inc); pk_cpu_weights() picks
 * this machine's. */
#ifndef PK_CPU_WEIGHTS_H
#define PK_CPU_WEIGHTS_H

#include "cpu/cpu.h"
#include "ops/linear.h"

/* sums[r, c] = dot(x[r], row `first + c` of the weight) in fp32 */
typedef struct {
    const pk_weight *weight;
    int64_t first, num_outputs;
    const float *x; /* [num_rows, x_stride] in fp32, of int4 in the kernels' order */
    float *sums;    /* [num_rows, sums_stride] */
    int64_t num_rows, x_stride, sums_stride;
} pk_weight_dot;

typedef struct {
    int most_rows; /* of x: up to so many, dot is faster than what decode makes of the weight, and a product with that */
    /* Of in_features elements: how many floats a row of x has in the order for int4, and writes one so. */
    int64_t (*int4_row_floats)(int64_t size);
    void (*int4_row)(float *to, const float *x, int64_t size);
    void (*dot)(const pk_weight_dot *args);
    /* Rows of the weight, `count` from `first` on, to [count, in_features] of PK_F32 or PK_BF16. */
    void (*decode)(void *to, pk_dtype dtype, const pk_weight *weight, int64_t first, int64_t count);
} pk_weight_kernels;

extern const pk_weight_kernels pk_weights_generic, pk_weights_avx2, pk_weights_avx512, pk_weights_avx512vbmi;

static inline const pk_weight_kernels *pk_cpu_weights(void)
{
#ifdef __x86_64__
    if (pk_cpu_has_avx512vbmi()) return &pk_weights_avx512vbmi;
    if (pk_cpu_isa_level() >= PK_ISA_AVX512) return &pk_weights_avx512;
    if (pk_cpu_isa_level() >= PK_ISA_AVX2) return &pk_weights_avx2;
#endif
    return &pk_weights_generic;
}

#endif
