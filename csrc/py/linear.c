/* linear.c - linear and its algorithms, for Python: bind, make views, call. The rules about shapes are in
 * csrc/ops/linear.c. */
#include "py/call.h"
#include "py/docs.h"
#include "ops/linear.h"

#include <string.h>

const char py_linear_doc[] = PyDoc_STR(
    "linear($module, x, weight, bias=None, *, gate_up=None, rms_eps=None, add_to_out=False, weight_is_constant=False, "
    "out=None, stream=None)\n--\n\n"
    "out = x @ weight.T + bias, accumulated in float32.\n"
    "\n"
    "Args:\n"
    "    x: [num_rows, in_features] float32, float16 or bfloat16.\n"
    "    weight: [out_features, in_features] of x's dtype.\n"
    "    bias: [out_features] of x's dtype.\n"
    "    gate_up: [num_rows, out_features] of x's dtype, memory for the product, without a bias: the result is then\n"
    "        silu_and_mul(product). What gate_up holds afterwards is undefined: few rows on a GPU do not need it,\n"
    "        because one kernel does all of it.\n"
    "    rms_eps: with gate_up, the rows of the product are divided by sqrt(mean(x^2) + rms_eps) of their row of x\n"
    "        first: the norm of a model whose weight is part of this one (see scale_columns). The product itself must\n"
    "        fit x's dtype.\n"
    "    add_to_out: True adds to a given out, before it is rounded.\n"
    "    weight_is_constant: True promises that nothing which is queued on the stream and not done yet writes the\n"
    "        weights. Few rows on a Hopper GPU then fetch them while the kernel before still runs. The bits are the\n"
    "        same; a broken promise may read old weights.\n" PY_DOC_OUT PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_rows, out_features] of x's dtype (a given one may be float32); with gate_up [num_rows,\n"
    "        out_features / 2].\n" PY_DOC_RAISES);
PyObject *py_linear(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { X, WEIGHT, BIAS, GATE_UP, RMS_EPS, ADD_TO_OUT, WEIGHT_IS_CONSTANT, OUT, STREAM };
    py_call call;
    py_output out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_linear, STREAM, args, nargs, kwnames) < 0) return NULL;
    const pk_view *x = py_call_tensor(&call, X), *weight = py_call_tensor(&call, WEIGHT);
    const double rms_eps = py_call_double(&call, RMS_EPS, 0);
    pk_linear_options options = {0};
    options.bias = py_call_optional(&call, BIAS);
    options.gate_up = py_call_optional_writable(&call, GATE_UP);
    if (call.given[RMS_EPS] && call.given[RMS_EPS] != Py_None) options.rms_eps = &rms_eps;
    options.adds_to_out = py_call_bool(&call, ADD_TO_OUT, false);
    options.weight_is_constant = py_call_bool(&call, WEIGHT_IS_CONSTANT, false);
    py_call_ensure_blas(&call, x);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_linear(x, weight, &options, &out.base, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}

/* Its bytes, or call->has_failed. */
static void read_algorithm(py_call *call, int index, pk_linear_algorithm *algorithm)
{
    char *bytes;
    Py_ssize_t size;
    if (call->has_failed) return;
    call->has_failed = !PyBytes_Check(call->given[index]);
    if (call->has_failed)
        PyErr_Format(PyExc_TypeError, "%s: must be bytes, not %R", call->signature->texts[index], call->given[index]);
    else
        call->has_failed = PyBytes_AsStringAndSize(call->given[index], &bytes, &size) < 0;
    if (!call->has_failed && size != sizeof *algorithm) {
        PyErr_Format(PyExc_ValueError, "%s: has %zd bytes but must have %zu", call->signature->texts[index], size,
                     sizeof *algorithm);
        call->has_failed = true;
    }
    if (!call->has_failed) memcpy(algorithm, bytes, sizeof *algorithm);
}

const char py_linear_algorithms_doc[] = PyDoc_STR(
    "linear_algorithms($module, x, weight, *, near=None, out)\n--\n\n"
    "Lists algorithms by which cuBLASLt could compute linear(x, weight, out=out). Nothing is computed. See\n"
    "tune_linear.\n"
    "\n"
    "Args:\n"
    "    x, weight, out: those of linear.\n"
    "    near: None: cuBLASLt's favourites are listed, the first one first. An algorithm: its variants are listed,\n"
    "        which compute the same tiles in another order, or in other clusters; most are no favourites.\n"
    "\n"
    "Returns:\n"
    "    (library, algorithms). `library` names the GPU and the version of cuBLASLt; the algorithms are good for\n"
    "        these alone. Each is bytes for use_linear_algorithm. The list is empty where a kernel of pagedkv computes\n"
    "        the product.\n" PY_DOC_RAISES
    "        A `near` that cuBLASLt does not accept for these arguments is a ValueError. The CPU has no algorithms:\n"
    "        NotImplementedError.\n");
PyObject *py_linear_algorithms(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { X, WEIGHT, NEAR, OUT };
    py_call call;
    pk_linear_choices choices;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_linear_algorithms, -1, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *x = py_call_tensor(&call, X), *weight = py_call_tensor(&call, WEIGHT);
    const pk_view *out = py_call_tensor(&call, OUT);
    pk_linear_algorithm near;
    bool has_near = call.given[NEAR] && call.given[NEAR] != Py_None;
    if (has_near) read_algorithm(&call, NEAR, &near);
    PY_CALL_RUN(&call, pk_linear_algorithms(x, weight, out, has_near ? &near : NULL, &choices, &call.err));
    if (call.has_failed || call.status != PK_OK) return py_call_end(&call, NULL);
    PyObject *list = PyList_New(choices.count);
    for (int i = 0; list && i < choices.count; i++) {
        const char *bytes = (const char *)choices.algorithms[i].bytes;
        PyObject *item = PyBytes_FromStringAndSize(bytes, sizeof(pk_linear_algorithm));
        if (!item || PyList_SetItem(list, i, item) < 0) Py_CLEAR(list);
    }
    return py_call_end(&call, list ? Py_BuildValue("(sN)", choices.library, list) : NULL);
}

const char py_use_linear_algorithm_doc[] = PyDoc_STR(
    "use_linear_algorithm($module, x, weight, algorithm, *, out)\n--\n\n"
    "Makes later calls like linear(x, weight, out=out) use this algorithm.\n"
    "\n"
    "Calls of the same shapes, strides, dtypes and alignment are like it, with any bias; where add_to_out is there, too,\n"
    "those that come later for the first time. So are calls of fewer rows, but more than half as many, that have no\n"
    "algorithm of their own and come later for the first time.\n"
    "\n"
    "Args:\n"
    "    x, weight, out: those of linear.\n"
    "    algorithm: bytes, from linear_algorithms.\n" PY_DOC_RAISES
    "        An algorithm that cuBLASLt does not accept for these arguments is a ValueError.\n");
PyObject *py_use_linear_algorithm(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { X, WEIGHT, ALGORITHM, OUT };
    py_call call;
    pk_linear_algorithm algorithm;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_use_linear_algorithm, -1, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *x = py_call_tensor(&call, X), *weight = py_call_tensor(&call, WEIGHT);
    const pk_view *out = py_call_tensor(&call, OUT);
    read_algorithm(&call, ALGORITHM, &algorithm);
    PY_CALL_RUN(&call, pk_use_linear_algorithm(x, weight, out, &algorithm, &call.err));
    return py_call_end(&call, call.has_failed ? NULL : Py_NewRef(Py_None));
}
