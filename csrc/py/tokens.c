/* tokens.c - take_sampled and count_tokens for Python: docstrings and tables of parameters. The rules are in
 * csrc/ops/tokens.c. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/tokens.h"

#define CALL pk_take_sampled_call
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
PY_OP(take_sampled, P(WRITTEN, token_ids), P(TENSOR, sampled));

#undef CALL
#define CALL pk_count_call
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
PY_OP(count_tokens, P(TENSOR, prompt_ids), P(TENSOR, output_ids), P(WRITTEN, counts));
