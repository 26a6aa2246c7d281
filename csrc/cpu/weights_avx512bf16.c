/* weights_avx512bf16.c - the kernels of weights.inc for AVX-512 with AVX512_BF16, which rounds to bf16 */
#ifdef __AVX512BF16__
#define PK_WEIGHTS pk_weights_avx512bf16
#include "cpu/weights.inc"
#endif
