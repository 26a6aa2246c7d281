/* blocks.c - copy_blocks and swap_blocks, for Python: bind, make views, call. The rules about shapes are in
 * csrc/ops/blocks.c. */
#include "py/call.h"
#include "py/docs.h"
#include "ops/blocks.h"

const char py_copy_blocks_doc[] = PyDoc_STR(
    "copy_blocks($module, caches, src_dst_pairs, *, stream=None)\n--\n\n"
    "Copies whole pages within each cache: cache[dst] = cache[src] (the copy of copy-on-write).\n"
    "\n"
    "Args:\n"
    "    caches: one tensor or a list of them (keys and values of all layers), [num_blocks, ...] of any dtype.\n"
    "    src_dst_pairs: [num_pairs, 2] int32 or int64 on the CPU, as BlockManager returns them. No page may be\n"
    "        written twice, or be both read and written.\n" PY_DOC_STREAM PY_DOC_RAISES);
PyObject *py_copy_blocks(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { CACHES, PAIRS, STREAM };
    py_call call;
    int num_caches;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_copy_blocks, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *caches = py_call_tensors(&call, CACHES, true, &num_caches), *pairs = py_call_tensor(&call, PAIRS);
    PY_CALL_RUN(&call, pk_copy_blocks(caches, num_caches, pairs, call.stream, &call.err));
    return py_call_end(&call, Py_NewRef(Py_None));
}

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
PyObject *py_swap_blocks(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { SRC, DST, PAIRS, STREAM };
    py_call call;
    int num_src, num_dst;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_swap_blocks, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *src = py_call_tensors(&call, SRC, false, &num_src),
                  *dst = py_call_tensors(&call, DST, true, &num_dst);
    const pk_view *pairs = py_call_tensor(&call, PAIRS);
    if (!call.has_failed && num_src != num_dst) {
        PyErr_Format(PyExc_ValueError, "dst: has %d tensors but src has %d", num_dst, num_src);
        call.has_failed = true;
    }
    PY_CALL_RUN(&call, pk_swap_blocks(src, dst, num_src, pairs, call.stream, &call.err));
    return py_call_end(&call, Py_NewRef(Py_None));
}
