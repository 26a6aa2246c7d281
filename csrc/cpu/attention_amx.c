/* attention_amx.c - see attention_kernel.inc */
#ifdef __AMX_BF16__
#define PK_ATTENTION_KERNEL pk_attention_amx
#define IN_PAIRS 1
#define IN_TILES
#define BLOCK_ROWS 16
#include "cpu/attention_kernel.inc"
#endif
