/* logprobs.c - token_logprobs, for Python: bind, make views, call. The rules about shapes are in
 * csrc/ops/logprobs.c. */
#include "py/call.h"
#include "py/docs.h"
#include "ops/logprobs.h"

const char py_token_logprobs_doc[] = PyDoc_STR(
    "token_logprobs($module, logits, token_ids, num_best=0, *, out_ids=None, out=None, stream=None)\n--\n\n"
    "log softmax(logits) of one token of each row (the sampled one, or the prompt's next) and of the num_best most\n"
    "likely.\n"
    "\n"
    "They are taken before temperature, penalties and filters, as vLLM's default (raw_logprobs).\n"
    "\n"
    "Args:\n"
    "    logits: [num_rows, vocab_size] float32, float16 or bfloat16.\n"
    "    token_ids: [num_rows] int32; a negative one skips its row.\n"
    "    num_best: 0 to 20.\n"
    "    out_ids: [num_rows, 1 + num_best] int32, where to write; left out, a new tensor like out.\n"
    "    out: [num_rows, 1 + num_best] float32, where to write; left out, a new tensor in the framework of logits.\n" PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    (out_ids, out): first the token itself, then the best in order, the lowest id first of equal ones. A row\n"
    "        that is skipped, or whose logits have no softmax (NaN, inf, nothing but -inf), gets ids -1 and NaN.\n" PY_DOC_RAISES
    "        A token outside of the vocabulary is a ValueError on the CPU; CUDA skips its row and records it for\n"
    "        check_errors().\n");
PyObject *py_token_logprobs(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { LOGITS, TOKEN_IDS, NUM_BEST, OUT_IDS, OUT, STREAM };
    py_call call;
    py_output ids, out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_token_logprobs, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *logits = py_call_tensor(&call, LOGITS), *token_ids = py_call_tensor(&call, TOKEN_IDS);
    int64_t num_best = py_call_int(&call, NUM_BEST, 0);
    py_call_output(&call, OUT_IDS, &ids);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_token_logprobs(logits, token_ids, num_best, &ids.base, &out.base, call.stream, &call.err));
    return py_call_end(&call, py_output_results(&ids, &out));
}
