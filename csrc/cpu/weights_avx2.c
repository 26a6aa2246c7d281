/* weights_avx2.c - the kernels of weights.inc for AVX2 with FMA and F16C */
#ifdef __AVX2__
#define PK_WEIGHTS pk_weights_avx2
#include "cpu/weights.inc"
#endif
