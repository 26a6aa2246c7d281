/* blas.h - the libraries that `linear` may use for many rows: blas.c (any sgemm) and onednn.c. */
#ifndef PK_CPU_BLAS_H
#define PK_CPU_BLAS_H

#include "cpu/linear.h"

/* True where an sgemm is loaded in this process; looks again until one is. */
bool pk_cpu_find_sgemm(void);
const char *pk_cpu_sgemm_name(void);
/* Around calls of pk_dot_sgemm: the BLAS uses one thread inside each of ours. */
void pk_cpu_sgemm_begin(void);
void pk_cpu_sgemm_end(void);
/* A pk_dot_kernel; needs `scratch` for weights that are not fp32. */
void pk_dot_sgemm(const pk_dot_args *args);

/* "oneDNN 3.9.0 (path)", or NULL where it is not installed; loads it. */
const char *pk_cpu_onednn_name(void);
/* The whole operation. False where oneDNN cannot do it; then nothing is written. */
bool pk_cpu_onednn_linear(const pk_linear_args *args);

#endif
