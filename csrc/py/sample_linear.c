/* sample_linear.c - sample_linear and linear_candidates for Python: docstrings and tables of parameters. The rules are in
 * csrc/ops/sample_linear.c. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/sample_linear.h"

#define CALL pk_sample_linear_call
const char py_sample_linear_doc[] = PyDoc_STR(
    "sample_linear($module, x, weight, temperatures, seeds, positions, *, logits, weight_scales=None, "
    "weight_zeros=None, weight_block=None, weight_is_constant=False, batch_invariant=False, out=None, stream=None)\n--\n\n"
    "The tokens that sample takes of the logits x @ weight.T, accumulated in float32: the head of a model and the\n"
    "draw.\n"
    "\n"
    "It adds in an order of its own, so a near tie may fall the other way than with linear and sample; but not with\n"
    "batch_invariant, by which all three have the same bits.\n"
    "\n"
    "Args:\n"
    "    x: [num_rows, in_features] float32, float16 or bfloat16.\n"
    "    weight: [vocab_size, in_features] of x's dtype, or quantised: see linear.\n"
    "    temperatures, seeds, positions: one number per row, see sample.\n"
    "    logits: [num_rows, vocab_size] float32, memory for the product. What it holds afterwards is undefined: where\n"
    "        one kernel of a GPU does all of it, no logits are ever in memory.\n"
    "    weight_scales, weight_zeros, weight_block, weight_is_constant, batch_invariant: see linear.\n" PY_DOC_OUT
        PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_rows] int32.\n" PY_DOC_RAISES
    "        What sample refuses is refused as there: by name on the CPU, with -1 and check_errors() on CUDA.\n");
PY_OP(sample_linear, P(FACTOR, x), P_WEIGHT, P_AS(TENSOR, temperatures, sample.temperatures),
      P_AS(TENSOR, seeds, sample.seeds), P_AS(TENSOR, positions, sample.positions),
      P_AS(WRITTEN, logits, sample.logits), P_WEIGHT_SCALES, P(BOOL, weight_is_constant),
      P_AS(BOOL, batch_invariant, is_batch_invariant), P_AS(OUTPUT, out, sample.out));

const char py_linear_candidates_doc[] = PyDoc_STR(
    "linear_candidates($module, x, weight, temperatures, seeds, positions, first_token, *, logits, "
    "weight_scales=None, weight_zeros=None, weight_block=None, weight_is_constant=False, batch_invariant=False, out=None, stream=None)\n--\n\n"
    "sample_linear of a head whose tokens are divided among ranks: the best token of each row among those that weight\n"
    "has, with its key, in one word. The greatest word of all ranks has the token that sample_linear takes of all tokens;\n"
    "sample_candidates finds it.\n"
    "\n"
    "Args:\n"
    "    x, temperatures, seeds, positions: see sample_linear; the same on every rank.\n"
    "    weight: [num_tokens, in_features], the rows of the head from first_token on.\n"
    "    first_token: the token that weight's first row is; a multiple of 64.\n"
    "    logits: [num_rows, num_tokens] float32, memory for the product.\n"
    "    weight_scales, weight_zeros, weight_block, weight_is_constant, batch_invariant: see linear.\n" PY_DOC_OUT
        PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_rows] int64. Logits with a NaN are no error here: sample_candidates refuses them on every rank.\n" PY_DOC_RAISES);
PY_OP(linear_candidates, P(FACTOR, x), P_WEIGHT, P_AS(TENSOR, temperatures, sample.temperatures),
      P_AS(TENSOR, seeds, sample.seeds), P_AS(TENSOR, positions, sample.positions), P(INT, first_token),
      P_AS(WRITTEN, logits, sample.logits), P_WEIGHT_SCALES, P(BOOL, weight_is_constant),
      P_AS(BOOL, batch_invariant, is_batch_invariant), P_AS(OUTPUT, out, sample.out));
