/* weights_avx512.c - the kernels of weights.inc for AVX-512 (F, BW, DQ, VL) */
#ifdef __AVX512F__
#define PK_WEIGHTS pk_weights_avx512
#include "cpu/weights.inc"
#endif
