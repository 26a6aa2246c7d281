/* weights_generic.c - the kernels of weights.inc for any machine */
#define PK_WEIGHTS pk_weights_generic
#include "cpu/weights.inc"
