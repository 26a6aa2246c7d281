/* linear_avx512.c - the kernel of linear.inc for AVX-512 (F, BW, DQ, VL) */
#ifdef __AVX512F__
#define PK_DOT pk_dot_avx512
#include "cpu/linear.inc"
#endif
