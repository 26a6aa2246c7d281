/* logits.c - bias_logits and mask_logits for Python: docstrings and tables of parameters. The rules are in
 * csrc/ops/logits.c. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/logits.h"

#define CALL pk_bias_call
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
PY_OP(bias_logits, P(WRITTEN, logits), P(TENSOR, rows), P(TENSOR, token_ids), P(TENSOR, values));

#undef CALL
#define CALL pk_mask_call
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
PY_OP(mask_logits, P(WRITTEN, logits), P(TENSOR, bitmask), P(OPTIONAL, rows));
