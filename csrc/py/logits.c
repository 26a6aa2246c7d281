/* logits.c - biases and masks of logits, for Python: bind, make views, call. */
#include "py/call.h"
#include "py/docs.h"
#include "ops/logits.h"

const char py_bias_logits_doc[] = PyDoc_STR(
    "bias_logits($module, logits, rows, token_ids, values, *, stream=None)\n--\n\n"
    "logits[rows[i], token_ids[i]] += values[i], in place. -inf forbids a token.\n"
    "\n"
    "Args:\n"
    "    logits: [num_rows, vocab_size] float32.\n"
    "    rows, token_ids: [n] int32. A pair that is there twice gets both values; on CUDA their order is not fixed.\n"
    "    values: [n] float32.\n" PY_DOC_STREAM PY_DOC_RAISES
    "        A row or a token outside of logits is a ValueError on the CPU; CUDA leaves it out and records it for\n"
    "        check_errors().\n");
PyObject *py_bias_logits(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { LOGITS, ROWS, TOKEN_IDS, VALUES, STREAM };
    py_call call;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_bias_logits, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *logits = py_call_writable(&call, LOGITS), *rows = py_call_tensor(&call, ROWS);
    const pk_view *token_ids = py_call_tensor(&call, TOKEN_IDS), *values = py_call_tensor(&call, VALUES);
    PY_CALL_RUN(&call, pk_bias_logits(logits, rows, token_ids, values, call.stream, &call.err));
    return py_call_end(&call, Py_NewRef(Py_None));
}

const char py_mask_logits_doc[] = PyDoc_STR(
    "mask_logits($module, logits, bitmask, rows=None, *, stream=None)\n--\n\n"
    "Makes the logits of forbidden tokens -inf, in place.\n"
    "\n"
    "Args:\n"
    "    logits: [num_rows, vocab_size] float32.\n"
    "    bitmask: [n, ceil(vocab_size / 32)] int32, a mask for a row each: token t may be sampled where bit t % 32 of\n"
    "        word t // 32 is 1 (the format of xgrammar's masks). Bits beyond the vocabulary say nothing.\n"
    "    rows: [n] int32, the row of logits that each mask is for; a row may have several masks. None: mask i is for\n"
    "        row i, and n is num_rows.\n" PY_DOC_STREAM PY_DOC_RAISES
    "        A row outside of logits is a ValueError on the CPU; CUDA leaves it out and records it for\n"
    "        check_errors().\n");
PyObject *py_mask_logits(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { LOGITS, BITMASK, ROWS, STREAM };
    py_call call;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_mask_logits, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *logits = py_call_writable(&call, LOGITS), *bitmask = py_call_tensor(&call, BITMASK);
    const pk_view *rows = py_call_optional(&call, ROWS);
    PY_CALL_RUN(&call, pk_mask_logits(logits, bitmask, rows, call.stream, &call.err));
    return py_call_end(&call, Py_NewRef(Py_None));
}
