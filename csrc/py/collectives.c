/* collectives.c - all_reduce, all_gather and sample_candidates for Python: docstrings and tables of parameters. The rules
 * are in csrc/ops/collectives.c. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/collectives.h"

#define PY_DOC_GROUP_ERROR "    GroupError: see Communicator. What was to be written is undefined then.\n"

#define CALL pk_all_reduce_call
const char py_all_reduce_doc[] = PyDoc_STR(
    "all_reduce($module, x, comm, *, residual=None, out_squares=None, out=None, stream=None)\n--\n\n"
    "out = x of rank 0 + x of rank 1 + ... + residual, on every rank: what is done with the parts of a product whose\n"
    "inputs are divided among ranks.\n"
    "\n"
    "Sums are float32, begin with 0, follow the order of the ranks, and are rounded once. So all ranks get the same\n"
    "bits, whatever their number of rows, the way that these take and the order in which ranks arrive.\n"
    "\n"
    "Args:\n"
    "    x: [num_rows, row_size] float32, float16 or bfloat16, of the same shape on every rank.\n"
    "    comm: the Communicator, of x's device.\n"
    "    residual: like x, and the same on every rank: added once. It may be out: residual += the sum.\n"
    "    out_squares: [num_rows, 1] float32, gets of each row the sum of the squares of out as it is stored: the\n"
    "        x_squares of linear.\n"
    "    out: where to write, which may be x or residual; left out, a new tensor, see linear.\n" PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_rows, row_size] of x's dtype.\n" PY_DOC_RAISES PY_DOC_GROUP_ERROR);
PY_OP(all_reduce, P(TENSOR, x), P(COMM, comm), P(OPTIONAL, residual), P(OPTIONAL_WRITTEN, out_squares), P(OUTPUT, out));

#undef CALL
#define CALL pk_all_gather_call
const char py_all_gather_doc[] = PyDoc_STR(
    "all_gather($module, x, comm, *, out=None, stream=None)\n--\n\n"
    "The rows of all ranks side by side, on every rank: out[:, r * row_size + i] = x[:, i] of rank r. For example the\n"
    "logits of a head whose tokens are divided among ranks.\n"
    "\n"
    "Args:\n"
    "    x: [num_rows, row_size] float32, float16 or bfloat16, of the same shape on every rank.\n"
    "    comm: the Communicator, of x's device.\n" PY_DOC_OUT PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_rows, size * row_size] of x's dtype. A NaN stays one, but CUDA may change its payload.\n" PY_DOC_RAISES
        PY_DOC_GROUP_ERROR);
PY_OP(all_gather, P(TENSOR, x), P(COMM, comm), P(OUTPUT, out));

#undef CALL
#define CALL pk_sample_candidates_call
const char py_sample_candidates_doc[] = PyDoc_STR(
    "sample_candidates($module, candidates, comm, *, out=None, stream=None)\n--\n\n"
    "The token of each row that the best of all ranks' candidates has: to the bit what sample takes of all ranks' logits\n"
    "side by side.\n"
    "\n"
    "Args:\n"
    "    candidates: [num_rows] int64, see linear_candidates.\n"
    "    comm: the Communicator, of candidates' device.\n" PY_DOC_OUT PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_rows] int32.\n" PY_DOC_RAISES
    "        Logits of any rank with a NaN, or with -inf everywhere on all ranks, are a ValueError of every rank on the\n"
    "        CPU; CUDA writes -1 and records it for check_errors().\n" PY_DOC_GROUP_ERROR);
PY_OP(sample_candidates, P(TENSOR, candidates), P(COMM, comm), P(OUTPUT, out));
