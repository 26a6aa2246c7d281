/* merge.c - merge_attention_states for Python: docstrings and tables of parameters. The rules are in
 * csrc/ops/merge.c. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/merge.h"

#define CALL pk_merge_call
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
PY_OP(merge_attention_states, P(TENSOR, o), P(TENSOR, lse), P(OUTPUT, out), P_AS(WANTS_OUTPUT, return_lse, out_lse));
