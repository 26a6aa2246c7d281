/* attention.h - arguments that several functions of attention take. */
#ifndef PK_PY_ATTENTION_H
#define PK_PY_ATTENTION_H

#include "py/call.h"
#include "ops/attention.h"

/* window_size: a pair of ints. */
void py_call_window(py_call *call, int parameter, pk_attention_call *request);
/* softmax_scale: a number, kept in `scale`, or NULL for None. */
const double *py_call_softmax_scale(py_call *call, int parameter, double *scale);
/* num_splits, plan and past_is_constant, which follow one another. */
void py_call_split(py_call *call, int parameter, pk_attention_call *request);

#endif
