/* linear_bf16_avx2.c - the kernel of linear.inc for bf16 on both sides with AVX2: no row of x is converted before. */
#ifdef __AVX2__
#define PK_DOT pk_dot_bf16_avx2
#define BF16_PAIRS
#include "cpu/linear.inc"
#endif
