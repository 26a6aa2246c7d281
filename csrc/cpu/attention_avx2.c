/* attention_avx2.c - see attention_kernel.inc */
#ifdef __AVX2__
#define PK_ATTENTION_KERNEL pk_attention_avx2
#include "cpu/attention_kernel.inc"
#endif
