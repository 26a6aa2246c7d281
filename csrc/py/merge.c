/* merge.c - merge_attention_states, for Python: bind, make views, call. The rules about shapes are in
 * csrc/ops/merge.c. */
#include "py/call.h"
#include "py/docs.h"
#include "ops/merge.h"

const char py_merge_attention_states_doc[] = PyDoc_STR(
    "merge_attention_states($module, o, lse, *, out=None, return_lse=False, stream=None)\n--\n\n"
    "Joins attention over disjoint sets of keys: out = sum_i o[i] * exp(lse[i] - L), L = log sum_i exp(lse[i]).\n"
    "\n"
    "Args:\n"
    "    o: [num_parts, num_tokens, num_heads, head_dim] float32, float16 or bfloat16. Where there is one part, out\n"
    "        may be that part.\n"
    "    lse: [num_parts, num_heads, num_tokens] float32, as paged_attention_fwd gives it; a part with -inf counts\n"
    "        nothing.\n" PY_DOC_OUT "    return_lse: True returns L, too.\n" PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_tokens, num_heads, head_dim], or (out, L) with L [num_heads, num_tokens] float32.\n" PY_DOC_RAISES);
PyObject *py_merge_attention_states(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { O, LSE, OUT, RETURN_LSE, STREAM };
    py_call call;
    py_output out, out_lse;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_merge_attention_states, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *o = py_call_tensor(&call, O), *lse = py_call_tensor(&call, LSE);
    py_call_output(&call, OUT, &out);
    bool wants_lse = py_call_bool(&call, RETURN_LSE, false);
    py_call_output(&call, -1, &out_lse);
    PY_CALL_RUN(&call,
                pk_merge_attention_states(o, lse, &out.base, wants_lse ? &out_lse.base : NULL, call.stream, &call.err));
    return py_call_end(&call, py_output_results(&out, wants_lse ? &out_lse : NULL));
}
