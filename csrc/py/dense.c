/* dense.c - operations on rows for Python: docstrings and tables of parameters. The rules are in csrc/ops/dense.c. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/dense.h"

#define CALL pk_gather_call
const char py_embedding_doc[] = PyDoc_STR(
    "embedding($module, token_ids, weight, *, first_row=None, out=None, stream=None)\n--\n\n"
    "out[t] = weight[token_ids[t]].\n"
    "\n"
    "Args:\n"
    "    token_ids: [num_tokens] int32 or int64.\n"
    "    weight: [vocab_size, hidden_size] float32, float16 or bfloat16.\n"
    "    first_row: weight has but some rows of a table, from this one on: out[t] = weight[token_ids[t] - first_row].\n"
    "        An id of other rows gives zeros, so that the sum over all parts of the table is the whole one's row.\n" PY_DOC_OUT
        PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_tokens, hidden_size] of weight's dtype.\n" PY_DOC_RAISES
    "        An id outside of the table (with first_row only one below 0) is a ValueError on the CPU; CUDA writes zeros\n"
    "        and records it for check_errors().\n");
PY_OP(embedding, P_AS(TENSOR, token_ids, ids), P_AS(TENSOR, weight, table), P(INT, first_row), P(OUTPUT, out));

const char py_gather_rows_doc[] = PyDoc_STR(
    "gather_rows($module, x, indices, *, out=None, stream=None)\n--\n\n"
    "out[i] = x[indices[i]]: for example the last token of every sequence before the LM head.\n"
    "\n"
    "Args:\n"
    "    x: [num_rows, row_size] float32, float16 or bfloat16.\n"
    "    indices: [num_indices] int32 or int64.\n" PY_DOC_OUT PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_indices, row_size] of x's dtype.\n" PY_DOC_RAISES
    "        An index out of range is a ValueError on the CPU; CUDA writes zeros and records it for check_errors().\n");
PY_OP(gather_rows, P_AS(TENSOR, x, table), P_AS(TENSOR, indices, ids), P(OUTPUT, out));

#undef CALL
#define CALL pk_rms_norm_call
const char py_rms_norm_doc[] = PyDoc_STR(
    "rms_norm($module, x, weight, eps=1e-06, *, residual=None, out=None, stream=None)\n--\n\n"
    "out = x / sqrt(mean(x^2) + eps) * weight over the last dimension (Zhang and Sennrich 2019). The quotient is\n"
    "computed in float32 and rounded to x's dtype before the product, as transformers does.\n"
    "\n"
    "Args:\n"
    "    x: [num_rows, row_size] float32, float16 or bfloat16. It is never changed, unless it is given as out.\n"
    "    weight: [row_size] of the same dtype.\n"
    "    eps: what keeps a row of zeros from a division by zero.\n"
    "    residual: like x, updated in place: residual += x first, rounded to its dtype, and the sum is what is\n"
    "        normalised.\n" PY_DOC_OUT PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_rows, row_size] of x's dtype.\n" PY_DOC_RAISES);
PY_OP(rms_norm, P(TENSOR, x), P(TENSOR, weight), P(DOUBLE, eps), P(OPTIONAL_WRITTEN, residual), P(OUTPUT, out));

const char py_scale_columns_doc[] = PyDoc_STR(
    "scale_columns($module, x, factors, *, out=None, stream=None)\n--\n\n"
    "out = x * factors: every column by its factor, rounded once.\n"
    "\n"
    "It folds the weight of a norm into that of the product after it, because linear(x * factors, weight) is\n"
    "linear(x, scale_columns(weight, factors)).\n"
    "\n"
    "Args:\n"
    "    x: [num_rows, row_size] float32, float16 or bfloat16. It may be out.\n"
    "    factors: [row_size] of the same dtype.\n" PY_DOC_OUT PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_rows, row_size] of x's dtype.\n" PY_DOC_RAISES);
PY_OP(scale_columns, P(TENSOR, x), P_AS(TENSOR, factors, weight), P(OUTPUT, out));

#undef CALL
#define CALL pk_silu_call
const char py_silu_and_mul_doc[] = PyDoc_STR(
    "silu_and_mul($module, x, *, out=None, stream=None)\n--\n\n"
    "out = silu(x[:, :n]) * x[:, n:] with silu(a) = a / (1 + exp(-a)): gate and up projection side by side (SwiGLU,\n"
    "Shazeer 2020). silu is rounded to x's dtype before the product.\n"
    "\n"
    "Args:\n"
    "    x: [num_rows, 2 * n] float32, float16 or bfloat16.\n" PY_DOC_OUT PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_rows, n] of x's dtype.\n" PY_DOC_RAISES);
PY_OP(silu_and_mul, P(TENSOR, x), P(OUTPUT, out));
