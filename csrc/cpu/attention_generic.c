/* attention_generic.c - see attention_kernel.inc */
#define PK_ATTENTION_KERNEL pk_attention_generic
#include "cpu/attention_kernel.inc"
