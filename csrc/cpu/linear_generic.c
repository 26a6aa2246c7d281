/* linear_generic.c - the kernel of linear.inc for any machine */
#define PK_DOT pk_dot_generic
#include "cpu/linear.inc"
