/* dense.c - operations on rows, for Python: bind, make views, call. The rules about shapes are in csrc/ops/dense.c. */
#include "py/call.h"
#include "py/docs.h"
#include "ops/dense.h"

const char py_embedding_doc[] = PyDoc_STR(
    "embedding($module, token_ids, weight, *, out=None, stream=None)\n--\n\n"
    "out[t] = weight[token_ids[t]].\n"
    "\n"
    "Args:\n"
    "    token_ids: [num_tokens] int32 or int64.\n"
    "    weight: [vocab_size, hidden_size] float32, float16 or bfloat16.\n" PY_DOC_OUT PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_tokens, hidden_size] of weight's dtype.\n" PY_DOC_RAISES
    "        An id outside of the table is a ValueError on the CPU; CUDA writes zeros and records it for\n"
    "        check_errors().\n");
PyObject *py_embedding(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { TOKEN_IDS, WEIGHT, OUT, STREAM };
    py_call call;
    py_output out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_embedding, STREAM, args, nargs, kwnames) < 0) return NULL;
    const pk_view *token_ids = py_call_tensor(&call, TOKEN_IDS), *weight = py_call_tensor(&call, WEIGHT);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_embedding(token_ids, weight, &out.base, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}

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
PyObject *py_gather_rows(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { X, INDICES, OUT, STREAM };
    py_call call;
    py_output out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_gather_rows, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *x = py_call_tensor(&call, X), *indices = py_call_tensor(&call, INDICES);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_gather_rows(x, indices, &out.base, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}

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
PyObject *py_rms_norm(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { X, WEIGHT, EPS, RESIDUAL, OUT, STREAM };
    py_call call;
    py_output out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_rms_norm, STREAM, args, nargs, kwnames) < 0) return NULL;
    const pk_view *x = py_call_tensor(&call, X), *weight = py_call_tensor(&call, WEIGHT);
    double eps = py_call_double(&call, EPS, 1e-6);
    const pk_view *residual = py_call_optional_writable(&call, RESIDUAL);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_rms_norm(x, weight, eps, residual, &out.base, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}

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
PyObject *py_scale_columns(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { X, FACTORS, OUT, STREAM };
    py_call call;
    py_output out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_scale_columns, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *x = py_call_tensor(&call, X), *factors = py_call_tensor(&call, FACTORS);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_scale_columns(x, factors, &out.base, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}

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
PyObject *py_silu_and_mul(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { X, OUT, STREAM };
    py_call call;
    py_output out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_silu_and_mul, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *x = py_call_tensor(&call, X);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_silu_and_mul(x, &out.base, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}
