/* append.c - append_kvcache and rope_append_kvcache, for Python. The rules are those of csrc/ops/append.c. */
#include "py/call.h"
#include "py/docs.h"
#include "ops/append.h"

/* clang-format off */
#define APPEND_DOC \
    "    key, value: [num_tokens, num_kv_heads, head_dim] float32, float16 or bfloat16; the last dimension dense.\n" \
    PY_DOC_CACHES \
    "    block_tables: [num_seqs, max_blocks] int32, the pages of each sequence; in a negative one nothing is stored.\n" \
    "    cache_lens: [num_seqs] int32, keys that each has: new token i becomes key cache_lens + i.\n" \
    "    cu_seqlens: [num_seqs + 1] int32, where each sequence's new tokens begin and end; None: num_tokens / num_seqs\n" \
    "        each.\n" \
    "    key_starts: [num_seqs] int32, slots of a sequence's pages in front of its first key; None: 0.\n" PY_DOC_SCALES
#define APPEND_RANGES_DOC \
    "        A slot, page or position out of range is a ValueError on the CPU; CUDA skips the token and records it for\n" \
    "        check_errors().\n"
/* clang-format on */

/* What both calls begin with. */
static void read_append(py_call *call, int first, pk_append_call *request)
{
    enum { KEY, VALUE, K_CACHE, V_CACHE, BLOCK_TABLES, CACHE_LENS };
    request->key = py_call_tensor(call, first + KEY);
    request->value = py_call_tensor(call, first + VALUE);
    request->k_cache = py_call_writable(call, first + K_CACHE);
    request->v_cache = py_call_writable(call, first + V_CACHE);
    request->block_tables = py_call_tensor(call, first + BLOCK_TABLES);
    request->cache_lens = py_call_tensor(call, first + CACHE_LENS);
}

const char py_append_kvcache_doc[] = PyDoc_STR(
    "append_kvcache($module, key, value, k_cache, v_cache, block_tables, cache_lens, *, cu_seqlens=None, "
    "key_starts=None, k_scale=None, v_scale=None, stream=None)\n--\n\n"
    "Writes new keys and values after those that each sequence has in its pages, in place.\n"
    "\n"
    "Args:\n" APPEND_DOC PY_DOC_STREAM PY_DOC_RAISES APPEND_RANGES_DOC);
PyObject *py_append_kvcache(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    enum { CU_SEQLENS = 6, KEY_STARTS, K_SCALE, V_SCALE, STREAM };
    py_call call;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_append_kvcache, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    pk_append_call request = {0};
    read_append(&call, 0, &request);
    request.cu_seqlens = py_call_optional(&call, CU_SEQLENS);
    request.key_starts = py_call_optional(&call, KEY_STARTS);
    request.k_scale = py_call_scale(&call, K_SCALE);
    request.v_scale = py_call_scale(&call, V_SCALE);
    PY_CALL_RUN(&call, pk_append_kvcache(&request, call.stream, &call.err));
    return py_call_end(&call, Py_NewRef(Py_None));
}

const char py_rope_append_kvcache_doc[] = PyDoc_STR(
    "rope_append_kvcache($module, q, cos, sin, key, value, k_cache, v_cache, block_tables, cache_lens, *, "
    "cu_seqlens_q=None, cu_seqlens=None, key_starts=None, rotary_starts=None, interleaved=False, q_at_start=False, "
    "k_scale=None, v_scale=None, out=None, stream=None)\n--\n\n"
    "append_kvcache of keys with rotary embedding, and queries with the same, in one pass.\n"
    "\n"
    "Args:\n"
    "    q: [num_q_tokens, num_q_heads, head_dim] of key's dtype.\n"
    "    cos, sin: [max_positions, rotary_dim / 2] of key's dtype or float32. rotary_dim is at most head_dim; the\n"
    "        dimensions beyond it stay as they are.\n" APPEND_DOC
    "    cu_seqlens_q: [num_seqs + 1] int32, like cu_seqlens, of q.\n"
    "    rotary_starts: [num_seqs] int32, the position of each sequence's first new token and first query; None:\n"
    "        cache_lens.\n"
    "    interleaved: False pairs dimension i with i + rotary_dim / 2, True pairs 2 i with 2 i + 1 (RoFormer, Su et\n"
    "        al. 2021).\n"
    "    q_at_start: True gives all queries of a sequence that first position; otherwise they follow one by one.\n" PY_DOC_OUT
        PY_DOC_STREAM
    "\n"
    "Returns:\n"
    "    The queries, [num_q_tokens, num_q_heads, head_dim]. Rows that no sequence owns are not written.\n" PY_DOC_RAISES
        APPEND_RANGES_DOC "        Such a query becomes 0.\n");
PyObject *py_rope_append_kvcache(PyObject *module, PyObject *const *args, Py_ssize_t nargs, PyObject *kwnames)
{
    /* clang-format off */
    enum { Q, COS, SIN, KEY, CU_SEQLENS_Q = 9, CU_SEQLENS, KEY_STARTS, ROTARY_STARTS, INTERLEAVED, Q_AT_START, K_SCALE,
           V_SCALE, OUT, STREAM };
    /* clang-format on */
    py_call call;
    py_output out;
    if (py_call_begin(&call, py_module_state(module), PY_SIG_rope_append_kvcache, STREAM, args, nargs, kwnames) < 0)
        return NULL;
    pk_append_call request = {.out = &out.base};
    request.q = py_call_tensor(&call, Q);
    request.cos = py_call_tensor(&call, COS);
    request.sin = py_call_tensor(&call, SIN);
    read_append(&call, KEY, &request);
    request.cu_seqlens_q = py_call_optional(&call, CU_SEQLENS_Q);
    request.cu_seqlens = py_call_optional(&call, CU_SEQLENS);
    request.key_starts = py_call_optional(&call, KEY_STARTS);
    request.rotary_starts = py_call_optional(&call, ROTARY_STARTS);
    request.is_interleaved = py_call_bool(&call, INTERLEAVED, false);
    request.q_is_at_start = py_call_bool(&call, Q_AT_START, false);
    request.k_scale = py_call_scale(&call, K_SCALE);
    request.v_scale = py_call_scale(&call, V_SCALE);
    py_call_output(&call, OUT, &out);
    PY_CALL_RUN(&call, pk_append_kvcache(&request, call.stream, &call.err));
    return py_call_end(&call, py_output_result(&out));
}
