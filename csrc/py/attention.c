/* attention.c - paged_attention_fwd and plan_attention, for Python: bind, make views, call. The rules about shapes are
 * in csrc/ops/attention.c. */
#include "py/attention.h"
#include "py/docs.h"

void py_call_window(py_call *call, int parameter, pk_attention_call *request)
{
    PyObject *object = call->given[parameter];
    request->window_left = request->window_right = -1;
    if (call->has_failed || !object) return;
    PyObject *pair = PyUnicode_Check(object) ? NULL : PySequence_Tuple(object);
    if (!pair && PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_TypeError)) {
        call->has_failed = true; /* of its own iterator */
    } else if (!pair || PyTuple_Size(pair) != 2) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "window_size: must be a pair of ints, not %R", object);
        call->has_failed = true;
    } else {
        call->has_failed = py_int64_arg("window_size[0]", PyTuple_GetItem(pair, 0), &request->window_left) < 0 ||
                           py_int64_arg("window_size[1]", PyTuple_GetItem(pair, 1), &request->window_right) < 0;
    }
    Py_XDECREF(pair);
}

const double *py_call_softmax_scale(py_call *call, int parameter, double *scale)
{
    PyObject *object = call->given[parameter];
    *scale = py_call_double(call, parameter, 0);
    return object && object != Py_None ? scale : NULL;
}

void py_call_split(py_call *call, int parameter, pk_attention_call *request)
{
    request->num_splits = py_call_int(call, parameter, 0);
    request->plan = py_call_optional(call, parameter + 1);
    request->past_is_constant = py_call_bool(call, parameter + 2, false);
}

/* The batch, which the arguments of both calls begin with. */
/* clang-format off */
enum { Q, K_CACHE, V_CACHE, BLOCK_TABLES, CONTEXT_LENS, CU_SEQLENS_Q, MAX_SEQLEN_Q, KEY_STARTS, TABLE_STARTS,
       NUM_BATCH };
/* clang-format on */

static void read_batch(py_call *call, pk_attention_call *request)
{
    request->q = py_call_tensor(call, Q);
    request->k_cache = py_call_tensor(call, K_CACHE);
    request->v_cache = py_call_tensor(call, V_CACHE);
    request->block_tables = py_call_tensor(call, BLOCK_TABLES);
    request->context_lens = py_call_tensor(call, CONTEXT_LENS);
    request->cu_seqlens_q = py_call_optional(call, CU_SEQLENS_Q);
    request->max_seqlen_q = py_call_int(call, MAX_SEQLEN_Q, INT64_MAX);
    request->key_starts = py_call_optional(call, KEY_STARTS);
    request->table_starts = py_call_optional(call, TABLE_STARTS);
}

const char py_paged_attention_fwd_doc[] = PyDoc_STR(
    "paged_attention_fwd($module, q, k_cache, v_cache, block_tables, context_lens, *, cu_seqlens_q=None, "
    "max_seqlen_q=None, key_starts=None, table_starts=None, softmax_scale=None, causal=True, window_size=(-1, -1), "
    "softcap=0.0, alibi_slopes=None, sinks=None, k_scale=None, v_scale=None, num_splits=0, plan=None, "
    "past_is_constant=False, out=None, return_lse=False, stream=None)\n--\n\n"
    "Attention over keys and values that lie in pages: decode, prefill, chunked prefill and any mix of them.\n"
    "\n"
    "Args:\n"
    "    q: [num_tokens, num_q_heads, head_dim] float32, float16 or bfloat16; num_q_heads is a multiple of\n"
    "        num_kv_heads.\n" PY_DOC_CACHES
    "    block_tables: [num_seqs, max_blocks] int32 (no int64, which only slot_mapping may be), the page of every\n"
    "        block_size keys; a negative entry is padding.\n"
    "    context_lens: [num_seqs] int32, all keys that a sequence has, its new tokens included; CUDA takes up to\n"
    "        2**31 - 2**16 - 1.\n"
    "    cu_seqlens_q: [num_seqs + 1] int32, where each sequence's queries begin and end; None: num_tokens / num_seqs\n"
    "        each. Rows of out before the first and after the last are not written (padding).\n"
    "    max_seqlen_q: an upper bound of one sequence's queries, for the launch on CUDA; None: num_tokens.\n"
    "    key_starts: [num_seqs] int32, slots of a sequence's pages in front of its first key; None: 0. So dense keys\n"
    "        and values of ragged sequences, [num_keys, num_kv_heads, head_dim], are one page: k[None], with\n"
    "        block_tables zeros.\n"
    "    table_starts: [num_seqs] int32, entries of a sequence's row of block_tables in front of its pages; None: 0.\n"
    "        So a list of the pages of all sequences, one after the other, is every sequence's row:\n"
    "        pages.expand(num_seqs, -1).\n"
    "    softmax_scale: what the dot products are multiplied by; None: 1 / sqrt(head_dim).\n"
    "    causal: query i of n sees key j where j <= i + context_len - n.\n"
    "    window_size: (left, right), keys seen on either side of a query's own position; -1 is unbounded.\n"
    "    softcap: c > 0 makes every logit c * tanh(logit / c).\n"
    "    alibi_slopes: [num_q_heads] or [num_seqs, num_q_heads] float32: -slope * distance on the logits.\n"
    "    sinks: [num_q_heads] float32, a logit that joins the softmax and has no value.\n"
    "    k_scale, v_scale: of a float8_e4m3fn cache, which holds x / scale: None (1), a float, or float32 of shape\n"
    "        [1], [num_kv_heads] or [num_seqs, num_kv_heads].\n"
    "    num_splits: parts in which the keys of a sequence are done in parallel. 0 chooses; a number (the most parts)\n"
    "        fixes the order of additions whatever the batch. The CPU does a sequence's keys in parts of 1,024 by\n"
    "        whatever number, so that its results never depend on the batch.\n"
    "    plan: what plan_attention returned for the same shapes and lengths; None: this call makes its own.\n"
    "    past_is_constant: True promises that since the last copy or graph launch on the stream nothing has written\n"
    "        block_tables, or keys and values in front of the queries' own. With a plan, CUDA then reads them while\n"
    "        the operations before this one still run.\n" PY_DOC_OUT
    "    return_lse: True returns lse, too.\n" PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, or (out, lse). lse is [num_q_heads, num_tokens] float32: the natural log of the sum of the exponentials\n"
    "        of the logits. A row that sees no key gives 0, and -inf or, with sinks, its head's\n"
    "        sink. inf and NaN in a key reach no query that does not see it. Those in a value do not on the CPU; CUDA\n"
    "        multiplies by 0, and may give NaN to other queries of the same sequence.\n" PY_DOC_RAISES
    "        A page out of range is a ValueError on the CPU; CUDA masks its keys and records it for check_errors().\n");
PyObject *py_paged_attention_fwd(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    /* clang-format off */
    enum { SOFTMAX_SCALE = NUM_BATCH, CAUSAL, WINDOW_SIZE, SOFTCAP, ALIBI_SLOPES, SINKS, K_SCALE, V_SCALE, NUM_SPLITS,
           PLAN, PAST_IS_CONSTANT, OUT, RETURN_LSE, STREAM };
    /* clang-format on */
    py_call call;
    py_output out, lse;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_paged_attention_fwd, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    pk_attention_call request = {.out = &out.base};
    read_batch(&call, &request);
    double scale;
    request.softmax_scale = py_call_softmax_scale(&call, SOFTMAX_SCALE, &scale);
    request.is_causal = py_call_bool(&call, CAUSAL, true);
    py_call_window(&call, WINDOW_SIZE, &request);
    request.softcap = py_call_double(&call, SOFTCAP, 0);
    request.alibi_slopes = py_call_optional(&call, ALIBI_SLOPES);
    request.sinks = py_call_optional(&call, SINKS);
    request.k_scale = py_call_scale(&call, K_SCALE);
    request.v_scale = py_call_scale(&call, V_SCALE);
    py_call_split(&call, NUM_SPLITS, &request);
    py_call_output(&call, OUT, &out);
    bool wants_lse = py_call_bool(&call, RETURN_LSE, false);
    py_call_output(&call, -1, &lse);
    if (wants_lse) request.lse = &lse.base;
    PY_CALL_RUN(&call, pk_paged_attention_fwd(&request, call.stream, &call.err));
    return py_call_end(&call, py_output_results(&out, wants_lse ? &lse : NULL));
}

const char py_plan_attention_doc[] = PyDoc_STR(
    "plan_attention($module, q, k_cache, v_cache, block_tables, context_lens, *, cu_seqlens_q=None, "
    "max_seqlen_q=None, key_starts=None, table_starts=None, causal=True, window_size=(-1, -1), num_splits=0, out=None, "
    "stream=None)\n--\n\n"
    "Divides a batch among the processors of a GPU, once for all layers of a step: with plan=plan, no call of\n"
    "paged_attention_fwd has to do it for itself.\n"
    "\n"
    "The arguments are those of paged_attention_fwd. Of q, the caches and the tables only shapes, strides and dtypes\n"
    "count; of context_lens, cu_seqlens_q, key_starts and table_starts the numbers. Where those change, the plan must\n"
    "be made again (out=plan), inside a CUDA graph too, where every replay plans for the lengths that it finds.\n"
    "\n"
    "Args:\n" PY_DOC_OUT PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    int32 [n, 12] on q's device, n by the shapes alone; 0 where there is nothing to divide, as on the CPU. out\n"
    "        may have more rows, which are left as they are. With num_splits=0 and g = num_q_heads / num_kv_heads, n is\n"
    "        at most num_seqs * (1 + num_kv_heads) + num_tokens * g * (1 / 8 + num_kv_heads / 64) + 5120.\n" PY_DOC_RAISES
    "        paged_attention_fwd refuses a plan for other shapes or lengths. What only the device can tell, such as\n"
    "        a row that was overwritten, it masks and records for check_errors(); until that has raised, other\n"
    "        results of the stream may be wrong.\n");
PyObject *py_plan_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { CAUSAL = NUM_BATCH, WINDOW_SIZE, NUM_SPLITS, OUT, STREAM };
    py_call call;
    py_output out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_plan_attention, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    pk_attention_call request = {.out = &out.base};
    read_batch(&call, &request);
    request.is_causal = py_call_bool(&call, CAUSAL, true);
    py_call_window(&call, WINDOW_SIZE, &request);
    request.num_splits = py_call_int(&call, NUM_SPLITS, 0);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_plan_attention(&request, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}
