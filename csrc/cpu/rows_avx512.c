/* rows_avx512.c - see rows.inc */
#ifdef __AVX512F__
#define PK_ROWS pk_rows_avx512
#include "cpu/rows.inc"
#endif
