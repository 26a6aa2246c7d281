/* attention_amx.c - see attention_kernel.inc */
#if defined(__AMX_BF16__) || defined(__AMXBF16__) /* GCC, and Clang 14 */
#define PK_ATTENTION_KERNEL pk_attention_amx
#define IN_PAIRS 1
#define IN_TILES
#define BLOCK_ROWS 16
#include "cpu/attention_kernel.inc"
#endif
