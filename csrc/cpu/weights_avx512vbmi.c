/* weights_avx512vbmi.c - the kernels of weights.inc for AVX-512 with AVX512_VBMI, whose tables have 128 bytes, and
 * AVX512_BF16, which rounds. */
#if defined(__AVX512VBMI__) && defined(__AVX512BF16__)
#define PK_WEIGHTS pk_weights_avx512vbmi
#include "cpu/weights.inc"
#endif
