/* lora.c - lora_add for Python: docstring and table of parameters. The rules are in csrc/ops/lora.c. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/lora.h"

#define CALL pk_lora_call
const char py_lora_add_doc[] = PyDoc_STR(
    "lora_add($module, x, a, b, slots, *, out, stream=None)\n--\n\n"
    "out[t] += b[slots[t]] @ (a[slots[t]] @ x[t]), in place: what an adapter of low rank (Hu et al. 2021) adds to a\n"
    "token's product, for tokens of several adapters and of none.\n"
    "\n"
    "Both sums are float32, and the addition is rounded once. A slot that no token has is not read.\n"
    "\n"
    "Args:\n"
    "    x: [num_tokens, in_features] float32, float16 or bfloat16.\n"
    "    a: [num_slots, rank, in_features] of the same dtype. An adapter of lower rank has rows of zeros.\n"
    "    b: [num_slots, out_features, rank] of the same dtype, with the adapter's scale in it.\n"
    "    slots: [num_tokens] int32; negative: the token has no adapter, and its row of out stays as it is.\n"
    "    out: [num_tokens, out_features] of the same dtype.\n" PY_DOC_STREAM PY_DOC_RAISES
    "        A slot that is not there is a ValueError on the CPU; CUDA adds nothing for its token and records it for\n"
    "        check_errors().\n");
PY_OP(lora_add, P(TENSOR, x), P(TENSOR, a), P(TENSOR, b), P(TENSOR, slots), P(WRITTEN, out));
