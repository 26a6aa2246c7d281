/* linear_avx2.c - the kernel of linear.inc for AVX2 with FMA and F16C */
#ifdef __AVX2__
#define PK_DOT pk_dot_avx2
#include "cpu/linear.inc"
#endif
