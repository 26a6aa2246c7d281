/* ops.c - the operations on a paged KV cache, for Python: bind, make views, call. No rule about shapes is here: those
 * are in csrc/ops_store.c, ops_attention.c, ops_blocks.c, ops_merge.c, ops_rope.c. */
#include "py/call.h"
#include "py/docs.h"

#include <math.h>

#define CACHES_DOC \
    "k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of the same float dtype, or float8_e4m3fn.\n"
#define SLOTS_DOC \
    "slot_mapping: [num_tokens] int32 or int64, page * block_size + offset; a negative one stores nothing.\n"
#define SCALES_DOC "k_scale, v_scale: of a float8_e4m3fn cache, which holds x / scale: None (1), a float, or float32 "

PyDoc_STRVAR(
    store_kvcache_doc,
    "store_kvcache($module, key, value, k_cache, v_cache, slot_mapping, *, k_scale=None, v_scale=None, stream=None)\n"
    "--\n\n"
    "Writes new keys and values into their pages, in place.\n\n"
    "key, value: [num_tokens, num_kv_heads, head_dim] float32, float16 or bfloat16; the last dimension dense, so\n"
    "slices of a fused qkv projection are taken as they are.\n" CACHES_DOC SLOTS_DOC SCALES_DOC
    "of shape [1] or [num_kv_heads].\n" PY_DOC_STREAM PY_DOC_ERRORS
    "A slot outside of the pool: the CPU raises ValueError before anything is written; CUDA skips it and records it\n"
    "for check_errors().");
static PyObject *py_store_kvcache(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { KEY, VALUE, K_CACHE, V_CACHE, SLOT_MAPPING, K_SCALE, V_SCALE, STREAM };
    py_call call;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_store_kvcache, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *key = py_call_tensor(&call, KEY), *value = py_call_tensor(&call, VALUE);
    const pk_view *k_cache = py_call_writable(&call, K_CACHE), *v_cache = py_call_writable(&call, V_CACHE);
    const pk_view *slot_mapping = py_call_tensor(&call, SLOT_MAPPING);
    pk_scale k_scale = py_call_scale(&call, K_SCALE), v_scale = py_call_scale(&call, V_SCALE);
    PY_CALL_RUN(&call,
                pk_store_kvcache(key, value, k_cache, v_cache, slot_mapping, k_scale, v_scale, call.stream, &call.err));
    return py_call_end(&call, Py_NewRef(Py_None));
}

/* window_size: a pair of ints. */
static void read_window(py_call *call, int parameter, pk_attention_call *request)
{
    PyObject *object = call->given[parameter];
    request->window_left = request->window_right = -1;
    if (call->has_failed || !object) return;
    PyObject *pair = PyUnicode_Check(object) ? NULL : PySequence_Tuple(object);
    if (!pair || PyTuple_Size(pair) != 2) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "window_size: must be a pair of ints, not %R", object);
        call->has_failed = true;
    } else {
        call->has_failed = py_int64_arg("window_size[0]", PyTuple_GetItem(pair, 0), &request->window_left) < 0 ||
                           py_int64_arg("window_size[1]", PyTuple_GetItem(pair, 1), &request->window_right) < 0;
    }
    Py_XDECREF(pair);
}

/* softmax_scale: a number, kept in `scale`, or NULL for None. */
static const double *read_scale(py_call *call, int parameter, double *scale)
{
    PyObject *object = call->given[parameter];
    *scale = py_call_double(call, parameter, 0);
    return object && object != Py_None ? scale : NULL;
}

/* num_splits, plan and past_is_constant, which follow one another. */
static void read_split(py_call *call, int parameter, pk_attention_call *request)
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

PyDoc_STRVAR(
    paged_attention_fwd_doc,
    "paged_attention_fwd($module, q, k_cache, v_cache, block_tables, context_lens, *, cu_seqlens_q=None, "
    "max_seqlen_q=None, key_starts=None, table_starts=None, softmax_scale=None, causal=True, window_size=(-1, -1), "
    "softcap=0.0, alibi_slopes=None, sinks=None, k_scale=None, v_scale=None, num_splits=0, plan=None, "
    "past_is_constant=False, out=None, return_lse=False, stream=None)\n--\n\n"
    "Attention over keys and values that lie in pages: decode, prefill, chunked prefill and any mix of them.\n\n"
    "q: [num_tokens, num_q_heads, head_dim] float32, float16 or bfloat16; num_q_heads a multiple of\n" CACHES_DOC
    "num_kv_heads. block_tables: [num_seqs, max_blocks] int32, page of every block_size keys; a negative entry is\n"
    "padding. context_lens: [num_seqs] int32, every key that a sequence may see, its new tokens included.\n"
    "cu_seqlens_q: [num_seqs + 1] int32, the sequences' queries; None: num_tokens / num_seqs each. Rows of out before the\n"
    "first and behind the last are not written (padding).\n"
    "max_seqlen_q: an upper bound of one sequence's queries, for the launch on CUDA; None: num_tokens.\n"
    "key_starts: [num_seqs] int32, slots of a sequence's pages in front of its first key; None: 0. So dense keys and\n"
    "values of ragged sequences, [num_keys, num_kv_heads, head_dim], are one page: k[None], with block_tables zeros.\n"
    "table_starts: [num_seqs] int32, entries of a sequence's row of block_tables in front of its pages; None: 0. So a\n"
    "list of the pages of all sequences, one after the other, is every sequence's row: pages.expand(num_seqs, -1).\n"
    "softmax_scale: None is 1 / sqrt(head_dim). causal: query i of n sees key j iff j <= i + context_len - n.\n"
    "window_size: (left, right) keys seen beside a query's own position, -1 is unbounded.\n"
    "softcap: c > 0 makes every logit c * tanh(logit / c).\n"
    "alibi_slopes: [num_q_heads] or [num_seqs, num_q_heads] float32: -slope * distance on the logits.\n"
    "sinks: [num_q_heads] float32, a logit that joins the softmax and has no value.\n" SCALES_DOC
    "of shape [1], [num_kv_heads] or\n[num_seqs, num_kv_heads].\n"
    "num_splits: parts in which the keys of a sequence are done in parallel; 0 chooses, a number (the most parts) fixes\n"
    "the order of additions whatever the batch.\n"
    "plan: what plan_attention returned for the same shapes and lengths, or None: this call makes its own.\n"
    "past_is_constant=True promises that since the last copy or graph launch on the stream nothing has written\n"
    "block_tables, or keys and values in front of the queries' own: with a plan, CUDA reads them while the operations\n"
    "ahead still run.\n" PY_DOC_OUT PY_DOC_STREAM PY_DOC_ERRORS
    "A page out of range: the CPU raises ValueError; CUDA masks its keys and records it for check_errors().\n\n"
    "Returns out, or (out, lse) with lse [num_q_heads, num_tokens] float32, the natural log of the sum of the\n"
    "exponentials of the logits. A row that sees no key gives 0 and -inf.");
static PyObject *py_paged_attention_fwd(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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
    request.softmax_scale = read_scale(&call, SOFTMAX_SCALE, &scale);
    request.is_causal = py_call_bool(&call, CAUSAL, true);
    read_window(&call, WINDOW_SIZE, &request);
    request.softcap = py_call_double(&call, SOFTCAP, 0);
    request.alibi_slopes = py_call_optional(&call, ALIBI_SLOPES);
    request.sinks = py_call_optional(&call, SINKS);
    request.k_scale = py_call_scale(&call, K_SCALE);
    request.v_scale = py_call_scale(&call, V_SCALE);
    read_split(&call, NUM_SPLITS, &request);
    py_call_output(&call, OUT, &out);
    bool wants_lse = py_call_bool(&call, RETURN_LSE, false);
    py_call_output(&call, -1, &lse);
    if (wants_lse) request.lse = &lse.base;
    PY_CALL_RUN(&call, pk_paged_attention_fwd(&request, call.stream, &call.err));
    return py_call_end(&call, py_output_results(&out, wants_lse ? &lse : NULL));
}

PyDoc_STRVAR(
    plan_attention_doc,
    "plan_attention($module, q, k_cache, v_cache, block_tables, context_lens, *, cu_seqlens_q=None, "
    "max_seqlen_q=None, key_starts=None, table_starts=None, causal=True, window_size=(-1, -1), num_splits=0, out=None, "
    "stream=None)\n--\n\n"
    "Divides a batch among the processors of a GPU, once for all layers of a step: with plan=plan, no call of\n"
    "paged_attention_fwd has to do it for itself.\n\n"
    "The arguments are those of paged_attention_fwd. Of q, the caches and the tables only shapes, strides and dtypes\n"
    "count, of context_lens, cu_seqlens_q, key_starts and table_starts the numbers: where those change, the plan must be\n"
    "made again (out=plan), inside a CUDA graph too, where every replay plans for the lengths that it finds.\n" PY_DOC_OUT
        PY_DOC_STREAM PY_DOC_ERRORS
    "A plan for other shapes is refused, or masked and recorded for check_errors(), as is one for other lengths.\n\n"
    "Returns an int32 tensor [n, 12] on q's device, n by the shapes alone; 0 where there is nothing to divide, as on\n"
    "the CPU. out may have more rows, which are left as they are. With num_splits=0 n is at most num_seqs +\n"
    "num_tokens * num_q_heads / num_kv_heads / 8 + 4096.");
static PyObject *py_plan_attention(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { CAUSAL = NUM_BATCH, WINDOW_SIZE, NUM_SPLITS, OUT, STREAM };
    py_call call;
    py_output out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_plan_attention, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    pk_attention_call request = {.out = &out.base};
    read_batch(&call, &request);
    request.is_causal = py_call_bool(&call, CAUSAL, true);
    read_window(&call, WINDOW_SIZE, &request);
    request.num_splits = py_call_int(&call, NUM_SPLITS, 0);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_plan_attention(&request, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}

PyDoc_STRVAR(
    copy_blocks_doc,
    "copy_blocks($module, caches, src_dst_pairs, *, stream=None)\n--\n\n"
    "Copies whole pages within each cache: cache[dst] = cache[src] (the copy of copy-on-write).\n\n"
    "caches: one tensor or a list of them (keys and values of all layers), [num_blocks, ...] of any dtype.\n"
    "src_dst_pairs: [num_pairs, 2] int32 or int64 on the CPU, as BlockManager returns them. No page may be written\n"
    "twice, or be both read and written.\n" PY_DOC_STREAM PY_DOC_ERRORS);
static PyObject *py_copy_blocks(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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

PyDoc_STRVAR(
    swap_blocks_doc,
    "swap_blocks($module, src, dst, pairs, *, stream=None)\n--\n\n"
    "Copies whole pages from one pool to another, on the same device or between a GPU and the CPU:\n"
    "dst[i][pairs[p, 1]] = src[i][pairs[p, 0]].\n\n"
    "src, dst: one tensor each, or two lists of equal length, [num_blocks, ...] of any dtype and alike in all but the\n"
    "number of pages. pairs: [num_pairs, 2] int32 or int64 on the CPU. src[i] and dst[i] may be one pool, where no page is\n"
    "both read and written.\n" PY_DOC_STREAM PY_DOC_ERRORS
    "Host memory that a GPU copies must stay alive and unchanged until the stream has done it.");
static PyObject *py_swap_blocks(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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

PyDoc_STRVAR(
    merge_attention_states_doc,
    "merge_attention_states($module, o, lse, *, out=None, return_lse=False, stream=None)\n--\n\n"
    "Joins attention over disjoint sets of keys: out = sum_i o[i] * exp(lse[i] - L), L = log sum_i exp(lse[i]).\n\n"
    "o: [num_parts, num_tokens, num_heads, head_dim] float32, float16 or bfloat16. lse: [num_parts, num_heads,\n"
    "num_tokens] float32, as paged_attention_fwd gives it; a part with -inf counts nothing. Where there is one part, out\n"
    "may be that part.\n" PY_DOC_OUT PY_DOC_STREAM PY_DOC_ERRORS
    "\nReturns out [num_tokens, num_heads, head_dim], or (out, L) with L [num_heads, num_tokens].");
static PyObject *py_merge_attention_states(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { O, LSE, OUT, RETURN_LSE, STREAM };
    py_call call;
    py_output out, out_lse;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_merge_attention_states, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    const pk_view *o = py_call_tensor(&call, O), *lse = py_call_tensor(&call, LSE);
    py_call_output(&call, OUT, &out);
    bool wants_lse = py_call_bool(&call, RETURN_LSE, false);
    py_call_output(&call, -1, &out_lse);
    PY_CALL_RUN(&call,
                pk_merge_attention_states(o, lse, &out.base, wants_lse ? &out_lse.base : NULL, call.stream, &call.err));
    return py_call_end(&call, py_output_results(&out, wants_lse ? &out_lse : NULL));
}

/* The projection and where its heads go, which the arguments of both calls begin with. */
enum { QKV, Q_WEIGHT, K_WEIGHT, COS_SIN, POSITIONS, ROPE_K_CACHE, ROPE_V_CACHE, SLOT_MAPPING, NUM_HEADS };

static void read_heads(py_call *call, pk_qk_norm_rope_store_call *request)
{
    request->qkv = py_call_tensor(call, QKV);
    request->q_weight = py_call_optional(call, Q_WEIGHT);
    request->k_weight = py_call_optional(call, K_WEIGHT);
    request->cos_sin = py_call_tensor(call, COS_SIN);
    request->positions = py_call_tensor(call, POSITIONS);
    request->k_cache = py_call_writable(call, ROPE_K_CACHE);
    request->v_cache = py_call_writable(call, ROPE_V_CACHE);
    request->slot_mapping = py_call_tensor(call, SLOT_MAPPING);
}

PyDoc_STRVAR(
    qk_norm_rope_store_doc,
    "qk_norm_rope_store($module, qkv, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slot_mapping, *, "
    "rms_of=None, eps=1e-06, k_scale=None, v_scale=None, q_out=None, stream=None)\n--\n\n"
    "What stands between a fused projection and attention, in one pass: RMS norm of every head of q and k, rotary\n"
    "embedding, k and v into their pages; returns q.\n\n"
    "qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim] float32, float16 or bfloat16.\n"
    "q_weight, k_weight: [head_dim] of qkv's dtype, or both None for no norm.\n"
    "rms_of: [num_tokens, any] of qkv's dtype: the rows of qkv are first divided by sqrt(mean(rms_of^2) + eps) of\n"
    "theirs, which is what linear(hidden, weight) lacks of linear(rms_norm(hidden), weight), with hidden as rms_of.\n"
    "cos_sin: [max_positions, head_dim] float32: the cosines of all pairs, then the sines. Dimension i is paired with\n"
    "i + head_dim / 2 (RoFormer, Su et al. 2021, in the order of Llama and Qwen).\n"
    "positions: [num_tokens] int32, less than max_positions.\n" CACHES_DOC SLOTS_DOC SCALES_DOC
    "of shape [1] or [num_kv_heads].\n"
    "q_out: [num_tokens, num_q_heads, head_dim] contiguous; left out, a new tensor in qkv's framework.\n" PY_DOC_STREAM
        PY_DOC_ERRORS);
static PyObject *py_qk_norm_rope_store(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { RMS_OF = NUM_HEADS, EPS, K_SCALE, V_SCALE, Q_OUT, STREAM };
    py_call call;
    py_output q_out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_qk_norm_rope_store, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    pk_qk_norm_rope_store_call request = {.q_out = &q_out.base};
    read_heads(&call, &request);
    request.rms_of = py_call_optional(&call, RMS_OF);
    request.eps = py_call_double(&call, EPS, 1e-6);
    request.k_scale = py_call_scale(&call, K_SCALE);
    request.v_scale = py_call_scale(&call, V_SCALE);
    py_call_output(&call, Q_OUT, &q_out);
    PY_CALL_RUN(&call, pk_qk_norm_rope_store(&request, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&q_out));
}

PyDoc_STRVAR(
    qkv_attention_fwd_doc,
    "qkv_attention_fwd($module, qkv, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slot_mapping, "
    "block_tables, context_lens, *, rms_of=None, eps=1e-06, cu_seqlens_q=None, max_seqlen_q=None, softmax_scale=None, "
    "window_size=(-1, -1), k_scale=None, v_scale=None, num_splits=0, plan=None, past_is_constant=False, out=None, "
    "stream=None)\n--\n\n"
    "All that attention does behind a fused projection: q = qk_norm_rope_store(qkv, ...), which stores the new keys and\n"
    "values, then causal paged_attention_fwd(q, ...). For up to 64 sequences with one token each, a GPU does both in one\n"
    "kernel, which can start while the projection still runs.\n\n"
    "The arguments are those of the two; plan is what plan_attention returned for q. Where a token's slot is not\n"
    "negative, it must be its own in block_tables, or one that is not read here. A scale has one number, or one a KV\n"
    "head.\n"
    "past_is_constant=True promises the same of positions, slot_mapping, cos_sin, q_weight and k_weight as of\n"
    "block_tables.\n" PY_DOC_OUT PY_DOC_STREAM PY_DOC_ERRORS
    "An id out of range is treated as by the two operations.\n\n"
    "Returns out, [num_tokens, num_q_heads, head_dim].");
static PyObject *py_qkv_attention_fwd(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    /* clang-format off */
    enum { TABLES = NUM_HEADS, LENS, RMS_OF, EPS, STARTS, LONGEST, SOFTMAX_SCALE, WINDOW_SIZE, K_SCALE, V_SCALE,
           NUM_SPLITS, PLAN, PAST_IS_CONSTANT, OUT, STREAM };
    /* clang-format on */
    py_call call;
    py_output out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_qkv_attention_fwd, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    pk_qk_norm_rope_store_call heads = {0};
    read_heads(&call, &heads);
    pk_attention_call request = {.out = &out.base, .is_causal = true};
    request.block_tables = py_call_tensor(&call, TABLES);
    request.context_lens = py_call_tensor(&call, LENS);
    heads.rms_of = py_call_optional(&call, RMS_OF);
    heads.eps = py_call_double(&call, EPS, 1e-6);
    request.cu_seqlens_q = py_call_optional(&call, STARTS);
    request.max_seqlen_q = py_call_int(&call, LONGEST, INT64_MAX);
    double scale;
    request.softmax_scale = read_scale(&call, SOFTMAX_SCALE, &scale);
    read_window(&call, WINDOW_SIZE, &request);
    heads.k_scale = py_call_scale(&call, K_SCALE);
    heads.v_scale = py_call_scale(&call, V_SCALE);
    read_split(&call, NUM_SPLITS, &request);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_qkv_attention_fwd(&heads, &request, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}

PyMethodDef py_cache_functions[] = {
    PY_METHOD("store_kvcache", py_store_kvcache, store_kvcache_doc),
    PY_METHOD("paged_attention_fwd", py_paged_attention_fwd, paged_attention_fwd_doc),
    PY_METHOD("plan_attention", py_plan_attention, plan_attention_doc),
    PY_METHOD("copy_blocks", py_copy_blocks, copy_blocks_doc),
    PY_METHOD("swap_blocks", py_swap_blocks, swap_blocks_doc),
    PY_METHOD("merge_attention_states", py_merge_attention_states, merge_attention_states_doc),
    PY_METHOD("qk_norm_rope_store", py_qk_norm_rope_store, qk_norm_rope_store_doc),
    PY_METHOD("qkv_attention_fwd", py_qkv_attention_fwd, qkv_attention_fwd_doc),
    {NULL, NULL, 0, NULL},
};
