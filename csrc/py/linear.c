/* linear.c - linear and its algorithms, for Python: bind, make views, call. The rules about shapes are in
 * csrc/ops/linear.c. */
#include "py/call.h"
#include "py/docs.h"
#include "ops/linear.h"

#include <string.h>

const char py_linear_doc[] = PyDoc_STR(
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
PyObject *py_linear(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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

const char py_linear_algorithms_doc[] = PyDoc_STR(
    "linear_algorithms($module, x, weight, *, near=None, out)\n--\n\n"
    "(library, algorithms): what could compute linear(x, weight, out=out) on a GPU. `library` names the GPU and the\n"
    "version of cuBLASLt, and the algorithms, bytes for use_linear_algorithm, are good for these alone; its own\n"
    "favourite comes first. With `near`, one of them, those that compute the same tiles in another order or other\n"
    "clusters. No algorithms where own kernels answer. Nothing is computed. See tune_linear." PY_DOC_ERRORS);
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

const char py_use_linear_algorithm_doc[] = PyDoc_STR(
    "use_linear_algorithm($module, x, weight, algorithm, *, out)\n--\n\n"
    "Lets later calls like linear(x, weight, out=out) (same shapes, strides, dtypes and alignment; any bias) use one of\n"
    "linear_algorithms(x, weight, out=out); and those of fewer rows, but more than half as many, that have none of their\n"
    "own and come later for the first time. ValueError if cuBLASLt does not accept it for them." PY_DOC_ERRORS);
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
    PY_CALL_RUN(&call, pk_linear_algorithms(x, weight, out, NULL, &algorithm, &call.err));
    return py_call_end(&call, call.has_failed ? NULL : Py_NewRef(Py_None));
}
