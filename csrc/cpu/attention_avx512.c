/* attention_avx512.c - see attention_kernel.inc */
#ifdef __AVX512F__
#define PK_ATTENTION_KERNEL pk_attention_avx512
#include "cpu/attention_kernel.inc"
#endif
