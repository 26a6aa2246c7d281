/* rope.c - qk_norm_rope_store, for Python: bind, make views, call. The rules about shapes are in csrc/ops/rope.c. */
#include "py/rope.h"
#include "py/docs.h"

void py_call_heads(py_call *call, pk_qk_norm_rope_store_call *request)
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

const char py_qk_norm_rope_store_doc[] = PyDoc_STR(
    "qk_norm_rope_store($module, qkv, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slot_mapping, *, "
    "rms_of=None, eps=1e-06, k_scale=None, v_scale=None, q_out=None, stream=None)\n--\n\n"
    "What stands between a fused projection and attention, in one pass: RMS norm of every head of q and k, rotary\n"
    "embedding, k and v into their pages.\n"
    "\n"
    "Args:\n"
    "    qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim] float32, float16 or bfloat16.\n"
    "    q_weight, k_weight: [head_dim] of qkv's dtype, or both None for no norm.\n"
    "    cos_sin: [max_positions, head_dim] float32: the cosines of all pairs, then the sines. Dimension i is paired\n"
    "        with i + head_dim / 2 (RoFormer, Su et al. 2021, in the order of Llama and Qwen).\n"
    "    positions: [num_tokens] int32, less than max_positions.\n" PY_DOC_CACHES PY_DOC_SLOTS
    "    rms_of: [num_tokens, any] of qkv's dtype: the rows of qkv are first divided by sqrt(mean(rms_of^2) + eps) of\n"
    "        theirs, which is what linear(hidden, weight) lacks of linear(rms_norm(hidden), weight), with hidden as\n"
    "        rms_of.\n"
    "    eps: of all these norms.\n" PY_DOC_SCALES
    "    q_out: [num_tokens, num_q_heads, head_dim] contiguous; left out, a new tensor in qkv's framework.\n" PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    The queries, q_out.\n" PY_DOC_RAISES
    "        A slot or a position out of range is a ValueError on the CPU; CUDA skips the token and records it for\n"
    "        check_errors().\n");
PyObject *py_qk_norm_rope_store(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { RMS_OF = NUM_HEADS, EPS, K_SCALE, V_SCALE, Q_OUT, STREAM };
    py_call call;
    py_output q_out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_qk_norm_rope_store, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    pk_qk_norm_rope_store_call request = {.q_out = &q_out.base};
    py_call_heads(&call, &request);
    request.rms_of = py_call_optional(&call, RMS_OF);
    request.eps = py_call_double(&call, EPS, 1e-6);
    request.k_scale = py_call_scale(&call, K_SCALE);
    request.v_scale = py_call_scale(&call, V_SCALE);
    py_call_output(&call, Q_OUT, &q_out);
    PY_CALL_RUN(&call, pk_qk_norm_rope_store(&request, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&q_out));
}
