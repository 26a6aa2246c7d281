/* rows_avx2.c - see rows.inc */
#ifdef __AVX2__
#define PK_ROWS pk_rows_avx2
#include "cpu/rows.inc"
#endif
