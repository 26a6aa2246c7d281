/* ops_dense.c - the dense operations of a model, for Python: bind, make views, call. No rule about shapes is here:
 * those are in csrc/ops_dense.c and ops_linear.c. */
#include "py/call.h"
#include "py/docs.h"

#include <string.h>

PyDoc_STRVAR(
    embedding_doc,
    "embedding($module, token_ids, weight, *, out=None, stream=None)\n--\n\n"
    "out[t] = weight[token_ids[t]].\n\n"
    "token_ids: [num_tokens] int32 or int64. weight: [vocab_size, hidden_size] float32, float16 or bfloat16.\n"
    "Returns out, [num_tokens, hidden_size] of weight's dtype.\n" PY_DOC_OUT PY_DOC_STREAM PY_DOC_ERRORS
    "An id outside of the table raises ValueError on the CPU before anything is written; CUDA writes zeros and\n"
    "records it for check_errors().");
static PyObject *py_embedding(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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

PyDoc_STRVAR(
    gather_rows_doc,
    "gather_rows($module, x, indices, *, out=None, stream=None)\n--\n\n"
    "out[i] = x[indices[i]]: for example the last token of every sequence before the LM head.\n\n"
    "x: [num_rows, row_size] float32, float16 or bfloat16. indices: [num_indices] int32 or int64.\n"
    "Returns out, [num_indices, row_size] of x's dtype.\n" PY_DOC_OUT PY_DOC_STREAM PY_DOC_ERRORS
    "An index out of range raises ValueError on the CPU before anything is written; CUDA writes zeros and records it\n"
    "for check_errors().");
static PyObject *py_gather_rows(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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

PyDoc_STRVAR(
    rms_norm_doc,
    "rms_norm($module, x, weight, eps=1e-06, *, residual=None, out=None, stream=None)\n--\n\n"
    "out = x / sqrt(mean(x^2) + eps) * weight over the last dimension, in float32 (Zhang and Sennrich 2019).\n\n"
    "x: [num_rows, row_size] float32, float16 or bfloat16. weight: [row_size] of the same dtype.\n"
    "residual: like x, updated in place: residual += x first, rounded to its dtype, and the sum is what is\n"
    "normalised. x itself is never changed, unless it is given as out: out may be x.\n" PY_DOC_OUT PY_DOC_STREAM
        PY_DOC_ERRORS);
static PyObject *py_rms_norm(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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

PyDoc_STRVAR(
    scale_columns_doc,
    "scale_columns($module, x, factors, *, out=None, stream=None)\n--\n\n"
    "out = x * factors: every column by its factor, rounded once. It folds the weight of a norm into that of the\n"
    "product behind it, because linear(x * factors, weight) is linear(x, scale_columns(weight, factors)).\n\n"
    "x: [num_rows, row_size] float32, float16 or bfloat16. factors: [row_size] of the same dtype. out may be x.\n" PY_DOC_OUT
        PY_DOC_STREAM PY_DOC_ERRORS);
static PyObject *py_scale_columns(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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

PyDoc_STRVAR(
    linear_doc,
    "linear($module, x, weight, bias=None, *, gate_up=None, rms_eps=None, add_to_out=False, weight_is_constant=False, "
    "out=None, stream=None)\n--\n\n"
    "out = x @ weight.T + bias, accumulated in float32.\n\n"
    "x: [num_rows, in_features] float32, float16 or bfloat16. weight: [out_features, in_features], bias:\n"
    "[out_features], of x's dtype. Returns out, [num_rows, out_features] of x's dtype (a given one: or float32).\n"
    "With gate_up, [num_rows, out_features] of x's dtype, which is memory for the product, the result is\n"
    "silu_and_mul(product), [num_rows, out_features / 2]. What gate_up holds afterwards is undefined: few rows on a GPU\n"
    "do not need it, because one kernel does all of it. With rms_eps too, the rows of the product are divided by\n"
    "sqrt(mean(x^2) + rms_eps) of their row of x first: the norm of a model whose weight is part of this one (see\n"
    "scale_columns). The product itself must fit x's dtype; without a bias.\n"
    "add_to_out=True adds to a given out, before it is rounded.\n"
    "weight_is_constant=True promises that nothing which is queued on the stream and not done yet writes the weights.\n"
    "Few rows on a Hopper GPU then fetch them while the kernel before still runs. The bits are the same; a broken\n"
    "promise may read old weights.\n" PY_DOC_OUT PY_DOC_STREAM PY_DOC_ERRORS);
static PyObject *py_linear(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { X, WEIGHT, BIAS, GATE_UP, RMS_EPS, ADD_TO_OUT, WEIGHT_IS_CONSTANT, OUT, STREAM };
    py_call call;
    py_output out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_linear, STREAM, args, nargs, kwnames) < 0) return NULL;
    const pk_view *x = py_call_tensor(&call, X), *weight = py_call_tensor(&call, WEIGHT);
    const double rms_eps = py_call_double(&call, RMS_EPS, 0);
    const pk_linear_options options = {
        .bias = py_call_optional(&call, BIAS),
        .gate_up = py_call_optional_writable(&call, GATE_UP),
        .rms_eps = call.given[RMS_EPS] && call.given[RMS_EPS] != Py_None ? &rms_eps : NULL,
        .adds_to_out = py_call_bool(&call, ADD_TO_OUT, false),
        .weight_is_constant = py_call_bool(&call, WEIGHT_IS_CONSTANT, false),
    };
    py_call_ensure_blas(&call, x);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_linear(x, weight, &options, &out.base, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}

/* Whether there is one; or call->has_failed. */
static bool read_algorithm(py_call *call, int index, pk_linear_algorithm *algorithm)
{
    char *bytes;
    Py_ssize_t size;
    if (call->has_failed || !call->given[index] || call->given[index] == Py_None) return false;
    call->has_failed = PyBytes_AsStringAndSize(call->given[index], &bytes, &size) < 0;
    if (!call->has_failed && size != sizeof *algorithm) {
        PyErr_Format(PyExc_ValueError, "%s: has %zd bytes but must have %zu", call->signature->texts[index], size,
                     sizeof *algorithm);
        call->has_failed = true;
    }
    if (!call->has_failed) memcpy(algorithm, bytes, sizeof *algorithm);
    return !call->has_failed;
}

PyDoc_STRVAR(
    linear_algorithms_doc,
    "linear_algorithms($module, x, weight, *, near=None, out)\n--\n\n"
    "(library, algorithms): what could compute linear(x, weight, out=out) on a GPU. `library` names the GPU and the\n"
    "version of cuBLASLt, and the algorithms, bytes for use_linear_algorithm, are good for these alone; its own\n"
    "favourite comes first. With `near`, one of them, those that compute the same tiles in another order or other\n"
    "clusters. No algorithms where own kernels answer. Nothing is computed. See tune_linear." PY_DOC_ERRORS);
static PyObject *py_linear_algorithms(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { X, WEIGHT, NEAR, OUT };
    py_call call;
    pk_linear_choices choices;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_linear_algorithms, -1, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *x = py_call_tensor(&call, X), *weight = py_call_tensor(&call, WEIGHT);
    const pk_view *out = py_call_tensor(&call, OUT);
    pk_linear_algorithm near;
    bool has_near = read_algorithm(&call, NEAR, &near);
    PY_CALL_RUN(&call, pk_linear_algorithms(x, weight, out, &choices, has_near ? &near : NULL, &call.err));
    if (call.has_failed || call.status != PK_OK) return py_call_end(&call, NULL);
    PyObject *list = PyList_New(choices.count);
    for (int i = 0; list && i < choices.count; i++) {
        const char *bytes = (const char *)choices.algorithms[i].bytes;
        PyObject *item = PyBytes_FromStringAndSize(bytes, sizeof(pk_linear_algorithm));
        if (!item || PyList_SetItem(list, i, item) < 0) Py_CLEAR(list);
    }
    return py_call_end(&call, list ? Py_BuildValue("(sN)", choices.library, list) : NULL);
}

PyDoc_STRVAR(
    use_linear_algorithm_doc,
    "use_linear_algorithm($module, x, weight, algorithm, *, out)\n--\n\n"
    "Lets later calls like linear(x, weight, out=out) (same shapes, strides, dtypes and alignment; any bias) use one of\n"
    "linear_algorithms(x, weight, out=out); and those of fewer rows, but more than half as many, that have none of their\n"
    "own and come later for the first time. ValueError if cuBLASLt does not accept it for them." PY_DOC_ERRORS);
static PyObject *py_use_linear_algorithm(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { X, WEIGHT, ALGORITHM, OUT };
    py_call call;
    pk_linear_algorithm algorithm;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_use_linear_algorithm, -1, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *x = py_call_tensor(&call, X), *weight = py_call_tensor(&call, WEIGHT);
    const pk_view *out = py_call_tensor(&call, OUT);
    read_algorithm(&call, ALGORITHM, &algorithm);
    PY_CALL_RUN(&call, pk_linear_algorithms(x, weight, out, NULL, &algorithm, &call.err));
    return py_call_end(&call, call.has_failed ? NULL : Py_NewRef(Py_None));
}

PyDoc_STRVAR(
    silu_and_mul_doc,
    "silu_and_mul($module, x, *, out=None, stream=None)\n--\n\n"
    "out = silu(x[:, :n]) * x[:, n:] with silu(a) = a / (1 + exp(-a)): gate and up projection side by side (SwiGLU,\n"
    "Shazeer 2020).\n\n"
    "x: [num_rows, 2 * n] float32, float16 or bfloat16. Returns out, [num_rows, n] of x's dtype.\n" PY_DOC_OUT
        PY_DOC_STREAM PY_DOC_ERRORS);
static PyObject *py_silu_and_mul(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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

PyDoc_STRVAR(
    take_sampled_doc,
    "take_sampled($module, token_ids, sampled, *, stream=None)\n--\n\n"
    "Puts tokens that the host does not know yet in their places: where token_ids[t] is negative it becomes\n"
    "sampled[-1 - token_ids[t]], in place.\n\n"
    "token_ids: [num_tokens] int32. sampled: [num_rows] int32, what `sample` wrote; where it is negative (no token could\n"
    "be sampled) 0 is taken.\n" PY_DOC_STREAM PY_DOC_ERRORS
    "A row beyond the last: the CPU raises ValueError before anything is written; CUDA takes 0 and records it for\n"
    "check_errors().");
static PyObject *py_take_sampled(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { TOKEN_IDS, SAMPLED, STREAM };
    py_call call;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_take_sampled, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *token_ids = py_call_writable(&call, TOKEN_IDS), *sampled = py_call_tensor(&call, SAMPLED);
    PY_CALL_RUN(&call, pk_take_sampled(token_ids, sampled, call.stream, &call.err));
    return py_call_end(&call, Py_NewRef(Py_None));
}

PyMethodDef py_dense_functions[] = {
    PY_METHOD("embedding", py_embedding, embedding_doc),
    PY_METHOD("gather_rows", py_gather_rows, gather_rows_doc),
    PY_METHOD("rms_norm", py_rms_norm, rms_norm_doc),
    PY_METHOD("scale_columns", py_scale_columns, scale_columns_doc),
    PY_METHOD("linear", py_linear, linear_doc),
    PY_METHOD("linear_algorithms", py_linear_algorithms, linear_algorithms_doc),
    PY_METHOD("use_linear_algorithm", py_use_linear_algorithm, use_linear_algorithm_doc),
    PY_METHOD("silu_and_mul", py_silu_and_mul, silu_and_mul_doc),
    PY_METHOD("take_sampled", py_take_sampled, take_sampled_doc),
    {NULL, NULL, 0, NULL},
};
