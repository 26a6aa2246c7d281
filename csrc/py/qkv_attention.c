/* qkv_attention.c - qkv_attention_fwd, for Python: bind, make views, call. The rules about shapes are in
 * csrc/ops/qkv_attention.c. */
#include "py/attention.h"
#include "py/docs.h"
#include "py/rope.h"
#include "ops/qkv_attention.h"

const char py_qkv_attention_fwd_doc[] = PyDoc_STR(
    "qkv_attention_fwd($module, qkv, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slot_mapping, "
    "block_tables, context_lens, *, rms_of=None, eps=1e-06, cu_seqlens_q=None, max_seqlen_q=None, softmax_scale=None, "
    "window_size=(-1, -1), k_scale=None, v_scale=None, num_splits=0, plan=None, past_is_constant=False, out=None, "
    "stream=None)\n--\n\n"
    "All that attention does after a fused projection: q = qk_norm_rope_store(qkv, ...), which stores the new keys\n"
    "and values, then causal paged_attention_fwd(q, ...). For few sequences with one token each, a GPU does both in\n"
    "one kernel, which can start while the projection still runs: up to 112 sequences (96 over an fp8 cache) with at\n"
    "most 2,048 elements of queries a token, up to 8 with more.\n"
    "\n"
    "The arguments are those of the two operations, but for these.\n"
    "\n"
    "Args:\n"
    "    slot_mapping: where a token's slot is not negative, it must be its own in block_tables. A row of padding may\n"
    "        have any slot that is not read here; what out has for it is undefined then.\n"
    "    k_scale, v_scale: one number, or one per KV head.\n"
    "    plan: what plan_attention returned for q.\n"
    "    past_is_constant: True promises the same of positions, slot_mapping, cos_sin, q_weight and k_weight as of\n"
    "        block_tables.\n" PY_DOC_OUT PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    out, [num_tokens, num_q_heads, head_dim].\n" PY_DOC_RAISES
    "        An id out of range is treated as by the two operations.\n");
PyObject *py_qkv_attention_fwd(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
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
    py_call_heads(&call, &heads);
    pk_attention_call request = {.out = &out.base, .is_causal = true};
    request.block_tables = py_call_tensor(&call, TABLES);
    request.context_lens = py_call_tensor(&call, LENS);
    heads.rms_of = py_call_optional(&call, RMS_OF);
    heads.eps = py_call_double(&call, EPS, 1e-6);
    request.cu_seqlens_q = py_call_optional(&call, STARTS);
    request.max_seqlen_q = py_call_int(&call, LONGEST, INT64_MAX);
    double scale;
    request.softmax_scale = py_call_softmax_scale(&call, SOFTMAX_SCALE, &scale);
    py_call_window(&call, WINDOW_SIZE, &request);
    heads.k_scale = py_call_scale(&call, K_SCALE);
    heads.v_scale = py_call_scale(&call, V_SCALE);
    py_call_split(&call, NUM_SPLITS, &request);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_qkv_attention_fwd(&heads, &request, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}
