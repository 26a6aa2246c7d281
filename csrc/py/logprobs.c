/* logprobs.c - token_logprobs for Python: docstrings and tables of parameters. The rules are in csrc/ops/logprobs.c. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/logprobs.h"

#define CALL pk_logprobs_call
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
PY_OP(token_logprobs, P(TENSOR, logits), P(TENSOR, token_ids), P(INT, num_best), P(OUTPUT, out_ids), P(OUTPUT, out));
