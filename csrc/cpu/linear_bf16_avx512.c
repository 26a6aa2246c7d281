/* linear_bf16_avx512.c - the kernel of linear.inc for bf16 on both sides with AVX-512: no row of x is converted before. */
#ifdef __AVX512F__
#define PK_DOT pk_dot_bf16_avx512
#define BF16_PAIRS
#include "cpu/linear.inc"
#endif
