/* sample_linear.c - sample_linear, for Python: bind, make views, call. The rules about shapes are in
 * csrc/ops/sample_linear.c. */
#include "py/call.h"
#include "py/docs.h"
#include "ops/sample_linear.h"

const char py_sample_linear_doc[] = PyDoc_STR(
    "sample_linear($module, x, weight, temperatures, seeds, positions, *, logits, weight_is_constant=False, out=None, "
    "stream=None)\n--\n\n"
    "The tokens that sample takes of the logits x @ weight.T, accumulated in float32: the head of a model and the\n"
    "draw.\n"
    "\n"
    "It adds in an order of its own, so a near tie may fall the other way than with linear and sample.\n"
    "\n"
    "Args:\n"
    "    x: [num_rows, in_features] float32, float16 or bfloat16.\n"
    "    weight: [vocab_size, in_features] of x's dtype.\n"
    "    temperatures, seeds, positions: one number per row, see sample.\n"
    "    logits: [num_rows, vocab_size] float32, memory for the product. What it holds afterwards is undefined: where\n"
    "        one kernel of a GPU does all of it, no logits are ever in memory.\n"
    "    weight_is_constant: see linear.\n" PY_DOC_OUT PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_rows] int32.\n" PY_DOC_RAISES
    "        What sample refuses is refused as there: by name on the CPU, with -1 and check_errors() on CUDA.\n");
PyObject *py_sample_linear(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { X, WEIGHT, TEMPERATURES, SEEDS, POSITIONS, LOGITS, WEIGHT_IS_CONSTANT, OUT, STREAM };
    py_call call;
    py_output out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_sample_linear, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *x = py_call_tensor(&call, X), *weight = py_call_tensor(&call, WEIGHT);
    pk_sample_call request = {.out = &out.base};
    request.temperatures = py_call_tensor(&call, TEMPERATURES);
    request.seeds = py_call_tensor(&call, SEEDS);
    request.positions = py_call_tensor(&call, POSITIONS);
    request.logits = py_call_writable(&call, LOGITS);
    const bool weight_is_constant = py_call_bool(&call, WEIGHT_IS_CONSTANT, false);
    py_call_ensure_blas(&call, x);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_sample_linear(x, weight, weight_is_constant, &request, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}
