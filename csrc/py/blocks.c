/* blocks.c - copy_blocks and swap_blocks for Python: docstrings and tables of parameters. The rules are in
 * csrc/ops/blocks.c. */
#include "py/op.h"
#include "py/docs.h"
#include "ops/blocks.h"

#define CALL pk_blocks_call
const char py_copy_blocks_doc[] = PyDoc_STR(
    "copy_blocks($module, caches, src_dst_pairs, *, stream=None)\n--\n\n"
    "Copies whole pages within each cache: cache[dst] = cache[src] (the copy of copy-on-write).\n"
    "\n"
    "Args:\n"
    "    caches: one tensor or a list of them (keys and values of all layers), [num_blocks, ...] of any dtype.\n"
    "    src_dst_pairs: [num_pairs, 2] int32 or int64 on the CPU, as BlockManager returns them. No page may be\n"
    "        written twice, or be both read and written.\n" PY_DOC_STREAM PY_DOC_RAISES);
PY_OP(copy_blocks, P_AS(WRITTEN_LIST, caches, dst), P_AS(TENSOR, src_dst_pairs, pairs));

const char py_swap_blocks_doc[] = PyDoc_STR(
    "swap_blocks($module, src, dst, pairs, *, stream=None)\n--\n\n"
    "Copies whole pages from one pool to another, on the same device or between a GPU and the CPU: dst[i][pairs[p,\n"
    "1]] = src[i][pairs[p, 0]].\n"
    "\n"
    "Args:\n"
    "    src, dst: one tensor each, or two lists of equal length, [num_blocks, ...] of any dtype and alike in all but\n"
    "        the number of pages. src[i] and dst[i] may be one pool, where no page is both read and written. Host\n"
    "        memory that a GPU copies must stay alive and unchanged until the stream has done it.\n"
    "    pairs: [num_pairs, 2] int32 or int64 on the CPU.\n" PY_DOC_STREAM PY_DOC_RAISES);
PY_OP(swap_blocks, P(LIST, src), P(WRITTEN_LIST, dst), P(TENSOR, pairs));
