/* tokens.c - take_sampled and count_tokens, for Python: bind, make views, call. The rules about shapes are in
 * csrc/ops/tokens.c. */
#include "py/call.h"
#include "py/docs.h"
#include "ops/tokens.h"

const char py_take_sampled_doc[] = PyDoc_STR(
    "take_sampled($module, token_ids, sampled, *, stream=None)\n--\n\n"
    "Puts tokens that the host does not know yet in their places: where token_ids[t] is negative it becomes\n"
    "sampled[-1 - token_ids[t]], in place.\n"
    "\n"
    "Args:\n"
    "    token_ids: [num_tokens] int32.\n"
    "    sampled: [num_rows] int32, what sample wrote. A negative one (no token could be sampled) counts as 0.\n" PY_DOC_STREAM
        PY_DOC_RAISES
    "        A row beyond the last is a ValueError on the CPU; CUDA takes 0 and records it for check_errors().\n");
PyObject *py_take_sampled(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { TOKEN_IDS, SAMPLED, STREAM };
    py_call call;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_take_sampled, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *token_ids = py_call_writable(&call, TOKEN_IDS), *sampled = py_call_tensor(&call, SAMPLED);
    PY_CALL_RUN(&call, pk_take_sampled(token_ids, sampled, call.stream, &call.err));
    return py_call_end(&call, Py_NewRef(Py_None));
}

const char py_count_tokens_doc[] = PyDoc_STR(
    "count_tokens($module, prompt_ids, output_ids, counts, *, stream=None)\n--\n\n"
    "Fills counts with what the penalties of sample need to know of a sequence: counts[v] = 2 * (times that\n"
    "output_ids holds v) + (whether prompt_ids holds v). Once per sequence, on its row of a table; sample goes on\n"
    "counting.\n"
    "\n"
    "Args:\n"
    "    prompt_ids, output_ids: [any] int32 or int64, what was given and what was generated, on counts' device.\n"
    "    counts: [vocab_size] int32, overwritten.\n" PY_DOC_STREAM PY_DOC_RAISES
    "        An id outside of counts is a ValueError on the CPU; CUDA leaves it out and records it for\n"
    "        check_errors().\n");
PyObject *py_count_tokens(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { PROMPT_IDS, OUTPUT_IDS, COUNTS, STREAM };
    py_call call;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_count_tokens, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *prompt_ids = py_call_tensor(&call, PROMPT_IDS), *output_ids = py_call_tensor(&call, OUTPUT_IDS);
    const pk_view *counts = py_call_writable(&call, COUNTS);
    PY_CALL_RUN(&call, pk_count_tokens(prompt_ids, output_ids, counts, call.stream, &call.err));
    return py_call_end(&call, Py_NewRef(Py_None));
}
