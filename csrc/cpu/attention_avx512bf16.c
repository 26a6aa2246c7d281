/* attention_avx512bf16.c - see attention_kernel.inc */
#ifdef __AVX512BF16__
#define PK_ATTENTION_KERNEL pk_attention_avx512bf16
#define IN_PAIRS 1
#include "cpu/attention_kernel.inc"
#endif
