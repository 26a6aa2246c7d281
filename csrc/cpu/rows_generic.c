/* rows_generic.c - see rows.inc */
#define PK_ROWS pk_rows_generic
#include "cpu/rows.inc"
